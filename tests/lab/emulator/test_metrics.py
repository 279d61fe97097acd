"""`/metrics` of an emulated instance."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from smetric.lab.emulator import prompt as tokenizer
from smetric.lab.emulator.call import EmulatedCall
from smetric.lab.emulator.instance import EmulatedInstance, EmulatedSettings
from smetric.lab.emulator.metrics import CONTENT_TYPE, REASONS, Histogram
from smetric.lab.engine import EngineConfig, SequenceRequest


def test_histogram_counts_value_in_every_bucket_above_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, times=3)
    histogram.observe(9.0)
    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 14.5


CAPTURES = Path(__file__).parents[2] / "data" / "vllm"
SETTINGS = EmulatedSettings(
    model="tiny", engine=EngineConfig(block_size=32, blocks=200, max_model_len=2048), time_scale=10
)


def families(page: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page)}


def value(page: bytes, name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels)
    return found[0]


def test_metrics_have_types_labels_and_buckets_of_vllm() -> None:
    head, _, page = (CAPTURES / "metrics_idle.http").read_text().partition("===== RESPONSE =====")[2].partition("\n\n")
    assert f"content-type: {CONTENT_TYPE}" in head
    real = families(page)
    ours = families(EmulatedInstance(SETTINGS).metrics.page().decode())

    def form(family: Metric) -> tuple[str, set[tuple[str, ...]], list[str]]:
        labels = {tuple(sorted(sample.labels)) for sample in family.samples}
        return family.type, labels, [sample.labels["le"] for sample in family.samples if "le" in sample.labels]

    wanted = {name for name in real if name.startswith(("vllm:", "process_start", "process_cpu"))}
    # vLLM has these only with a tool parser.
    wanted -= {name for name in wanted if name.startswith("vllm:tool_call_parser")}
    assert wanted <= ours.keys()
    for name in wanted - {"vllm:cache_config_info"}:
        assert form(ours[name]) == form(real[name]), name
    ours_config, real_config = (page["vllm:cache_config_info"].samples[0].labels for page in (ours, real))
    assert ours_config.keys() <= real_config.keys()
    for name in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching", "engine"):
        assert ours_config[name] == real_config[name]


def test_metrics_show_queue_cache_and_computed_tokens() -> None:
    instance = EmulatedInstance(SETTINGS)
    engine = instance.engine
    first = SequenceRequest(prompt_len=70, output_len=2, keys=[1, 2])
    engine.submit(first, 0.0)
    engine.start(0.0)
    engine.submit(SequenceRequest(prompt_len=70, output_len=2, keys=[1, 2]), 0.0)
    page = instance.metrics.page()
    labels = {"engine": "0", "model_name": "tiny"}
    assert value(page, "vllm:num_requests_running", **labels) == 1
    assert value(page, "vllm:num_requests_waiting", **labels) == 1
    assert value(page, "vllm:kv_cache_usage_perc", **labels) == 3 / 200
    instance.metrics.stepped(engine.finish(2.0), 2.0)
    engine.start(2.0)
    page = instance.metrics.page()
    assert value(page, "vllm:prefix_cache_queries_total") == 140
    assert value(page, "vllm:prefix_cache_hits_total") == 64
    assert value(page, "vllm:prompt_tokens_total") == 70
    assert value(page, "vllm:generation_tokens_total") == 1
    # At time scale 10, two model seconds are 0.2 real seconds.
    assert value(page, "vllm:time_to_first_token_seconds_sum") == 0.2
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.1") == 0
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.25") == 1


async def test_metrics_add_up_as_in_recorded_page() -> None:
    def adds_up(page: bytes) -> bool:
        """Return whether prompts are computed plus cached tokens, and steps are computed plus generated tokens."""
        prompt, generated = value(page, "vllm:prompt_tokens_total"), value(page, "vllm:generation_tokens_total")
        found = value(page, "vllm:prompt_tokens_cached_total")
        computed, cached, fetched = (
            value(page, "vllm:prompt_tokens_by_source_total", source=source)
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        )
        ended = sum(value(page, "vllm:request_success_total", finished_reason=reason) for reason in REASONS)
        return (
            prompt == computed + cached + fetched
            and found == cached == value(page, "vllm:prompt_tokens_cached_by_source_total", source="device")
            and value(page, "vllm:iteration_tokens_total_sum") == computed + generated
            and value(page, "vllm:request_params_max_tokens_count") == ended
            and 0 < found < prompt
        )

    answer = (CAPTURES / "metrics_load.http").read_text().partition("===== RESPONSE =====")[2]
    assert adds_up(answer.partition("\n\n")[2].encode())
    instance = EmulatedInstance(replace(SETTINGS, time_scale=100))
    prompts = [tokenizer.encode("word " * length) for length in (400, 800, 1600)]
    calls = [EmulatedCall(prompts=[prompt], model="tiny", limit=20, n=n) for prompt in prompts * 2 for n in (1, 2)]
    running = [instance.generate(call) for call in calls]
    await asyncio.sleep(0)
    instance.abort(running[0])  # its prompt is counted as a query and never computed
    for generation in running:
        while not generation.ended:
            await generation.changed()
    assert adds_up(instance.metrics.page())


def test_metrics_restart_with_new_counters_and_start_time() -> None:
    instance = EmulatedInstance(SETTINGS)
    engine = instance.engine
    engine.submit(SequenceRequest(prompt_len=70, output_len=1, keys=[1, 2]), 0.0)
    engine.start(0.0)
    engine.finish(1.0)
    assert engine.hit_length([1, 2]) == 64
    before = time.time()
    instance.reset()
    page = instance.metrics.page()
    assert value(page, "vllm:prompt_tokens_total") == 0
    assert value(page, "process_start_time_seconds") >= before
    assert instance.engine.hit_length([1, 2]) == 0

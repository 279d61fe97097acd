from __future__ import annotations

import time
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from smetric.emulator.instance import EmulatedInstance, InstanceSettings
from smetric.emulator.metrics import CONTENT_TYPE
from smetric.sim.engine import EngineConfig, SequenceRequest

CAPTURE = Path(__file__).parent.parent / "data" / "vllm" / "metrics_idle.http"
SETTINGS = InstanceSettings(
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


def test_every_metric_of_vllm_is_there_with_its_type_labels_and_buckets() -> None:
    head, _, page = CAPTURE.read_text().partition("===== RESPONSE =====")[2].partition("\n\n")
    assert f"content-type: {CONTENT_TYPE}" in head
    real = families(page)
    ours = families(EmulatedInstance(SETTINGS).metrics.page().decode())

    def form(family: Metric) -> tuple[str, set[tuple[str, ...]], list[str]]:
        labels = {tuple(sorted(sample.labels)) for sample in family.samples}
        return family.type, labels, [sample.labels["le"] for sample in family.samples if "le" in sample.labels]

    wanted = {name for name in real if name.startswith(("vllm:", "process_start", "process_cpu"))}
    # Made only where a tool parser is configured.
    wanted -= {name for name in wanted if name.startswith("vllm:tool_call_parser")}
    assert wanted <= ours.keys()
    for name in wanted - {"vllm:cache_config_info"}:
        assert form(ours[name]) == form(real[name]), name
    ours_config, real_config = (page["vllm:cache_config_info"].samples[0].labels for page in (ours, real))
    assert ours_config.keys() <= real_config.keys()
    for name in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "enable_prefix_caching", "engine"):
        assert ours_config[name] == real_config[name]


def test_the_page_shows_the_queue_the_cache_and_what_was_computed() -> None:
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
    # Two seconds of the model are 0.2 s of a clock that runs ten times slower.
    assert value(page, "vllm:time_to_first_token_seconds_sum") == 0.2
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.1") == 0
    assert value(page, "vllm:time_to_first_token_seconds_bucket", le="0.25") == 1


def test_a_restart_starts_the_counters_and_the_start_time_again() -> None:
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

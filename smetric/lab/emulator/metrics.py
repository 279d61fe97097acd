"""`/metrics` of an emulated instance: vLLM's names, labels and buckets.

Times are seconds of the real clock, as a client measures them. Metrics of features that the model lacks (external and
multi-modal caches, FLOP estimates) stay 0; metrics of the Python process and of the HTTP server are left out.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from smetric.lab.engine import Engine, SequenceRequest, StepResult

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class Histogram:
    """Prometheus histogram that can count many equal values at once.

    Args:
        bounds: upper bounds, ascending, without +Inf.
    """

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count *value* *times* times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound, +Inf last, with the number of values up to it."""
        below = 0
        out = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            below += count
            out.append((bound, float(below)))
        return out


# fmt: off
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_STEP = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
# fmt: on

#: Finish reasons in vLLM.
REASONS = ("stop", "length", "abort", "error", "repetition")

#: Buckets (None: by the longest context) and help text of each histogram.
_HISTOGRAMS: dict[str, tuple[tuple[float, ...] | None, str]] = {
    "request_prompt_tokens": (None, "Number of prefill tokens processed."),
    "request_generation_tokens": (None, "Number of generation tokens processed."),
    "iteration_tokens_total": (_STEP, "Histogram of number of tokens per engine_step."),
    "request_max_num_generation_tokens": (None, "Histogram of maximum number of requested generation tokens."),
    "request_params_n": (_FEW, "Histogram of the n request parameter."),
    "request_params_max_tokens": (None, "Histogram of the max_tokens request parameter."),
    "time_to_first_token_seconds": (_TTFT, "Histogram of time to first token in seconds."),
    "inter_token_latency_seconds": (_ITL, "Histogram of inter-token latency in seconds."),
    "request_time_per_output_token_seconds": (_ITL, "Histogram of time_per_output_token_seconds per request."),
    "e2e_request_latency_seconds": (_LATENCY, "Histogram of e2e request latency in seconds."),
    "request_queue_time_seconds": (_LATENCY, "Histogram of time spent in WAITING phase for request."),
    "request_inference_time_seconds": (_LATENCY, "Histogram of time spent in RUNNING phase for request."),
    "request_prefill_time_seconds": (_LATENCY, "Histogram of time spent in PREFILL phase for request."),
    "request_decode_time_seconds": (_LATENCY, "Histogram of time spent in DECODE phase for request."),
    "request_num_preemptions": (_PREEMPTIONS, "Histogram of the number of times a request was preempted."),
    "request_prefill_kv_computed_tokens": (
        None,
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
    ),
}

#: Counters of features that the model lacks.
_ZEROES = {
    "estimated_flops_per_gpu": "Estimated number of floating point operations per GPU (for Model Flops Utilization "
    "calculations).",
    "estimated_read_bytes_per_gpu": "Estimated number of bytes read from memory per GPU (for Model Flops Utilization "
    "calculations).",
    "estimated_write_bytes_per_gpu": "Estimated number of bytes written to memory per GPU (for Model Flops Utilization "
    "calculations).",
    "external_prefix_cache_queries": "External prefix cache queries from KV connector cross-instance cache sharing, in "
    "terms of number of queried tokens.",
    "external_prefix_cache_hits": "External prefix cache hits from KV connector cross-instance cache sharing, in terms "
    "of number of cached tokens.",
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
}


class InstanceMetrics(Collector):
    """Metrics of one instance since its start.

    Args:
        engine: the engine model.
        model: name of the model.
        time_scale: model seconds in one real second.
        started_at: start, seconds since the epoch.
    """

    def __init__(self, engine: Engine, *, model: str, time_scale: float, started_at: float) -> None:
        self._engine = engine
        self._time_scale = time_scale
        self._started_at = started_at
        self._labels = {"engine": "0", "model_name": model}
        lengths = _one_two_five(engine.config.max_model_len)
        self._histograms = {name: Histogram(bounds or lengths) for name, (bounds, _) in _HISTOGRAMS.items()}
        self._ended = dict.fromkeys(REASONS, 0)
        #: Requests refused because the queue was full.
        self.rejected = 0

    def answered(self, n: int, limit: int | None, sequences: int) -> None:
        """Count a request of *sequences* sequences that has ended."""
        self._histograms["request_params_n"].observe(n)
        if limit is not None:
            self._histograms["request_params_max_tokens"].observe(limit, sequences)

    def stepped(self, result: StepResult, took_s: float) -> None:
        """Count a step of *took_s* model seconds."""
        histograms = self._histograms
        # Computed prompt tokens and generated tokens: a step that ends a prefill has both.
        histograms["iteration_tokens_total"].observe(result.tokens + len(result.first))
        for sequence in result.first:
            self._seconds("time_to_first_token_seconds", sequence.arrived_s, sequence.first_token_s)
        later = result.decoded - len(result.first)
        if later:
            histograms["inter_token_latency_seconds"].observe(took_s / self._time_scale, later)

    def ended(self, sequence: SequenceRequest, reason: str) -> None:
        """Count a sequence that has ended; *reason* is one of `REASONS`."""
        self._ended[reason] += 1
        histograms = self._histograms
        histograms["request_prompt_tokens"].observe(sequence.prompt_len)
        histograms["request_generation_tokens"].observe(sequence.emitted)
        histograms["request_max_num_generation_tokens"].observe(sequence.emitted)
        histograms["request_num_preemptions"].observe(sequence.preemptions)
        histograms["request_prefill_kv_computed_tokens"].observe(sequence.prompt_len - (sequence.hit_len or 0))
        self._seconds("e2e_request_latency_seconds", sequence.arrived_s, sequence.ended_s)
        self._seconds("request_queue_time_seconds", sequence.arrived_s, sequence.admitted_s)
        self._seconds("request_inference_time_seconds", sequence.admitted_s, sequence.ended_s)
        self._seconds("request_prefill_time_seconds", sequence.admitted_s, sequence.first_token_s)
        self._seconds("request_decode_time_seconds", sequence.first_token_s, sequence.ended_s)
        if sequence.emitted > 1 and sequence.first_token_s is not None and sequence.ended_s is not None:
            mean = (sequence.ended_s - sequence.first_token_s) / (sequence.emitted - 1)
            histograms["request_time_per_output_token_seconds"].observe(mean / self._time_scale)

    def page(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics for the exposition."""
        engine, totals = self._engine, self._engine.totals
        waiting, cached = len(engine.waiting), totals.cached
        usage = engine.cache.used / engine.cache.capacity
        yield GaugeMetricFamily(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            value=self._started_at,
        )
        yield CounterMetricFamily(
            "process_cpu_seconds", "Total user and system CPU time spent in seconds.", value=time.process_time()
        )
        for name, text, value in (
            ("num_requests_running", "Number of requests in model execution batches.", len(engine.running)),
            ("num_requests_waiting", "Number of requests waiting to be processed.", waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage),
        ):
            yield self._gauge(name, text, {"": value})
        reasons = {"capacity": waiting, "deferred": 0}
        yield self._gauge(
            "num_requests_waiting_by_reason", "Number of waiting requests by reason.", reasons, label="reason"
        )
        yield self._gauge(
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
            "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            label="sleep_state",
        )
        for name, text, value in (
            ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", totals.queries),
            ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", totals.hits),
            ("num_preemptions", "Cumulative number of preemption from the engine.", totals.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", totals.prompt),
            ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", cached),
            ("generation_tokens", "Number of generation tokens processed.", totals.generated),
            *((name, text, 0) for name, text in _ZEROES.items()),
        ):
            yield self._counter(name, text, {"": value})
        yield self._counter(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            {"local_compute": totals.prompt - cached, "local_cache_hit": cached, "external_kv_transfer": 0},
            label="source",
        )
        yield self._counter(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens by the cache tier that supplied them.",
            {"device": cached, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0},
            label="source",
        )
        text = "Count of successfully processed requests."
        yield self._counter("request_success", text, self._ended, label="finished_reason")
        refusals = CounterMetricFamily(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            labels=("model_name", "reason"),
        )
        for reason, value in (("max_num_queued_reqs", self.rejected), ("max_num_queued_tokens", 0)):
            refusals.add_metric((self._labels["model_name"], reason), value, created=self._started_at)
        yield refusals
        for name, (_, text) in _HISTOGRAMS.items():
            histogram = self._histograms[name]
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), histogram.buckets(), histogram.sum)
            family.add_sample(f"vllm:{name}_created", self._labels, self._started_at)
            yield family
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        config = self._engine.config
        facts = {
            "block_size": config.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.92,
            "kv_cache_max_concurrency": config.blocks * config.block_size / config.max_model_len,
            "kv_cache_size_tokens": config.blocks * config.block_size,
            "num_cpu_blocks": None,
            "num_gpu_blocks": config.blocks,
            "num_gpu_blocks_override": config.blocks,
            "prefix_caching_hash_algo": "xxh3",
            "sliding_window": None,
        }
        labels = {"engine": "0", **{name: str(value) for name, value in facts.items()}}
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=tuple(labels)
        )
        info.add_metric(tuple(labels.values()), 1.0)
        return info

    def _gauge(self, name: str, text: str, values: Mapping[str, float], *, label: str = "") -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return family

    def _counter(self, name: str, text: str, values: Mapping[str, float], *, label: str = "") -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value, created=self._started_at)
        return family

    def _seconds(self, name: str, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:
            self._histograms[name].observe((end - start) / self._time_scale)


def _one_two_five(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, … up to *largest*: vLLM's buckets of lengths."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > largest:
                return tuple(bounds)
            bounds.append(float(step * scale))
        scale *= 10

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.openmetrics import exposition

from smetric import names
from smetric.names import Metric
from smetric.telemetry.metrics import MOST_SERIES, Counts, Histograms

COUNTER = Metric("smetric_things_total", "counter", ("kind",), "Things.")
HISTOGRAM = Metric("smetric_seconds", "histogram", ("kind",), "Seconds.", (0.1, 1.0, 2.5))


def pages(registry: CollectorRegistry) -> list[str]:
    """The page in both formats, without what tells when series and exemplars were made."""
    both = generate_latest(registry).decode(), exposition.generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    return [re.sub(r"(?m)(_created\S*|# \{.*\} \S+) \S+$", r"\1", page) for page in both]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1000))))
def test_a_counter_looks_like_the_client_librarys(counted: list[tuple[str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counts = Counts(COUNTER)
    ours.register(counts)
    counter = Counter(COUNTER.name, COUNTER.doc, COUNTER.labels, registry=theirs)
    for kind, by in counted:
        counts.series[kind].value += by
        counter.labels(kind).inc(by)
    assert pages(ours) == pages(theirs)


VALUES = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5, 3.0]) | st.floats(0, 10)


@given(st.lists(st.tuples(st.sampled_from("ab"), VALUES, st.sampled_from(["", "abc"]))))
def test_a_histogram_looks_like_the_client_librarys(observed: list[tuple[str, float, str]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histograms = Histograms(HISTOGRAM)
    ours.register(histograms)
    histogram = TheirHistogram(
        HISTOGRAM.name, HISTOGRAM.doc, HISTOGRAM.labels, registry=theirs, buckets=HISTOGRAM.buckets
    )
    for kind, value, trace in observed:
        exemplar = {"trace_id": trace} if trace else None
        histograms.series[kind].observe(value, exemplar)
        histogram.labels(kind).observe(value, exemplar)
    assert pages(ours) == pages(theirs)


def test_a_series_without_labels_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    registry.register(Counts(Metric("smetric_errors_total", "counter", (), "Errors.")))
    registry.register(Histograms(Metric("smetric_wait_seconds", "histogram", (), "Waits.", (1.0,))))
    assert registry.get_sample_value("smetric_errors_total") == 0
    assert registry.get_sample_value("smetric_wait_seconds_count") == 0


def test_no_metric_has_more_series_than_told() -> None:
    counts, histograms = Counts(names.MIGRATIONS), Histograms(names.DECISION_SECONDS)
    for number in range(MOST_SERIES + 10):
        counts.series["p", "r", f"guard {number}"].value += 1
        histograms.series[f"policy {number}"].observe(0.001)
    (family,) = counts.collect()
    told = [sample for sample in family.samples if sample.name.endswith("_total")]
    assert len(told) == MOST_SERIES + 1
    assert sum(sample.value for sample in told) == MOST_SERIES + 10
    assert counts.series["other", "other", "other"].value == 10
    assert sum(histograms.series["other"].counts) == 10

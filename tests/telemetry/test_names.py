from __future__ import annotations

import re
from pathlib import Path

import smetric
from smetric.telemetry import names

TYPES = {"string", "int", "double", "bool"}
KINDS = {"counter", "gauge", "histogram"}


def test_no_attribute_is_both_a_leaf_and_a_prefix() -> None:
    every = [attribute.name for attribute in names.ATTRIBUTES]
    assert len(every) == len(set(every))
    assert not [(a, b) for a in every for b in every if b.startswith(a + ".")]


def test_every_name_has_a_type_and_a_sentence() -> None:
    for attribute in names.ATTRIBUTES:
        assert attribute.type in TYPES
        assert attribute.doc.endswith(".")
    for metric in names.METRICS:
        assert metric.kind in KINDS
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.doc.endswith(".")
    assert all(event.doc.endswith(".") for event in names.EVENTS)


def test_the_names_others_build_on_do_not_change_by_accident() -> None:
    ours = sorted(each.name for each in names.ATTRIBUTES if each.name.startswith("smetric."))
    assert ours == [
        "smetric.arm",
        "smetric.candidate.count",
        "smetric.candidate.eligible_count",
        "smetric.candidate.filter_reasons",
        "smetric.candidate.filtered_count",
        "smetric.candidate.tied_count",
        "smetric.candidates.json",
        "smetric.cursor",
        "smetric.decision.duration",
        "smetric.decision.id",
        "smetric.decision.origin",
        "smetric.decision.outcome",
        "smetric.decision.reason",
        "smetric.decision.summary",
        "smetric.guard.failed",
        "smetric.hold.duration",
        "smetric.instance.id",
        "smetric.instance.rank",
        "smetric.load.kv_usage",
        "smetric.load.requests",
        "smetric.load.running",
        "smetric.load.waiting",
        "smetric.lookup.duration",
        "smetric.policy.generation",
        "smetric.policy.hash",
        "smetric.policy.name",
        "smetric.policy.origin",
        "smetric.policy.params",
        "smetric.policy.source",
        "smetric.prefix.actual_hit_tokens",
        "smetric.prefix.hit_ratio",
        "smetric.prefix.hit_tokens",
        "smetric.prefix.source",
        "smetric.prompt.tokens",
        "smetric.prompt.tokens_source",
        "smetric.request.est_hit",
        "smetric.request.turn",
        "smetric.route",
        "smetric.rule",
        "smetric.score.chosen",
        "smetric.score.direction",
        "smetric.score.margin",
        "smetric.score.runner_up",
        "smetric.score.worst",
        "smetric.seed",
        "smetric.session.id_hash",
        "smetric.shadow.agrees",
        "smetric.shadow.instance.id",
        "smetric.shadow.policy",
        "smetric.shadow.regret",
        "smetric.shadow.session_diverged",
        "smetric.telemetry.chosen_age",
        "smetric.telemetry.max_age",
        "smetric.upstream.attempt",
        "smetric.upstream.result",
    ]


def test_every_log_event_is_in_the_table() -> None:
    written: set[str] = set()
    for path in Path(smetric.__file__).parent.rglob("*.py"):
        written |= set(re.findall(r"\blog\.(?:debug|info|warning|error|exception)\(\s*\"([^\"]+)\"", path.read_text()))
    assert written
    assert written <= {event.name for event in names.EVENTS}

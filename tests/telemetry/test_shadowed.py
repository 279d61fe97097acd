"""What policies in shadow would have chosen: in the attributes of the decision, and in a span each."""

from __future__ import annotations

import pytest

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.record import DecisionRecord, Shadowed
from smetric.policy import Decision, load
from smetric.telemetry.decision_text import attributes_of, note_of, span_of
from tests.telemetry.otlp_receiver import receiving
from tests.telemetry.samples import begin, record, telemetry

MOST = load("policy most\nroute argmax(requests) as most\n", VOCABULARY)


def shadowed(made: DecisionRecord, answer: str = names.DIFFERS, had_diverged: bool | None = None) -> Shadowed:
    assert made.decision is not None
    decided = MOST.decide(made.decision.snapshot, made.request, {}, 7)
    assert isinstance(decided, Decision)
    return Shadowed(MOST, 3, answer, decision=decided, regret=0.5, had_diverged=had_diverged)


UNKNOWN = Shadowed(MOST, 3, names.UNANSWERED, missing=("kv_usage",))


async def test_a_shadow_has_a_span_of_its_own_beside_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        app = telemetry({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})
        made = record(loads=(2, 1, 5))
        made.judge = lambda one: (shadowed(one), UNKNOWN)
        exchange = begin(app)
        exchange.decided(made)
        exchange.answering()
        exchange.end(200)
        await app.tracing.shutdown()
    (route,), shadows = receiver.named("route"), receiver.named("shadow")
    shown = route.attributes["output.value"].splitlines()
    assert "  shadow   most would choose gpu-2, regret 0.5" in shown
    assert "  shadow   most: not answerable: kv_usage not read" in shown
    assert [one.name for one in shadows] == ["shadow most"] * 2
    assert {one.span.parent_span_id for one in shadows} == {route.span.parent_span_id}
    assert route.attributes["smetric.decision.origin"] == "live"
    assert route.attributes["smetric.shadow.policy"] == "most, most"
    assert route.attributes["smetric.shadow.instance.id"] == "gpu-2, not answerable: kv_usage not read"
    assert route.attributes["smetric.shadow.regret"] == 0.5
    assert "smetric.shadow.agrees" not in route.attributes
    known, unknown = (one.attributes for one in shadows)
    assert known["smetric.decision.origin"] == unknown["smetric.decision.origin"] == "shadow"
    assert (known["smetric.instance.id"], known["smetric.shadow.agrees"]) == ("gpu-2", False)
    assert known["output.value"].startswith("most (shadow): ")
    assert "requests" in known["output.value"]
    assert unknown["output.value"] == "most (shadow): not answerable: kv_usage not read"
    assert "smetric.instance.id" not in unknown


def test_they_agree_where_all_of_them_do() -> None:
    made = record()
    alike = shadowed(made, answer=names.AGREES, had_diverged=False)
    other = shadowed(made, had_diverged=True)
    assert attributes_of(()) == {}
    assert attributes_of([alike])[names.SHADOW_AGREES.name] is True
    assert attributes_of([alike, other])[names.SHADOW_AGREES.name] is False
    assert attributes_of([alike])[names.SHADOW_DIVERGED.name] is False
    assert attributes_of([alike, other])[names.SHADOW_DIVERGED.name] is True


def test_texts_are_bounded() -> None:
    long = load(f"policy {'p' * 60}\nroute argmax(requests)\n", VOCABULARY)
    several = [Shadowed(long, 1, names.UNANSWERED, missing=("hit_len",))] * 8
    assert all(len(str(value)) <= 256 for value in attributes_of(several).values())
    about = span_of(shadowed(record(hits=[0] * 200, loads=[1] * 200)), top=32, limit=2000, ui_hints=True)
    assert all(len(str(value).encode()) <= 2000 for value in about.values())


def test_what_raises_is_said_without_more() -> None:
    failed = Shadowed(MOST, 1, names.SHADOW_FAILED)
    assert failed.choice == "error"
    assert span_of(failed, top=8, limit=2000, ui_hints=False)[names.SUMMARY.name] == "most (shadow): error"


def test_a_shadow_that_agrees_is_told_in_half_a_line_too() -> None:
    agreeing = shadowed(record(loads=(2, 1, 5)), names.AGREES)
    assert note_of(agreeing) == "most would choose gpu-2 too"

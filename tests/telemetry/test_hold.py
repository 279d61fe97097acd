"""What telemetry shows of a request that was held, or refused by an overloaded router."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.record import DecisionRecord
from smetric.policy import Decision, Outcome, Snapshot, load
from smetric.telemetry.exchange import Telemetry
from tests.telemetry.otlp_receiver import Receiver, receiving
from tests.telemetry.samples import begin, record, request, run_one, telemetry

HOLDING = load("policy holding\nhold for 2s when all(requests > 1) as full\nroute argmin(requests)\n", VOCABULARY)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def seldom(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    """Tracing that keeps only what is out of the ordinary."""
    given = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return telemetry(given)


def held(outcome: str = names.HELD) -> DecisionRecord:
    made = record()
    made.outcome, made.held_s = outcome, 0.25
    return made


async def test_a_request_that_was_held_is_always_traced_with_its_wait(seldom: Telemetry, receiver: Receiver) -> None:
    run_one(seldom, record())
    run_one(seldom, held())
    assert await seldom.tracing.shutdown()
    (hold,), (route,), (server,) = (receiver.named(name) for name in ("hold", "route", "POST"))
    assert hold.span.end_time_unix_nano - hold.span.start_time_unix_nano == 250_000_000
    assert hold.span.end_time_unix_nano == route.span.start_time_unix_nano
    assert hold.span.parent_span_id == server.span.span_id
    assert route.attributes["smetric.hold.duration"] == 0.25
    assert route.attributes["smetric.decision.outcome"] == "held"


async def test_the_hold_span_says_what_the_request_waited_for(seldom: Telemetry, receiver: Receiver) -> None:
    decision = HOLDING.decide(Snapshot(["a"], {"requests": [5.0]}, {}, {}, {}, 0.0), request(), {}, 7)
    assert isinstance(decision, Decision)
    by_rule = held()
    by_rule.held_by = decision
    run_one(seldom, by_rule)
    run_one(seldom, held())
    assert await seldom.tracing.shutdown()
    first, second = (one.attributes for one in receiver.named("hold"))
    assert (first["smetric.hold.reason"], first["smetric.rule"]) == ("rule", "full")
    assert first["output.value"] == first["smetric.decision.summary"] == "full: held, for 2 s in all at most"
    assert second["smetric.hold.reason"] == "place"
    assert second["smetric.hold.duration"] == 0.25


async def test_a_wait_for_a_place_alone_is_nothing_out_of_the_ordinary(seldom: Telemetry, receiver: Receiver) -> None:
    run_one(seldom, held(names.ROUTED))
    assert await seldom.tracing.shutdown()
    assert receiver.spans == []


async def test_a_client_that_left_while_held_leaves_the_rule_that_held_it(
    seldom: Telemetry, receiver: Receiver
) -> None:
    decision = HOLDING.decide(Snapshot(["a"], {"requests": [5.0]}, {}, {}, {}, 0.0), request(), {}, 7)
    assert isinstance(decision, Decision)
    assert (decision.outcome, decision.wait_s) == (Outcome.HOLD, 2.0)
    exchange = begin(seldom)
    exchange.decided(
        DecisionRecord(
            time_ns=10**18,
            outcome=names.HELD,
            request=request(),
            policy=HOLDING,
            generation=1,
            decision=decision,
            held_s=0.5,
        )
    )
    exchange.end(499, error_type="client_gone")
    assert await seldom.tracing.shutdown()
    (route,) = receiver.named("route")
    assert route.attributes["smetric.rule"] == "full"
    assert route.attributes["smetric.hold.duration"] == 0.5
    assert "smetric.instance.id" not in route.attributes


async def test_what_an_overloaded_router_refuses_is_not_traced_out_of_turn(
    seldom: Telemetry, receiver: Receiver
) -> None:
    begin(seldom).end(503, error_type=names.OVERLOADED)
    assert await seldom.tracing.shutdown()
    assert receiver.spans == []

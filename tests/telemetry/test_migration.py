from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.record import DecisionRecord, Migration
from smetric.policy import Decision, Snapshot, load
from smetric.telemetry.decisions import full
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.outcomes import migration_of
from tests.telemetry.otlp_receiver import Receiver, receiving
from tests.telemetry.samples import fleet, record, request, run_one, telemetry

OVERLOADED = (2, 30, 1)


def decided(source: str, snapshot: Snapshot, **fields: object) -> DecisionRecord:
    policy, asked = load(source, VOCABULARY), request(**fields)
    decision = policy.decide(snapshot, asked, {}, 1)
    assert isinstance(decision, Decision)
    made = DecisionRecord(
        time_ns=1, outcome=names.ROUTED, request=asked, policy=policy, generation=1, decision=decision
    )
    made.instance = next((one for one in fleet() if one.id == decision.instance), None)
    return made


def test_a_later_turn_that_leaves_the_warmest_instance_has_migrated() -> None:
    assert migration_of(record(loads=OVERLOADED), None) == Migration("gpu-1", "not_overloaded", 880)


def test_one_that_stays_and_a_first_turn_have_not() -> None:
    assert migration_of(record(), "gpu-0") is None  # where most of the prompt is, wherever it was last
    assert migration_of(record(loads=OVERLOADED, turn=0), "gpu-1") is None
    assert migration_of(record(loads=OVERLOADED, hits=(0, 0, 0)), "gpu-1") is None  # nothing is left behind
    assert migration_of(record(names.PINNED), "gpu-1") is None


def test_less_than_a_token_is_nothing_left_behind() -> None:
    source = "policy p\nroute argmin(requests) as calm\n"
    made = decided(source, Snapshot(["gpu-0", "gpu-1"], {"requests": [1.0, 2.0], "hit_len": [879.5, 880.0]}))
    assert migration_of(made, "gpu-1") is None


def test_a_hit_nobody_knows_is_no_hit_and_what_is_left_by_one_is_not_told() -> None:
    assert migration_of(record(loads=OVERLOADED, known=[True, False, True]), None) is None
    made = migration_of(record(loads=OVERLOADED, known=[True, True, False]), None)
    assert made is not None
    assert (made.source, made.left_tokens) == ("gpu-1", None)


def test_where_no_hit_was_looked_up_the_last_turn_says_where_it_was() -> None:
    source = "policy p\nroute rr_argmin(requests) as balance\n"
    made = decided(source, Snapshot(["gpu-0", "gpu-1", "gpu-2"], {"requests": [2.0, 3.0, 1.0]}))
    assert migration_of(made, "gpu-1") == Migration("gpu-1", names.NOT_PICKED, None)
    assert migration_of(made, "gpu-2") is None
    assert migration_of(made, None) is None
    assert migration_of(made, "gpu-9") == Migration("gpu-9", names.LEFT_OUT, None)


def test_a_filter_that_left_the_warmest_out_is_named() -> None:
    source = "policy p\nkeep requests < 9 as calm\nroute argmax(hit_len) as warm\n"
    made = decided(source, Snapshot(["gpu-0", "gpu-1"], {"requests": [2.0, 30.0], "hit_len": [10.0, 880.0]}))
    assert migration_of(made, None) == Migration("gpu-1", "calm", 870)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def never_sampled(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Telemetry]:
    def build(**options: Any) -> Telemetry:
        given = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_TRACES_SAMPLER": "always_off"}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        return telemetry(given, **options)

    return build


async def test_its_trace_is_kept_whatever_the_sampler_says_and_tells_it(
    never_sampled: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = never_sampled()
    run_one(app, record())
    with capture_logs() as lines:
        run_one(app, record(loads=OVERLOADED))
    assert await app.tracing.shutdown()
    (route,) = receiver.named("route")
    about = route.attributes
    assert about["smetric.migration.from"] == "gpu-1"
    assert about["smetric.instance.id"] == "gpu-2"
    assert "not_overloaded" in about["smetric.migration.guard"]
    assert about["smetric.migration.left_tokens"] == 880
    assert "moved    from gpu-1, which keeps 880 tokens more: not_overloaded" in about["output.value"]
    (said,) = [line for line in lines if line["event"] == "smetric.migration"]
    assert (said["from"], said["to"], said["rule"], said["left_tokens"]) == ("gpu-1", "gpu-2", "balance", 880)
    assert said["trace_id"] == route.span.trace_id.hex()
    access = next(line for line in lines if line["event"] == "request")
    assert (access["migrated_from"], access["left_tokens"]) == ("gpu-1", 880)


async def test_traces_of_migrations_need_not_be_kept(
    never_sampled: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = never_sampled(keep=("rejected",))
    run_one(app, record(loads=OVERLOADED))
    run_one(app, record(names.ERROR))
    run_one(app, record(names.REJECTED))
    assert await app.tracing.shutdown()
    assert [one.attributes["smetric.decision.outcome"] for one in receiver.named("route")] == ["rejected"]


@pytest.mark.parametrize(("over_parent", "outcomes"), [(True, ["routed", "rejected"]), (False, [])])
async def test_traces_are_kept_over_a_caller_that_does_not_record_unless_that_is_not_wanted(
    never_sampled: Callable[..., Telemetry], receiver: Receiver, over_parent: bool, outcomes: list[str]
) -> None:
    unsampled = (b"traceparent", b"00-%b-%b-00" % (b"4b" * 16, b"0f" * 8))
    app = never_sampled(keep_over_parent=over_parent)
    run_one(app, record(loads=OVERLOADED), unsampled)
    run_one(app, record(names.REJECTED), unsampled)
    run_one(app, record(names.REJECTED))
    assert await app.tracing.shutdown()
    routes = receiver.named("route")
    continued = [one for one in routes if one.span.trace_id == b"\x4b" * 16]
    assert [one.attributes["smetric.decision.outcome"] for one in continued] == outcomes
    assert len(routes) == len(outcomes) + 1


def test_it_is_counted_and_said_once_a_minute_for_each_source() -> None:
    app = telemetry()
    with capture_logs() as lines:
        for _ in range(3):
            made = record(loads=OVERLOADED)
            run_one(app, made)
        run_one(app, record(hits=(880, 0, 0), loads=(30, 2, 1)))
    assert [line["from"] for line in lines if line["event"] == "smetric.migration"] == ["gpu-1", "gpu-0"]
    assert made.migration is not None
    labels = {"policy": "sticky", "rule": "balance"}
    read = app.metrics.registry.get_sample_value
    assert read("smetric_migrations_total", labels | {"guard": made.migration.guard}) == 4
    assert read("smetric_migration_left_tokens_total", labels) == 4 * 880
    assert full(made)["migration"] == {"from": "gpu-1", "guard": made.migration.guard, "left_tokens": 880}

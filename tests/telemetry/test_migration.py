from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.telemetry.exchange import Telemetry
from tests.telemetry.otlp_receiver import Receiver, receiving
from tests.telemetry.samples import record, run_one, telemetry

OVERLOADED = (2, 30, 1)


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

"""What a source can cost: never more than the deadline, and never a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest
from structlog.testing import capture_logs

from smetric.fleet.instance import Instance
from smetric.log_limit import EVERY_S
from smetric.request.request import InferenceRequest, Usage
from smetric.sources.lookups import LookupDeadline, Lookups
from smetric.sources.source import Cells, Source
from tests.clock import Clock

HIT = frozenset({"hit_len"})


class Table(Source):
    """A source that knows the same of every prompt."""

    fills = HIT

    def __init__(self, name: str, *cells: float | None) -> None:
        self.name = name
        self.cells = cells
        self.told: list[str] = []

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        return {"hit_len": list(self.cells)}

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        self.told.append("prefilled")

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        self.told.append("settled")

    def forget(self, instance: Instance) -> None:
        self.told.append("forget")


class Broken(Table):
    """A source with a bug in everything."""

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        raise LookupError("no such thing")

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        raise LookupError

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        raise LookupError

    def forget(self, instance: Instance) -> None:
        raise LookupError


class BrokenLater(Table):
    """A source whose look-ups raise after a while."""

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        return self._later()

    async def _later(self) -> dict[str, Cells]:
        await asyncio.sleep(0)
        raise ExceptionGroup("several", [ValueError(), OSError()])


class Hanging(Table):
    """A source that never answers."""

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        return asyncio.Event().wait()  # type: ignore[return-value]


INSTANCES = [Instance("a", "http://a"), Instance("b", "http://b")]


def looking(*sources: Table, clock: Clock | None = None) -> tuple[Lookups, list[str]]:
    failed: list[str] = []
    deadline = LookupDeadline(0.05, 0.0, 0.05)
    return Lookups(sources, deadline=deadline, on_failed=failed.append, clock=clock or Clock()), failed


@pytest.mark.parametrize(
    "broken", [Broken("x"), BrokenLater("x"), Hanging("x")], ids=lambda source: type(source).__name__
)
async def test_a_source_that_fails_in_any_way_is_unknown_and_the_next_one_is_asked(broken: Table) -> None:
    lookups, failed = looking(Table("best", None, 48), broken, Table("last", 16, 16))
    answer = lookups.of(InferenceRequest(), HIT, INSTANCES)
    # Nothing is waited for that answers, or fails, at once.
    assert isinstance(answer, dict) is isinstance(broken, Broken)
    columns = answer if isinstance(answer, dict) else await answer
    assert columns["hit_len"].over(INSTANCES) == ([16, 48], ["last", "best"])
    assert failed == ([] if isinstance(broken, Hanging) else ["x"])


async def test_sources_that_hang_cost_one_deadline_together() -> None:
    loop = asyncio.get_running_loop()
    lookups, _ = looking(*(Hanging(name) for name in "uvwxyz"))
    started = loop.time()
    answer = lookups.of(InferenceRequest(), HIT, INSTANCES)
    assert not isinstance(answer, dict)
    columns = await answer
    assert columns["hit_len"].cells == [None, None]
    assert loop.time() - started < 0.2


async def test_a_client_that_leaves_is_no_failure_of_the_source() -> None:
    lookups, failed = looking(Hanging("x"))
    answer = lookups.of(InferenceRequest(), HIT, INSTANCES)
    assert not isinstance(answer, dict)
    task = asyncio.ensure_future(answer)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert failed == []


def test_what_one_source_does_when_it_is_told_something_keeps_nothing_from_the_others() -> None:
    table = Table("good")
    lookups, failed = looking(Broken("bad"), table)
    lookups.prefilled(InferenceRequest(), INSTANCES[0])
    lookups.settled(InferenceRequest(), INSTANCES[0], None)
    lookups.forget(INSTANCES[0])
    assert table.told == ["prefilled", "settled", "forget"]
    assert failed == ["bad"] * 3


def test_a_source_that_fails_on_and_on_is_logged_once_a_minute_and_counted_each_time() -> None:
    clock = Clock()
    lookups, failed = looking(Broken("bad"), clock=clock)
    with capture_logs() as logs:
        for _ in range(5):
            lookups.forget(INSTANCES[0])
        clock.now += EVERY_S
        lookups.forget(INSTANCES[0])
    assert [(line["event"], line["source"], line["kept_back"]) for line in logs] == [
        ("smetric.source.failed", "bad", 0),
        ("smetric.source.failed", "bad", 4),
    ]
    assert len(failed) == 6

"""Look-ups and events of sources: a source costs at most the deadline, and never a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.log_limit import EVERY_S
from smetric.request.request import InferenceRequest, Usage
from smetric.routing.router import Router
from smetric.sources.lookups import LookupDeadline, Lookups
from smetric.sources.source import Cells, Follower, Source
from tests.clock import Clock
from tests.fakes import routes_by

HIT = frozenset({"hit_len"})


class Table(Source):
    """Source with the same cells for every prompt."""

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
    """Source with a bug in everything."""

    def lookup(self, request: object, instances: object) -> dict[str, Cells]:
        raise LookupError("no such thing")

    def prefilled(self, request: object, instance: object) -> None:
        raise LookupError

    def settled(self, request: object, instance: object, usage: object) -> None:
        raise LookupError

    def forget(self, instance: object) -> None:
        raise LookupError


class BrokenLater(Table):
    """Source whose look-ups raise after a while."""

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        return self._later()

    async def _later(self) -> dict[str, Cells]:
        await asyncio.sleep(0)
        raise ExceptionGroup("several", [ValueError(), OSError()])


class Hanging(Table):
    """Source that never answers."""

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
async def test_lookup_asks_the_next_source_when_one_fails(broken: Table) -> None:
    lookups, failed = looking(Table("best", None, 48), broken, Table("last", 16, 16))
    answer = lookups.of(InferenceRequest(), HIT, INSTANCES)
    # A source that answers or fails at once is not awaited.
    assert isinstance(answer, dict) is isinstance(broken, Broken)
    columns = answer if isinstance(answer, dict) else await answer
    assert columns["hit_len"].over(INSTANCES) == ([16, 48], ["last", "best"])
    assert failed == ([] if isinstance(broken, Hanging) else ["x"])


async def test_lookup_bounds_hanging_sources_by_one_deadline() -> None:
    loop = asyncio.get_running_loop()
    late: list[InferenceRequest] = []
    lookups = Lookups(
        [Hanging(name) for name in "uvwxyz"],
        deadline=LookupDeadline(0.05, 0.0, 0.05),
        on_failed=lambda _: None,
        on_late=late.append,
    )
    started, request = loop.time(), InferenceRequest()
    answer = lookups.of(request, HIT, INSTANCES)
    assert not isinstance(answer, dict)
    columns = await answer
    assert columns["hit_len"].cells == [None, None]
    assert loop.time() - started < 0.2
    assert late == [request] * 6


async def test_lookup_does_not_count_a_disconnect_as_failure() -> None:
    lookups, failed = looking(Hanging("x"))
    answer = lookups.of(InferenceRequest(), HIT, INSTANCES)
    assert not isinstance(answer, dict)
    task = asyncio.ensure_future(answer)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert failed == []


def test_events_reach_other_sources_when_one_raises() -> None:
    table = Table("good")
    lookups, failed = looking(Broken("bad"), table)
    lookups.prefilled(InferenceRequest(), INSTANCES[0])
    lookups.settled(InferenceRequest(), INSTANCES[0], None)
    lookups.forget(INSTANCES[0])
    assert table.told == ["prefilled", "settled", "forget"]
    assert failed == ["bad"] * 3


def test_source_failures_are_counted_and_logged_once_a_minute() -> None:
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


# ── followers in the router ──────────────────────────────────────────────────


class Told(Follower):
    """Follower that records its events."""

    name = "told"
    describes = frozenset({"class_share"})

    def __init__(self) -> None:
        self.events: list[str] = []

    def describe(self, request: InferenceRequest) -> None:
        self.events.append("describe")

    def sent(self, request: InferenceRequest, lease: object) -> None:
        self.events.append("sent")

    def first_token(self, lease: object, seconds: float) -> None:
        self.events.append(f"first_token {seconds:g}")

    def forget(self, instance: Instance) -> None:
        self.events.append(f"forget {instance.id}")


def router_with(told: Follower, tmp_path: Path, text: str) -> Router:
    path = tmp_path / "p.policy"
    path.write_text(text)
    fleet = Fleet([Instance("a", "http://a")], VOCABULARY)
    return Router(fleet, routes_by(path), [told], rng=random.Random(1))


async def test_follower_receives_the_events_of_a_request(tmp_path: Path) -> None:
    told = Told()
    router = router_with(told, tmp_path, "policy p\nroute argmin(requests) when req.class_share > 0\nroute argmin(1)\n")
    routing = await router.route(InferenceRequest())
    assert routing.lease is not None
    router.lookups.first_token(routing.lease, 0.5)
    router.forget(router.fleet.instances[0])
    assert told.events == ["describe", "sent", "first_token 0.5", "forget a"]


async def test_follower_does_not_describe_what_no_policy_reads(tmp_path: Path) -> None:
    told = Told()
    await router_with(told, tmp_path, "policy p\nroute argmin(requests)\n").route(InferenceRequest())
    assert told.events == ["sent"]


async def test_follower_that_raises_fails_no_request(tmp_path: Path) -> None:
    class Broken(Told):
        def sent(self, request: InferenceRequest, lease: object) -> None:
            raise RuntimeError("no")

    routing = await router_with(Broken(), tmp_path, "policy p\nroute argmin(requests)\n").route(InferenceRequest())
    assert routing.outcome == "routed"


def test_follower_refuses_features_it_does_not_measure() -> None:
    with pytest.raises(NotImplementedError, match="told measures no qps"):
        Told().measure("qps", [])

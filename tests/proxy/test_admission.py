from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from smetric import names
from smetric.errors import Overloaded
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance, Scrape
from smetric.http.limits import TOO_SLOW
from smetric.http.transaction import Watchdog
from smetric.proxy.admission import (
    SLOW_STEP_S,
    STEP_BYTES,
    WAKE_INTERVAL_S,
    Admission,
    Permit,
    PermitState,
    Saturation,
    WaitingRoom,
)
from smetric.proxy.overload import AdmittedRequests, Level, Overload, Thresholds
from smetric.request.request import InferenceRequest
from tests.fakes import until

RETRY = (b"x-stainless-retry-count", b"1")
FAR = 60.0


class VirtualTime(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer when idle."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run *test* on a virtual clock."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        async def main() -> None:
            await test(*arguments, **named)

        with asyncio.Runner(loop_factory=VirtualTime) as runner:
            runner.run(main())

    return run


async def settled() -> None:
    """Let all tasks run until each waits for something."""
    for _ in range(8):
        await asyncio.sleep(0)


class FakeOverload(Overload):
    """Load of the router as a test sets it."""

    def __init__(self) -> None:
        super().__init__(Thresholds(1.0, 2.0), Thresholds(0.8, 0.9))

    def become(self, level: Level, *resources: str) -> None:
        self.load.bound()
        self.level, self.resources = level, list(resources) if level else []


class Client:
    """A request on its way through admission: it is decided by *plan*, then served until `finish`.

    Args:
        lobby: the admission.
        plan: its decisions: seconds to be held, or an error; after them, or for None, it is routed.
        decide_s: duration of each decision.
    """

    def __init__(self, lobby: Lobby, plan: list[float | Exception | None], decide_s: float, **fields: Any) -> None:
        self.lobby = lobby
        self.plan = plan
        self.decide_s = decide_s
        self.permit: Permit = lobby.admit(size=fields.pop("size", 0))
        self.request = InferenceRequest(**fields)
        self.is_deciding = self.is_served = False
        self.decisions = 0
        self.error: Exception | None = None
        self.served = asyncio.Event()
        self.finished = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        router: Any = self
        try:
            await self.permit.route(router, self.request, exclude=(), leased=True)
            self.is_served = True
            self.lobby.order.append(self)
            self.served.set()
            await self.finished.wait()
        except (Overloaded, ValueError) as error:
            self.error = error
        finally:
            self.is_served = False
            self.permit.end()

    async def route(self, _: InferenceRequest, **__: object) -> Any:
        self.decisions += 1
        self.is_deciding = True
        try:
            if self.decide_s:
                await asyncio.sleep(self.decide_s)
        finally:
            self.is_deciding = False
        match self.plan.pop(0) if self.plan else None:
            case Exception() as error:
                raise error
            case None:
                return SimpleNamespace(outcome="routed")
            case wait_s:
                return SimpleNamespace(outcome=names.HELD, decision=SimpleNamespace(wait_s=wait_s))

    async def finish(self) -> None:
        self.finished.set()
        await asyncio.gather(self.task, return_exceptions=True)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    @property
    def state(self) -> PermitState:
        return self.permit.state


class Lobby:
    """Admission with counters of what it reports."""

    def __init__(
        self, *, slots: int = 0, wait_s: float = 1.0, most: int = 10, most_bytes: int = 1000, bodies: int = 1 << 20
    ) -> None:
        self.now = 0.0
        self.refused: Counter[str] = Counter()
        self.retries: Counter[bool] = Counter()
        self.overload = FakeOverload()
        self.room = WaitingRoom(slots=slots, wait_s=wait_s, most=most, most_bytes=most_bytes)
        self.admission = Admission(
            most_bytes=bodies,
            room=self.room,
            overload=self.overload,
            on_refused=lambda reason: self.refused.update([reason]),
            on_retry=lambda admitted: self.retries.update([admitted]),
            rng=random.Random(7),
            clock=lambda: self.now,
        )
        #: Clients in the order in which they were routed.
        self.order: list[Client] = []

    def admit(self, *headers: tuple[bytes, bytes], size: int | None = None) -> Permit:
        length = [] if size is None else [(b"content-length", b"%d" % size)]
        return self.admission.admit([(b"host", b"x"), *length, *headers])

    def refusal(self, *headers: tuple[bytes, bytes], size: int | None = None) -> Overloaded:
        with pytest.raises(Overloaded) as refused:
            self.admit(*headers, size=size)
        return refused.value

    def client(self, *plan: float | Exception | None, decide_s: float = 0.0, **fields: Any) -> Client:
        return Client(self, list(plan), decide_s, **fields)

    async def clients(self, count: int, *plan: float | None, **fields: Any) -> list[Client]:
        clients = [self.client(*plan, **fields) for _ in range(count)]
        await settled()
        return clients

    def counts(self) -> tuple[int, int, int]:
        return self.room.slots_taken, self.room.size, self.room.bytes


# Bodies and the router's own load


def test_admission_refuses_a_body_above_the_bound_by_its_announced_length() -> None:
    lobby = Lobby(bodies=1000)
    first = lobby.admit(size=600)
    refused = lobby.refusal(size=401)
    assert (refused.status, refused.kind, refused.reason) == (503, "overloaded", "bytes")
    assert lobby.refused == {"bytes": 1}
    lobby.admit(size=400)
    first.end()
    lobby.admit(size=600)


def test_announced_body_counts_with_one_step_until_it_arrives() -> None:
    lobby = Lobby(bodies=4 * STEP_BYTES)
    lobby.admit(size=4 * STEP_BYTES)
    for _ in range(3):
        lobby.admit(size=STEP_BYTES)
    assert lobby.admission.bytes == 4 * STEP_BYTES
    assert lobby.refusal(size=1).reason == "bytes"


def test_large_bodies_leave_a_part_of_the_bytes_to_small_ones() -> None:
    lobby = Lobby(bodies=16 * STEP_BYTES)
    first = lobby.admit(size=16 * STEP_BYTES)  # alone it may take them all
    assert lobby.refusal(size=14 * STEP_BYTES).reason == "bytes"
    second = lobby.admit(size=13 * STEP_BYTES)
    first.grow(13 * STEP_BYTES)
    with pytest.raises(Overloaded):
        second.grow(STEP_BYTES + 1)
    for _ in range(2):
        lobby.admit(size=STEP_BYTES)
    assert lobby.refusal(size=1).reason == "bytes"


@contextlib.asynccontextmanager
async def uploading(lobby: Lobby, size: int, cut: list[str], name: str) -> AsyncIterator[Permit]:
    """A request whose body of *size* bytes is arriving; its *name* is added to *cut* if it is cut off."""
    admitted: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        task = asyncio.current_task()
        assert task is not None
        watchdog = Watchdog(task)
        permit = lobby.admission.admit([(b"content-length", b"%d" % size)], reading=watchdog)
        admitted.set_result(permit)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if watchdog.expired == TOO_SLOW:
            cut.append(name)
        permit.end()

    task = asyncio.create_task(read())
    yield await admitted
    task.cancel()
    await task


async def test_slowest_body_is_cut_off_if_there_is_no_room() -> None:
    lobby, cut, large = Lobby(bodies=64 * STEP_BYTES), list[str](), 8 * STEP_BYTES

    def more_than_is_left() -> int:
        return 56 * STEP_BYTES - lobby.admission.bytes + 1

    async with (
        uploading(lobby, large, cut, "silent") as silent,
        uploading(lobby, large, cut, "slow") as slow,
        uploading(lobby, 40 * STEP_BYTES, cut, "fast") as fast,
    ):
        for permit in (silent, slow, fast):
            permit.grow(large)
        assert lobby.refusal(size=more_than_is_left()).reason == "bytes", "all have just begun"
        for nth in range(4, 8):
            lobby.now += 0.9 * SLOW_STEP_S
            slow.grow(large + nth * STEP_BYTES // 4)
            fast.grow(large + nth * STEP_BYTES)
        for expected in (["silent"], ["silent", "slow"]):
            lobby.admit(size=more_than_is_left())
            await until(lambda expected=expected: cut == expected)  # type: ignore[misc]
        assert lobby.refusal(size=more_than_is_left()).reason == "bytes"
        assert list(lobby.admission.uploads) == [fast]
    assert not lobby.admission.uploads


async def test_slow_bodies_are_cut_off_only_if_that_makes_enough_room() -> None:
    lobby, cut = Lobby(bodies=16 * STEP_BYTES), list[str]()
    lobby.admit(size=14 * STEP_BYTES).grow(13 * STEP_BYTES)  # has arrived
    async with contextlib.AsyncExitStack() as stack:
        for nth, size in enumerate((0, 100, 0, 200, 300)):
            await stack.enter_async_context(uploading(lobby, size, cut, f"{nth}"))
        lobby.now += SLOW_STEP_S
        assert lobby.refusal(size=STEP_BYTES + 1).reason == "bytes"
        taken = lobby.admission.bytes
        small = [lobby.admit(size=STEP_BYTES) for _ in range(2)]
        assert lobby.admission.bytes == taken + 2 * STEP_BYTES
        lobby.admit(size=STEP_BYTES - 350)
        await until(lambda: bool(cut))
        assert cut == ["1", "3"], "the slowest, as many as are needed, and none without bytes"
        assert [permit.size for permit in lobby.admission.uploads] == [0, 0, 300]
        assert small


async def test_slow_bodies_make_room_for_one_that_needs_all_bytes() -> None:
    lobby, cut = Lobby(bodies=16 * STEP_BYTES), list[str]()
    async with uploading(lobby, 100, cut, "slow"):
        lobby.now += SLOW_STEP_S
        lobby.admit(size=16 * STEP_BYTES)
        await until(lambda: cut == ["slow"])


async def test_slow_bodies_are_not_cut_off_for_a_request_without_a_slot() -> None:
    lobby, cut = Lobby(slots=1, most=0, bodies=1000), list[str]()
    async with uploading(lobby, 900, cut, "slow"):
        lobby.now += SLOW_STEP_S
        (served,) = await lobby.clients(1)
        assert lobby.refusal(size=200).reason == "in_flight"
        assert len(lobby.admission.uploads) == 1
        await served.finish()
    assert not cut


def test_body_of_unknown_length_grows_in_steps_up_to_the_bound() -> None:
    lobby = Lobby(bodies=2 * STEP_BYTES)
    permit = lobby.admit()
    assert permit.size == 0
    for received in (10, STEP_BYTES):
        permit.grow(received)
        assert permit.size == STEP_BYTES
    permit.grow(STEP_BYTES + 1)
    with pytest.raises(Overloaded):
        permit.grow(2 * STEP_BYTES + 1)
    permit.end()
    permit.end()
    assert (lobby.admission.bytes, lobby.admission.under_way) == (0, 0)


def test_body_that_is_let_go_makes_room_while_its_answer_streams() -> None:
    lobby = Lobby(bodies=1000)
    permit = lobby.admit(size=1000)
    permit.settle(0)
    lobby.admit(size=1000)
    permit.end()
    assert (lobby.admission.bytes, lobby.admission.under_way) == (1000, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * STEP_BYTES)), max_size=40))
def test_admission_counts_the_bytes_of_all_bodies(steps: list[tuple[int, int]]) -> None:
    lobby = Lobby(bodies=8 * STEP_BYTES)
    permits: list[Permit] = []
    for kind, size in steps:
        try:
            if kind == 0 or not permits:
                permits.append(lobby.admit(size=size))
            elif kind == 1:
                permits[-1].grow(size)
            elif kind == 2:
                permits[-1].settle(min(size, permits[-1].size))
            else:
                permits.pop(0).end()
        except Overloaded:
            pass
        assert lobby.admission.bytes == sum(permit.size for permit in permits) <= 8 * STEP_BYTES
        assert lobby.admission.under_way == len(permits)
    for permit in permits:
        permit.end()
    assert (lobby.admission.bytes, lobby.admission.under_way) == (0, 0)


def test_soft_overload_admits_no_more_than_are_under_way_and_no_retry() -> None:
    lobby = Lobby()
    under_way = [lobby.admit() for _ in range(3)]
    lobby.overload.become(Level.SOFT, "memory")
    assert lobby.refusal().reason == "memory"
    under_way.pop().end()
    assert lobby.refusal(RETRY).status == 503
    again = lobby.admit()
    assert lobby.refusal().status == 503
    for permit in (*under_way, again):
        permit.end()
    lobby.overload.become(Level.CALM)
    assert [lobby.admit(RETRY) for _ in range(5)]


def test_shortage_admits_as_many_as_were_under_way_in_the_last_seconds() -> None:
    lobby = Lobby()
    permits = [lobby.admit() for _ in range(4)]
    for _ in range(10):
        lobby.overload.load.turn(1.0, is_late=False)
    for permit in permits:
        permit.end()
    lobby.overload.become(Level.SOFT, "memory")
    assert [lobby.admit() for _ in range(4)]
    assert lobby.refusal().reason == "memory"


def test_late_loop_bounds_new_requests_and_not_open_streams() -> None:
    lobby, load = Lobby(), AdmittedRequests()
    lobby.admission.load = lobby.overload.load = load
    streams = [lobby.admit() for _ in range(50)]
    load.turn(10.0, is_late=False)
    lobby.overload.become(Level.SOFT, "lag")
    assert lobby.admit(), "no bound yet"
    load.turn(1.0, is_late=True)
    assert [lobby.admit() for _ in range(5)]
    assert lobby.refusal().reason == "lag"
    for permit in streams:
        permit.end()
    assert lobby.refusal().reason == "lag"


def test_shortage_binds_also_while_the_loop_is_late() -> None:
    lobby = Lobby()
    lobby.overload.load.turn(1.0, is_late=True)
    lobby.overload.load.pace = 2.0
    first = lobby.admit()
    lobby.overload.become(Level.SOFT, "lag", "files")
    assert lobby.refusal().reason == "files", "within the pace"
    assert lobby.refusal(RETRY).reason == "lag"
    lobby.overload.load.most_under_way = 2.0
    second = lobby.admit()
    first.end()
    assert lobby.refusal().reason == "lag", "within the number"
    second.end()


def test_hard_overload_admits_one_request_at_a_time() -> None:
    lobby = Lobby()
    lobby.overload.become(Level.HARD, "files")
    only = lobby.admit()
    assert {lobby.refusal().reason, lobby.refusal(RETRY).reason} == {"files"}
    only.end()
    lobby.admit()


def test_retries_of_clients_are_counted_apart_from_new_requests() -> None:
    lobby = Lobby(bodies=10)
    lobby.admit((b"x-stainless-retry-count", b"0"), size=1)
    lobby.admit(size=1)
    assert lobby.retries == {}
    lobby.admit(RETRY, size=1)
    lobby.refusal(RETRY, size=11)
    assert lobby.retries == {True: 1, False: 1}


def test_refusals_spread_the_times_of_retries() -> None:
    lobby = Lobby(bodies=0)
    waits = [lobby.refusal(size=1).retry_after_s or 0.0 for _ in range(100)]
    assert 1.0 <= min(waits) < 1.2
    assert 2.8 < max(waits) <= 3.0


# The waiting room


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), max_size=12))
@virtual_time
async def test_lane_is_served_by_priority_then_arrival(requests: list[tuple[float, bool]]) -> None:
    lobby = Lobby(most=100)
    held = [lobby.client(FAR, priority=priority) for priority, _ in requests]
    await settled()
    for client, (_, leaves) in zip(held, requests, strict=True):
        if leaves:
            client.task.cancel()
    lobby.room.load_changed()
    await asyncio.sleep(1.0)
    stayed = [client for client in held if not client.task.done()]
    assert lobby.order == sorted(stayed, key=lambda client: -client.request.priority)


@virtual_time
async def test_room_bounds_requests_and_bytes() -> None:
    lobby = Lobby(most=3, most_bytes=100)
    first, too_large = lobby.client(FAR, FAR, size=60), lobby.client(FAR, size=41)
    await settled()
    assert (first.state.is_held, too_large.is_served) == (True, True)
    assert too_large.request.held == FAR, "the rule counts as failed"
    second, _ = lobby.client(FAR, size=40), lobby.client(FAR, FAR, model="other")
    urgent = lobby.client(FAR, priority=9.0)
    await settled()
    assert (lobby.room.size, lobby.room.bytes, urgent.is_served) == (3, 100, True)
    await second.leave()
    assert (lobby.room.size, lobby.room.bytes) == (2, 60)


@virtual_time
async def test_rule_that_holds_for_ever_is_refused_while_the_room_is_full() -> None:
    lobby = Lobby(most=0)
    client = lobby.client(*[FAR] * 100)
    await settled()
    refused = client.error
    assert isinstance(refused, Overloaded)
    assert (refused.status, refused.reason, client.decisions) == (429, "queue", 17)


@virtual_time
async def test_change_of_load_wakes_the_head_of_each_lane_alone() -> None:
    lobby = Lobby()
    a, behind, b = [lobby.client(FAR, FAR, model=model) for model in ("a", "a", "b")]
    await settled()
    lobby.room.load_changed()
    await settled()
    assert [client.decisions for client in (a, behind, b)] == [2, 1, 2]
    await a.leave()  # the one behind it may be luckier
    await asyncio.sleep(WAKE_INTERVAL_S)
    assert behind.decisions == 2


@virtual_time
async def test_head_is_woken_at_most_a_hundred_times_a_second() -> None:
    lobby = Lobby()
    client = lobby.client(*[FAR] * 1000)
    for _ in range(1000):
        await asyncio.sleep(0.001)
        lobby.room.load_changed()
    assert 90 <= client.decisions <= 102


@virtual_time
async def test_change_of_load_during_a_decision_is_not_missed() -> None:
    lobby = Lobby()
    client = lobby.client(FAR, FAR, FAR, decide_s=0.1)
    await asyncio.sleep(0.15)
    lobby.room.load_changed()
    await asyncio.sleep(0.05)
    assert client.is_deciding
    lobby.room.load_changed()
    await asyncio.sleep(1.0)
    assert (client.decisions, client.state) == (3, PermitState.HELD)


@virtual_time
async def test_deadline_ends_the_wait_of_its_own_request_alone() -> None:
    lobby = Lobby()
    first, second = lobby.client(FAR, FAR), lobby.client(0.02)
    await asyncio.sleep(0.03)
    assert (first.state, second.is_served) == (PermitState.HELD, True)
    assert second.request.held == 0.02


@virtual_time
async def test_new_policy_decides_on_all_held_requests_and_keeps_their_deadlines() -> None:
    lobby = Lobby()
    held = [lobby.client(1.0, 1.0) for _ in range(3)]
    await asyncio.sleep(0.6)
    lobby.room.policy_changed()
    await asyncio.sleep(0.3)
    assert [client.decisions for client in held] == [2] * 3
    assert not any(client.is_served for client in held)
    await asyncio.sleep(0.2)
    assert all(client.is_served for client in held)


@virtual_time
async def test_end_of_the_router_bounds_all_waits() -> None:
    lobby = Lobby(slots=1, wait_s=FAR)
    held = [lobby.client(FAR, model=model) for model in "ab"]
    await settled()
    blocker, queued = await lobby.clients(2)
    lobby.room.end_by(0.02)
    await asyncio.sleep(0.03)
    refused = [client.error for client in (*held, queued)]
    assert [error.reason for error in refused if isinstance(error, Overloaded)] == ["in_flight"] * 3
    assert all(client.request.held == FAR for client in held), "their rules count as failed"
    await blocker.finish()
    (late,) = await lobby.clients(1, FAR)
    await asyncio.sleep(0.0)
    assert (late.is_served, late.request.held) == (True, FAR)


# Slots


@virtual_time
async def test_slot_goes_to_the_most_urgent_request_that_waits() -> None:
    lobby = Lobby(slots=1)
    blocker, first, second = await lobby.clients(3)
    urgent = lobby.client(priority=1.0)
    await settled()
    for client in (blocker, urgent, first):
        assert client.is_served
        await client.finish()
        newcomer = lobby.client()
        await settled()
        assert not newcomer.is_served, "a newcomer must not overtake"
        await newcomer.leave()
    assert lobby.order == [blocker, urgent, first, second]
    await second.finish()
    assert lobby.counts() == (0, 0, 0)


@virtual_time
async def test_request_that_leaves_while_it_is_given_a_slot_hands_it_on() -> None:
    lobby = Lobby(slots=1)
    blocker, leaver, other = await lobby.clients(3)
    blocker.permit.end()
    assert leaver.state is PermitState.SERVED
    leaver.task.cancel()
    await settled()
    assert other.is_served
    assert (leaver.task.cancelled(), lobby.room.slots_taken) == (True, 1)


@virtual_time
async def test_request_may_time_out_as_a_slot_comes_free() -> None:
    lobby = Lobby(slots=1, wait_s=FAR)
    blocker, leaver = await lobby.clients(2)

    def end_and_leave() -> None:
        blocker.permit.end()
        leaver.task.cancel()

    lobby.room.end_by(0.0)  # its time is up, a slot comes free and its client leaves in one step of the loop
    asyncio.get_running_loop().call_soon(end_and_leave)
    await settled()
    assert leaver.task.cancelled()
    assert lobby.counts() == (0, 0, 0)


@virtual_time
async def test_wait_for_a_slot_is_bounded() -> None:
    lobby = Lobby(slots=1, wait_s=0.5)
    blocker, late = await lobby.clients(2)
    await asyncio.sleep(0.6)
    refused = late.error
    assert isinstance(refused, Overloaded)
    assert (refused.status, refused.kind, refused.reason) == (429, "rate_limit_exceeded", "in_flight")
    assert lobby.counts() == (1, 0, 0)
    # A whole wait has passed without a slot: until one comes free a wait is not worth it.
    assert not lobby.room.may_enter(1)
    assert not lobby.room.may_enter(1, priority=1.0)
    await blocker.finish()
    assert lobby.room.may_enter(1)
    await lobby.clients(1)
    assert lobby.room.may_enter(1), "slots come free again"


@virtual_time
async def test_wait_behind_urgent_requests_does_not_stop_others_from_waiting() -> None:
    lobby = Lobby(slots=1, wait_s=0.5)
    blocker, patient = await lobby.clients(2)
    urgent = lobby.client(priority=1.0)
    await settled()
    await blocker.finish()
    await asyncio.sleep(0.6)
    assert urgent.is_served
    assert isinstance(patient.error, Overloaded)
    assert lobby.room.may_enter(1)


@virtual_time
async def test_wait_that_would_be_too_long_is_refused_at_once() -> None:
    lobby = Lobby(slots=1, wait_s=0.5)
    served = await lobby.clients(5)
    for client in served[:2]:
        await asyncio.sleep(0.15)  # the rate at which slots come free
        await client.finish()
    await lobby.clients(2)
    assert lobby.refusal().reason == "in_flight"
    assert lobby.room.may_enter(1, priority=1.0), "nothing is ahead of an urgent request"
    assert lobby.room.expected_wait_s() == pytest.approx(4 * 0.075)


@virtual_time
async def test_admission_refuses_at_once_without_a_slot_and_without_room() -> None:
    lobby = Lobby(slots=1, most=0)
    assert lobby.room.may_enter(1)
    await lobby.clients(1)
    refused = lobby.refusal()
    assert (refused.status, refused.kind, refused.reason) == (429, "rate_limit_exceeded", "in_flight")
    lobby.admission.admit([], leased=False)  # needs no slot


@pytest.mark.parametrize(("slots", "most"), [(1, 4), (6, 6)])
@virtual_time
async def test_wait_queue_is_as_long_as_the_slots_until_their_rate_is_known(slots: int, most: int) -> None:
    lobby = Lobby(slots=slots, most=100)
    await lobby.clients(slots + most)
    assert lobby.room.queued == most
    assert lobby.refusal().reason == "in_flight"
    assert lobby.refusal((b"x-vllm-priority", b"5")).reason == "in_flight"
    assert lobby.refusal((b"x-vllm-priority", b"soon")).reason == "in_flight"
    lobby.admit((b"x-vllm-priority", b"-5"))


# Both reasons to wait


@virtual_time
async def test_held_request_gives_up_its_slot_and_counts_once_while_it_waits_for_another() -> None:
    lobby = Lobby(slots=1, most=1, wait_s=FAR)
    held = lobby.client(FAR, size=100)
    await settled()
    assert lobby.counts() == (0, 1, 100)
    (blocker,) = await lobby.clients(1)
    lobby.room.policy_changed()
    await settled()
    assert (held.state, lobby.counts()) == (PermitState.REQUEUED, (1, 1, 100))
    await blocker.finish()
    await settled()
    assert held.is_served
    await held.finish()
    assert lobby.counts() == (0, 0, 0)


@virtual_time
async def test_held_request_keeps_its_arrival_while_it_waits_for_a_slot() -> None:
    lobby = Lobby(slots=1, wait_s=FAR)
    held = lobby.client(FAR)
    await settled()
    blocker, newcomer = await lobby.clients(2)
    lobby.room.policy_changed()
    await settled()
    await blocker.finish()
    await settled()
    assert (held.is_served, newcomer.is_served) == (True, False)


@virtual_time
async def test_slot_of_a_held_request_makes_room_for_it_in_a_full_room() -> None:
    lobby = Lobby(slots=1, most=1, wait_s=FAR)
    held = lobby.client(FAR, decide_s=0.1)
    await asyncio.sleep(0.05)
    (queued,) = await lobby.clients(1)
    await asyncio.sleep(0.1)
    assert (held.state, queued.is_served, lobby.counts()) == (PermitState.HELD, True, (1, 1, 0))


OPERATIONS = st.one_of(
    st.tuples(
        st.just("arrive"),
        st.lists(st.sampled_from([0.0, 0.5, 2.0, "error"]), max_size=3),
        st.sampled_from([0.0, 0.25, 0.5]),
        st.sampled_from("mn"),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 40),
    ),
    st.tuples(st.sampled_from(["leave", "finish"]), st.integers(0, 20)),
    st.tuples(st.sampled_from(["sleep", "end"]), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    st.tuples(st.sampled_from(["load", "policy"])),
)


@given(st.lists(OPERATIONS, min_size=10, max_size=60), st.integers(0, 3), st.sampled_from([2, 100]), st.booleans())
@virtual_time
async def test_room_counts_match_its_requests(
    operations: list[tuple[Any, ...]], slots: int, most: int, is_settled: bool
) -> None:
    lobby, clients = Lobby(slots=slots, most=most, most_bytes=100), list[Client]()
    for kind, *operands in operations:
        match kind:
            case "arrive":
                plan, decide_s, model, priority, size = operands
                steps = [ValueError("a source has failed") if step == "error" else step for step in plan]
                with contextlib.suppress(Overloaded):
                    clients.append(lobby.client(*steps, decide_s=decide_s, model=model, priority=priority, size=size))
                await asyncio.sleep(0)  # a task that is cancelled before it starts would not end its permit
            case "leave" if clients:
                clients[operands[0] % len(clients)].task.cancel()
            case "finish" if clients:
                clients[operands[0] % len(clients)].finished.set()
            case "sleep":
                await asyncio.sleep(operands[0])
            case "end":
                lobby.room.end_by(asyncio.get_running_loop().time() + operands[0])
            case "load":
                lobby.room.load_changed()
            case "policy":
                lobby.room.policy_changed()
        check(lobby, clients)
        if is_settled:
            await settled()
            check(lobby, clients)
            with_slot = sum(client.is_deciding or client.is_served for client in clients)
            assert lobby.room.slots_taken == (with_slot if slots else 0)
    for client in clients:
        client.finished.set()
    done, pending = await asyncio.wait([client.task for client in clients], timeout=1000.0) if clients else ((), ())
    assert not pending
    assert [task for task in done if not task.cancelled() and task.exception()] == []
    assert lobby.counts() == (0, 0, 0)
    assert (lobby.admission.under_way, lobby.admission.bytes) == (0, 0)


def check(lobby: Lobby, clients: list[Client]) -> None:
    room = lobby.room
    permits = [client.permit for client in clients]
    waiting = [permit for permit in permits if permit.state.is_waiting]
    assert (room.size, room.bytes) == (len(waiting), sum(permit.size for permit in waiting))
    assert room.size <= room._most
    assert room.bytes <= room._most_bytes
    with_slot = sum(permit.state.has_slot for permit in permits) if room.has_slots else 0
    assert room.slots_taken == with_slot <= room.slots
    assert room.queued == sum(permit.state.needs_slot for permit in permits)
    assert not room.queued or room.slots_taken == room.slots, "a slot is free and a request waits for one"
    under_way = [permit for permit in permits if not permit.state.has_ended]
    assert lobby.admission.under_way == len(under_way)
    assert lobby.admission.bytes == sum(permit.size for permit in under_way)


def test_measured_wait_is_no_longer_than_it_lasted() -> None:
    async def waits() -> list[tuple[float, float]]:
        result = []
        for _ in range(60):
            client = Lobby().client(0.0013)
            began = time.perf_counter()
            await client.served.wait()
            result.append((client.permit.waited_s, time.perf_counter() - began))
        return result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # its clock counts whole milliseconds
        assert [one for one in runner.run(waits()) if one[0] > one[1]] == []


# Saturation

NOW = 1000.0


def scraped(running: float, waiting: float, kv_usage: float | None, age_s: float = 0.0) -> Instance:
    instance = Instance(f"gpu-{running}-{waiting}-{kv_usage}-{age_s}", "http://10.0.0.1:8000")
    instance.scrape = Scrape(NOW - age_s, running, waiting, kv_usage, 0)
    return instance


def saturation(
    lobby: Lobby, *instances: Instance, connections: Callable[[], tuple[int, int]] = lambda: (0, 0)
) -> Saturation:
    return Saturation(Fleet(instances, VOCABULARY, clock=lambda: NOW), lobby.admission, connections)


@pytest.mark.parametrize(
    ("instances", "ratio"),
    [
        ([], 0.0),
        ([scraped(0, 0, 0.0)], 0.0),
        ([scraped(8, 0, 0.6), scraped(8, 0, 0.4)], 0.5),
        ([scraped(8, 4, 0.9), scraped(8, 12, 1.0)], 1.95),
        ([scraped(0, 5, None)], 5.0),
        ([scraped(8, 0, 0.6), scraped(8, 8, 1.0, age_s=60)], 0.6),
        ([Instance("never", "http://10.0.0.2:8000"), scraped(8, 0, 0.6)], 0.6),
    ],
    ids=["none", "idle", "half", "queueing", "no KV usage", "stale", "unseen"],
)
def test_saturation_of_instances_is_their_cache_and_their_queues(instances: list[Instance], ratio: float) -> None:
    assert saturation(Lobby(), *instances).instances() == pytest.approx(ratio)


@pytest.mark.parametrize("silent", [Instance("never", "http://10.0.0.2:8000"), scraped(8, 8, 1.0, age_s=60)])
@virtual_time
async def test_saturation_of_silent_instances_is_unknown_until_requests_are_held(silent: Instance) -> None:
    lobby = Lobby()
    full = saturation(lobby, silent)
    assert full.instances() is None
    assert list(full.figures().saturation) == ["router"]
    await lobby.clients(1, FAR)
    assert full.figures().saturation["instances"] == 2.0


def test_saturation_leaves_draining_instances_out() -> None:
    drained = scraped(8, 8, 1.0)
    drained.draining = True
    assert saturation(Lobby(), drained, scraped(1, 0, 0.3)).instances() == pytest.approx(0.3)


@virtual_time
async def test_saturation_rises_above_one_while_rules_hold_requests() -> None:
    lobby, one = Lobby(), scraped(8, 0, 0.2)
    for _ in range(4):
        one.charge(1, 10)
    await lobby.clients(1, FAR)
    assert saturation(lobby, one).instances() == pytest.approx(1.25)


@virtual_time
async def test_saturation_counts_slots_that_are_taken_and_waited_for() -> None:
    lobby = Lobby(slots=4)
    full = saturation(lobby)
    await lobby.clients(2)
    assert full.instances() == 0.5
    await lobby.clients(4)
    assert full.instances() == 1.5


def test_saturation_of_the_router_is_its_fullest_bound() -> None:
    lobby = Lobby(bodies=1000)
    overload = lobby.admission.overload = Overload(Thresholds(0.2, 1.0), Thresholds(0.8, 0.9), memory_bytes=1 << 60)
    full = saturation(lobby, connections=lambda: (30, 100))
    for _ in range(10):
        overload.measure(0.0)
    assert full.router() == pytest.approx(max(0.3, overload.shares["files"]))
    permit = lobby.admit(size=990)
    assert full.router() == pytest.approx(0.99)
    for _ in range(10):
        overload.measure(0.3)
    assert full.router() == pytest.approx(1.5)
    permit.end()
    figures = full.figures()
    assert (figures.body_bytes, figures.connections, figures.levels["lag"]) == (0, 30, 1)
    assert figures.saturation == {"instances": 0.0, "router": pytest.approx(1.5)}

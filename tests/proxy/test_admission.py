from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.errors import Overloaded
from smetric.proxy.admission import STEP_BYTES, Admission, Permit, Queue, Slots
from smetric.proxy.overload import Level, Overload, Thresholds

RETRY = [(b"x-stainless-retry-count", b"1")]


class Watched(Overload):
    """A router's own state, as a test sets it."""

    def __init__(self) -> None:
        super().__init__(Thresholds(1.0, 2.0), Thresholds(0.8, 0.9))

    def become(self, level: Level, resource: str = "memory") -> None:
        self.times += self.level is Level.CALM
        self.level, self.resource = level, resource


class Gate:
    """Admission, and what it told."""

    def __init__(self, most_bytes: int = 1 << 20, in_flight: int = 0) -> None:
        self.refused: Counter[str] = Counter()
        self.retries: Counter[bool] = Counter()
        self.overload = Watched()
        queue = Queue(2, 1 << 20)
        self.admission = Admission(
            most_bytes=most_bytes,
            queue=queue,
            overload=self.overload,
            slots=Slots(in_flight, 1.0, queue) if in_flight else None,
            on_refused=lambda reason: self.refused.update([reason]),
            on_retry=lambda admitted: self.retries.update([admitted]),
            rng=random.Random(7),
        )

    def admit(self, *headers: tuple[bytes, bytes], size: int | None = None) -> Permit:
        length = [] if size is None else [(b"content-length", b"%d" % size)]
        return self.admission.admit([(b"host", b"x"), *length, *headers])

    def refusal(self, *headers: tuple[bytes, bytes], size: int | None = None) -> Overloaded:
        with pytest.raises(Overloaded) as refused:
            self.admit(*headers, size=size)
        return refused.value


def test_a_body_that_does_not_fit_is_refused_by_its_announced_length() -> None:
    gate = Gate(most_bytes=1000)
    first = gate.admit(size=600)
    refused = gate.refusal(size=401)
    assert (refused.status, refused.kind, refused.reason) == (503, "overloaded", "bytes")
    assert gate.refused == {"bytes": 1}
    gate.admit(size=400)
    first.end()
    gate.admit(size=600)


def test_what_is_announced_and_does_not_come_keeps_only_a_step_of_memory_from_others() -> None:
    gate = Gate(most_bytes=4 * STEP_BYTES)
    for _ in range(4):
        gate.admit(size=4 * STEP_BYTES if gate.admission.bytes == 0 else STEP_BYTES)
    assert gate.admission.bytes == 4 * STEP_BYTES
    assert gate.refusal(size=1).reason == "bytes"


def test_a_body_of_unknown_length_grows_in_steps_until_there_is_no_room() -> None:
    gate = Gate(most_bytes=2 * STEP_BYTES)
    permit = gate.admit()
    assert permit.size == 0
    permit.grow(10)
    assert permit.size == STEP_BYTES
    permit.grow(STEP_BYTES)
    assert permit.size == STEP_BYTES
    permit.grow(STEP_BYTES + 1)
    with pytest.raises(Overloaded):
        permit.grow(2 * STEP_BYTES + 1)
    permit.end()
    permit.end()
    assert (gate.admission.bytes, gate.admission.under_way) == (0, 0)


def test_a_body_that_is_let_go_makes_room_while_its_answer_streams() -> None:
    gate = Gate(most_bytes=1000)
    permit = gate.admit(size=1000)
    permit.settle(0)
    gate.admit(size=1000)
    permit.end()
    assert (gate.admission.bytes, gate.admission.under_way) == (1000, 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3 * STEP_BYTES)), max_size=40))
def test_the_bytes_always_add_up(steps: list[tuple[int, int]]) -> None:
    gate = Gate(most_bytes=8 * STEP_BYTES)
    permits: list[Permit] = []
    for kind, size in steps:
        try:
            if kind == 0 or not permits:
                permits.append(gate.admit(size=size))
            elif kind == 1:
                permits[-1].grow(size)
            elif kind == 2:
                permits[-1].settle(min(size, permits[-1].size))
            else:
                permits.pop(0).end()
        except Overloaded:
            pass
        assert gate.admission.bytes == sum(permit.size for permit in permits) <= 8 * STEP_BYTES
        assert gate.admission.under_way == len(permits)
    for permit in permits:
        permit.end()
    assert (gate.admission.bytes, gate.admission.under_way) == (0, 0)


def test_at_the_soft_threshold_no_more_are_taken_than_are_under_way_and_nothing_again() -> None:
    gate = Gate()
    under_way = [gate.admit() for _ in range(3)]
    gate.overload.become(Level.SOFT)
    assert gate.refusal().reason == "memory"
    under_way.pop().end()
    assert gate.refusal(*RETRY).status == 503, "who tries again can wait"
    again = gate.admit()
    assert gate.refusal().status == 503
    for permit in (*under_way, again):
        permit.end()
    gate.overload.become(Level.CALM)
    assert [gate.admit(*RETRY) for _ in range(5)]
    gate.overload.become(Level.SOFT, "lag")  # another time: five are under way now
    assert gate.refusal().reason == "lag"


def test_at_the_hard_threshold_nothing_new_is_taken_while_anything_is_under_way() -> None:
    gate = Gate()
    gate.overload.become(Level.HARD, "files")
    only = gate.admit(), gate.refusal(), gate.refusal(*RETRY)
    assert {only[1].reason, only[2].reason} == {"files"}
    only[0].end()
    gate.admit()  # what was taken for good must not lock everybody out for ever


def test_without_a_place_or_a_hope_of_one_it_is_429_at_once() -> None:
    gate = Gate(in_flight=1)
    slots, queue = gate.admission.slots, gate.admission.queue
    assert slots is not None
    assert slots.take_free()
    gate.admit()  # may wait
    for _ in range(2):
        assert queue.enter(None, 0.0, 1) is not None
    refused = gate.refusal()
    assert (refused.status, refused.kind, refused.reason) == (429, "rate_limit_exceeded", "in_flight")
    gate.admission.admit([], leased=False)  # takes no place


def test_who_is_urgent_is_let_in_where_others_would_wait_too_long() -> None:
    gate = Gate(in_flight=1)
    slots, queue = gate.admission.slots, gate.admission.queue
    assert slots is not None
    assert slots.take_free()
    queue.most = 100
    for _ in range(4):
        assert queue.enter(None, 0.0, 1) is not None
    assert gate.refusal().reason == "in_flight"
    assert gate.refusal((b"x-vllm-priority", b"5")).reason == "in_flight"
    assert gate.refusal((b"x-vllm-priority", b"soon")).reason == "in_flight"
    gate.admit((b"x-vllm-priority", b"-5"))


def test_what_clients_send_again_is_told_from_what_is_new() -> None:
    gate = Gate(most_bytes=10)
    gate.admit((b"x-stainless-retry-count", b"0"), size=1)
    gate.admit(size=1)
    assert gate.retries == {}
    gate.admit(*RETRY, size=1)
    gate.refusal(*RETRY, size=11)
    assert gate.retries == {True: 1, False: 1}


def test_refused_clients_are_told_to_come_back_at_different_times() -> None:
    gate = Gate(most_bytes=0)
    waits = [gate.refusal(size=1).retry_after_s or 0.0 for _ in range(100)]
    assert 1.0 <= min(waits) < 1.2
    assert 2.8 < max(waits) <= 3.0

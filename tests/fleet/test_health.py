"""Health: probes, failures, latencies and states."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from smetric import names
from smetric.config.settings import HealthSettings
from smetric.fleet.health import COMPARED, FRESH_S, NOTICED_S, AttemptLog, Health
from smetric.fleet.instance import Instance, State
from tests.clock import Clock


class Ward:
    """Instances, their health, and the reported ejections."""

    def __init__(self, instances: int | Sequence[Instance] = 4, **tolerance: Any) -> None:
        self.clock = Clock()
        if isinstance(instances, int):
            instances = [Instance(f"gpu-{i:02}", f"http://gpu-{i}") for i in range(instances)]
        self.instances = list(instances)
        self.ejections: list[tuple[str, str]] = []
        self.health = Health(
            self.instances,
            HealthSettings(**tolerance),
            on_ejected=lambda instance, reason: self.ejections.append((instance.id, reason)),
            clock=self.clock,
        )

    def after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.health.settle()

    def fail(self, instance: Instance, times: int = 5, reason: str = names.STATUS_5XX) -> None:
        for _ in range(times):
            self.health.failed(instance, reason)

    def probe(self, instance: Instance, *, ok: bool, times: int = 1, refused: bool = False) -> None:
        for _ in range(times):
            self.health.probed(instance, ok=ok, refused=refused)

    def stream(self, *seconds: float, times: int = 1, tokens: Sequence[int] | None = None) -> None:
        """*times* streams on each instance, one after the other, which wait for *seconds* there."""
        for _ in range(times):
            self.clock.now += max(1.0, *seconds)
            for instance, waited, count in zip(self.instances, seconds, tokens or [0] * len(seconds), strict=True):
                self.health.waited(instance, waited, count)

    def states(self) -> list[State]:
        return [instance.state for instance in self.instances]


# Latency

SLOW, EVEN = (3.0, 0.3, 0.3, 0.3), (0.3, 0.3, 0.3, 0.3)


def test_latency_ejects_a_tenfold_slower_instance_within_few_streams() -> None:
    ward = Ward()
    ward.stream(*EVEN, times=20)
    assert ward.ejections == []
    ward.stream(*SLOW, times=COMPARED)
    assert ward.states() == [State.EJECTED, State.WELL, State.WELL, State.WELL]
    assert ward.ejections == [("gpu-00", "slow")]


def test_latency_ejection_ends_in_a_slow_start_and_is_forgotten() -> None:
    ward = Ward()
    ward.stream(*SLOW, times=COMPARED)
    ward.after(30.0)
    assert ward.states()[0] is State.WARMING
    ward.stream(*EVEN, times=COMPARED)
    assert ward.ejections == [("gpu-00", "slow")]


def test_latency_ejects_again_for_longer() -> None:
    ward = Ward()
    ward.stream(*SLOW, times=COMPARED)
    ward.after(30.0)
    ward.stream(*SLOW, times=COMPARED)
    assert ward.states()[0] is State.EJECTED
    ward.after(45.0)
    assert ward.states()[0] is State.EJECTED


@pytest.mark.parametrize(
    ("waits", "tolerance"),
    [
        ([(1.2, 0.3, 0.3, 0.3)] * 20, {}),
        ([(NOTICED_S * 0.9, 0.002, 0.002, 0.002)] * 20, {}),
        ([(30.0, 0.3, 0.3, 0.3), EVEN, EVEN, EVEN] * 10, {}),
        ([(3.0, 3.0, 3.0, 0.3)] * 20, {}),
        ([(100.0, 0.3, 0.3, 0.3)] * 20, {"slow_factor": 0}),
    ],
    ids=["small factor", "short wait", "single late answers", "most are slow", "factor of zero"],
)
def test_latency_tolerates(waits: Sequence[Sequence[float]], tolerance: dict[str, Any]) -> None:
    ward = Ward(**tolerance)
    for seconds in waits:
        ward.stream(*seconds)
    assert ward.ejections == []


class Engines:
    """Engines that serve requests at random times, and stall at random times.

    Args:
        count: number of engines, each of which gets *rate* requests a second.
        base_s: median time to a first token, with a spread of *sigma* as of a log-normal distribution.
        stall_every_s: mean seconds from the end of a stall of an engine to its next one.
        slow: how many times as long as the others the first engine takes.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        *,
        rate: float,
        base_s: float,
        sigma: float,
        stall_every_s: float,
        slow: float = 1.0,
    ) -> None:
        self.ward = Ward(count, slow_start=0.0)
        self.stalls = 0
        self._random = random.Random(seed)
        self._rate, self._every_s = rate, stall_every_s
        self._base = [base_s * (slow if number == 0 else 1.0) for number in range(count)]
        self._sigma = sigma
        #: Stalls of each engine so far, the next one included: when it begins and ends.
        self._stall = [self._next_stall(0.0) for _ in range(count)]

    def _next_stall(self, after: float) -> tuple[float, float]:
        begin = after + self._random.expovariate(1 / self._every_s)
        return begin, begin + self._random.choice([self._random.uniform(0.5, 3.0), self._random.expovariate(1 / 3)])

    def _end(self, number: int, at: float) -> float:
        """Return when a request that is sent *at* gets its first token."""
        work_s = self._base[number] * self._random.lognormvariate(0.0, self._sigma)
        while True:
            begin, end = self._stall[number]
            if end <= at:
                self.stalls += 1
                self._stall[number] = self._next_stall(end)
            elif begin <= at:
                return end + work_s
            else:
                return at + work_s if at + work_s <= begin else end + at + work_s - begin

    def run(self, *, stalls: float = math.inf, seconds: float = math.inf) -> float:
        """Serve until so many *stalls* or *seconds* have passed, or an instance is ejected; return the time."""
        clock = self.ward.clock
        began = clock.now
        count = len(self.ward.instances)
        events = [(began + self._random.expovariate(self._rate), number, math.inf) for number in range(count)]
        heapq.heapify(events)
        while self.stalls < stalls and clock.now - began < seconds and not self.ward.ejections:
            clock.now, number, sent = heapq.heappop(events)
            if sent < math.inf:
                self.ward.health.waited(self.ward.instances[number], clock.now - sent, 0)
                continue
            heapq.heappush(events, (clock.now + self._random.expovariate(self._rate), number, math.inf))
            end = began + self._end(number, clock.now - began)
            heapq.heappush(events, (end, number, clock.now))
        return clock.now - began


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_latency_ejects_no_equal_engine_in_ten_thousand_stalls(count: int) -> None:
    for seed, (rate, sigma) in enumerate([(0.5, 0.4), (0.3, 0.6), (2.0, 0.8), (1.0, 0.2)]):
        engines = Engines(count, seed, rate=rate, base_s=0.15, sigma=sigma, stall_every_s=20.0)
        engines.run(stalls=625)
        assert engines.ward.ejections == []


@pytest.mark.parametrize("base_s", [0.15, 0.5])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_latency_finds_a_five_times_slower_engine_within_thirty_seconds(count: int, base_s: float) -> None:
    for seed in range(10):
        engines = Engines(count, seed, rate=2.0, base_s=base_s, sigma=0.2, stall_every_s=1e9, slow=5.0)
        assert engines.run(seconds=60.0) <= 30.0
        assert engines.ward.ejections == [("gpu-00", "slow")]


def test_latency_counts_waits_that_overlap_once() -> None:
    ward = Ward()
    ward.stream(*EVEN, times=COMPARED)
    one = ward.instances[0]
    for _ in range(3):  # three stalls of six requests each
        ward.clock.now += 5.0
        for _ in range(6):
            ward.health.waited(one, 5.0, 0)
    assert ward.ejections == []


def test_latency_ejects_no_instance_that_is_well_again() -> None:
    ward = Ward()
    for _ in range(20):
        ward.stream(*SLOW, times=COMPARED - 1)
        ward.stream(*EVEN)
    assert ward.ejections == []


def test_latency_bound_grows_with_the_differences_among_peers() -> None:
    mixed, even = Ward(3), Ward(3)
    for hit, miss in ((0.03, 0.4), (0.03, 0.35)):
        for _ in range(COMPARED):
            mixed.stream(0.6, hit, hit)
            mixed.stream(0.6, miss, miss)
    even.stream(0.6, 0.03, 0.03, times=COMPARED)
    assert (mixed.ejections, even.ejections) == ([], [("gpu-00", "slow")])


def test_ejection_is_logged_with_its_reason() -> None:
    ward = Ward()
    with capture_logs() as logs:
        ward.stream(*SLOW, times=COMPARED)
        ward.fail(ward.instances[1])
        ward.after(31.0)
        ward.fail(ward.instances[1])
    told = [line for line in logs if line["state"] == "ejected"]
    assert [line["reason"] for line in told] == ["slow", "5xx"]
    assert (told[0]["wait_s"], told[0]["peers_s"], told[0]["bound_s"], told[1]["failures"]) == (3.0, 0.3, 1.2, 6)


# Waits that clients gave up


@pytest.mark.parametrize("is_stream", [True, False])
def test_instance_that_gives_no_output_is_ejected_although_clients_leave(is_stream: bool) -> None:
    ward = Ward()
    hung, *others = ward.instances
    for _ in range(7):
        ward.clock.now += 1.0
        ward.health.gave_up(hung, 1.0, 0, is_stream=is_stream)
        for one in others:
            ward.health.waited(one, 0.2, 0, is_stream=is_stream)
            ward.health.waited(one, 60.0, 0, is_stream=not is_stream)
    assert (ward.states()[0], len(ward.ejections)) == (State.EJECTED, 1)


@pytest.mark.parametrize(
    ("output_every", "left_after_s", "peers_s", "is_stream"),
    [
        (3, 5.0, 0.2, False),
        (99, 0.1, 0.05, False),
        (99, 5.0, 20.0, False),
        (99, 5.0, 20.0, True),
        (99, 5.0, None, True),
    ],
    ids=["it answers others", "one short stall", "long answers", "long prompts", "no peer answers"],
)
def test_instance_whose_clients_leave_may_be_well(
    output_every: int, left_after_s: float, peers_s: float | None, is_stream: bool
) -> None:
    ward = Ward()
    one, *others = ward.instances
    for number in range(1, 11):
        ward.clock.now += left_after_s
        ward.health.gave_up(one, left_after_s, 0, is_stream=is_stream)
        if number % output_every == 0:
            ward.health.waited(one, 2.0, 0, is_stream=is_stream)
        for other in others:
            if peers_s is not None:
                ward.health.waited(other, peers_s, 0, is_stream=is_stream)
    assert ward.ejections == []


@pytest.mark.parametrize(
    ("every_s", "left_after_s", "tokens", "is_stream"),
    [(120.0, 0.5, 500, True), (10.0, 10.0, 500, False), (8.0, 8.0, 150_000, True), (0.25, 0.25, 500, True)],
    ids=["idle in between", "one piece beside streams", "long prompt beside short ones", "earlier than peers answer"],
)
def test_waits_that_clients_gave_up_are_compared_with_waits_alike(
    every_s: float, left_after_s: float, tokens: int, is_stream: bool
) -> None:
    ward = Ward()
    for _ in range(5 if every_s > left_after_s else 40):
        ward.clock.now += every_s
        for peer in ward.instances[1:]:
            ward.health.waited(peer, 0.3, 500)
            ward.health.waited(peer, 0.1, 500, is_stream=None)
        ward.health.gave_up(ward.instances[0], left_after_s, tokens, is_stream=is_stream)
    assert ward.ejections == []


def test_waits_that_clients_gave_up_at_once_count_once() -> None:
    ward = Ward()
    for number in range(2):
        ward.clock.now += 100.0
        for peer in ward.instances[1:]:
            ward.health.waited(peer, 0.3, 0, is_stream=False)
        for _ in range(5):
            ward.health.gave_up(ward.instances[0], 2.0, 0, is_stream=False)
        assert len(ward.ejections) == number


def test_wait_that_was_given_up_counts_as_at_least_as_long() -> None:
    ward = Ward()
    for _ in range(COMPARED):
        ward.stream(*SLOW)
        ward.clock.now += 3.0
        ward.health.gave_up(ward.instances[0], 3.0, 0)
    assert ward.ejections == [("gpu-00", "slow")]
    left_at_once = Ward()
    for _ in range(COMPARED):
        left_at_once.stream(*EVEN)
        left_at_once.clock.now += 1.0
        for other in left_at_once.instances[1:]:
            left_at_once.health.gave_up(other, 0.01, 0)
    assert left_at_once.ejections == [], "a short wait that was given up makes no other instance slow"


def test_latency_ejects_the_slower_of_two_but_never_the_only_one() -> None:
    two = Ward([Instance("a", "http://a"), Instance("b", "http://b")])
    two.stream(3.0, 0.3, times=COMPARED)
    assert two.ejections == [("a", "slow")]
    one = Ward([Instance("a", "http://a")])
    one.stream(100.0, times=COMPARED)
    assert one.ejections == []


@pytest.mark.parametrize(
    ("waited", "tokens"),
    [(6.0, (60_000, 1_000, 1_000, 1_000)), (0.6, (500, 50_000, 50_000, 50_000))],
    ids=["long prompts", "prompts cached unknown to the router"],
)
def test_latency_is_relative_to_prompt_tokens(waited: float, tokens: Sequence[int]) -> None:
    ward = Ward()
    ward.stream(waited, 0.3, 0.3, 0.3, times=20, tokens=tokens)
    assert ward.ejections == []


@pytest.mark.parametrize("other", [Instance("o", "http://o", role="prefill"), Instance("o", "http://o", pool="old")])
def test_latency_compares_instances_of_one_role(other: Instance) -> None:
    ward = Ward([other, *(Instance(f"gpu-{i}", f"http://{i}") for i in range(2))])
    ward.stream(30.0, 0.3, 0.3, times=20)
    assert ward.ejections == []


def test_latency_compares_instances_of_the_same_models() -> None:
    large = Instance("large", "http://large", models=["large"])
    small = [Instance(f"small-{i}", f"http://{i}", models=["small"]) for i in range(3)]
    small[0].models, small[0].adapters = frozenset({"small", "lora"}), frozenset({"lora"})
    ward = Ward([large, *small])
    ward.stream(5.0, 3.0, 0.3, 0.3, times=COMPARED)
    assert ward.ejections == [("small-0", "slow")]


def test_latency_ignores_old_waits() -> None:
    ward = Ward()
    ward.stream(*EVEN, times=COMPARED)
    ward.clock.now += FRESH_S
    for _ in range(COMPARED):
        ward.clock.now += 1.0
        ward.health.waited(ward.instances[0], 30.0, 0)
    assert ward.ejections == []


def test_latency_ejects_no_more_than_the_bound() -> None:
    ward = Ward(10)
    ward.stream(*[3.0] * 4, *[0.3] * 6, times=20)
    assert ward.states().count(State.EJECTED) == 3


def test_latency_of_a_past_process_is_forgotten() -> None:
    ward = Ward(slow_start=0.0)
    ward.stream(*SLOW, times=COMPARED - 1)
    ward.health.restarted(ward.instances[0])
    ward.stream(*SLOW, times=COMPARED - 1)
    assert ward.ejections == []


# Probes, failures and states


def test_probes_failing_in_a_row_eject_and_two_successes_restore() -> None:
    ward = Ward(fall=3)
    one = ward.instances[0]
    ward.probe(one, ok=False, times=2)
    ward.probe(one, ok=True)
    ward.probe(one, ok=False, times=2)
    assert one.healthy
    ward.probe(one, ok=False)
    assert (one.healthy, one.state) == (False, State.ILL)
    ward.probe(one, ok=True)
    ward.probe(one, ok=False)
    ward.probe(one, ok=True)
    assert ward.states()[0] is State.ILL
    ward.probe(one, ok=True)
    assert (one.healthy, one.state) == (True, State.WARMING)
    assert ward.ejections == [("gpu-00", "probe")]


def test_refused_connection_ejects_until_probes_succeed() -> None:
    ward = Ward()
    one = ward.instances[0]
    ward.health.refused(one)
    assert (one.healthy, one.state) == (False, State.REFUSING)
    ward.health.refused(one)
    ward.probe(one, ok=True, times=2)
    assert one.healthy
    assert ward.ejections == [("gpu-00", "connect")]


def test_failures_eject_after_five_in_a_row() -> None:
    ward = Ward()
    one = ward.instances[0]
    ward.fail(one, 4)
    ward.health.succeeded(one)
    ward.fail(one, 4)
    assert one.healthy
    ward.fail(one, 1, names.TIMEOUT)
    assert (one.healthy, one.state) == (False, State.EJECTED)
    assert ward.ejections == [("gpu-00", "timeout")]


def test_ejection_time_grows_to_a_cap_and_decays() -> None:
    ward = Ward(longest_ejection=75.0, slow_start=0)
    one = ward.instances[0]
    for lasting in (30.0, 60.0, 75.0, 75.0):
        ward.fail(one)
        ward.after(lasting - 0.1)
        assert not one.healthy
        ward.after(0.2)
        assert one.healthy
    ward.after(60.0 * 5)
    ward.fail(one)
    ward.after(30.1)
    assert one.healthy


def test_ejections_are_bounded_but_one_is_always_possible() -> None:
    ward = Ward(10, max_ejected_percent=30)
    for instance in ward.instances:
        ward.fail(instance)
    assert ward.states().count(State.EJECTED) == 3
    large = Ward(100, max_ejected_percent=29)
    for instance in large.instances:
        large.fail(instance)
    assert large.states().count(State.EJECTED) == 29
    lone = Ward(1, max_ejected_percent=0)
    lone.fail(lone.instances[0])
    assert lone.states() == [State.EJECTED]


def test_postponed_ejection_follows_once_there_is_room() -> None:
    ward = Ward(2)
    first, second = ward.instances
    ward.fail(first)
    ward.fail(second, 9)
    assert second.healthy
    ward.after(30.1)
    ward.fail(second, 1)
    assert (first.healthy, second.healthy) == (True, False)


def test_single_restart_is_free_but_flapping_stays_out_longer() -> None:
    ward = Ward()
    one = ward.instances[0]
    out = []
    for _ in range(4):
        ward.health.refused(one)
        ward.after(1.0)
        ward.probe(one, ok=True, times=2)
        started = ward.clock.now
        while not one.healthy:
            ward.after(1.0)
        out.append(ward.clock.now - started)
        ward.after(1.0)
    assert out == [0.0, 29.0, 59.0, 89.0]


def test_new_process_lifts_an_ejection_unless_it_flaps() -> None:
    ward = Ward()
    one, other = ward.instances[:2]
    ward.fail(one)
    ward.health.restarted(one)
    assert (one.healthy, one.state) == (True, State.WARMING)
    for _ in range(2):
        ward.health.refused(other)
        ward.probe(other, ok=True, times=2)
    ward.health.restarted(other)
    assert not other.healthy


def test_instance_restarted_for_failures_returns_at_once() -> None:
    ward = Ward()
    one = ward.instances[0]
    ward.fail(one)
    ward.after(2)
    ward.probe(one, ok=False, refused=True, times=3)
    ward.after(5)
    ward.probe(one, ok=True, times=2)
    ward.health.restarted(one)
    assert (one.healthy, one.state) == (True, State.WARMING)


def test_stopping_engine_drains_until_a_new_process_answers() -> None:
    ward = Ward()
    one = ward.instances[0]
    ward.health.stopping(one)
    assert (one.healthy, one.draining, one.state) == (True, True, State.STOPPING)
    ward.probe(one, ok=True, times=5)  # its /health goes on saying 200
    assert one.draining
    ward.health.restarted(one)
    assert (one.draining, one.state) == (False, State.WARMING)


def test_sleeping_engine_is_no_candidate_until_it_wakes_or_is_silent() -> None:
    ward = Ward()
    one = ward.instances[0]
    for _ in range(2):
        ward.health.sleeps(one, True)
        ward.after(20.0)
        assert (one.healthy, one.draining, one.state) == (True, True, State.ASLEEP)
    ward.health.sleeps(one, False)
    assert (one.draining, one.state) == (False, State.WARMING)
    ward.health.sleeps(one, True)
    ward.after(31.0)
    assert (one.draining, one.state, ward.ejections) == (False, State.WARMING, [])


def test_stopping_engine_that_was_gone_returns_as_a_new_process() -> None:
    ward = Ward()
    one = ward.instances[0]
    ward.health.stopping(one)
    ward.probe(one, ok=False, times=3, refused=True)
    assert one.state is State.REFUSING
    ward.probe(one, ok=True, times=2)
    assert (one.healthy, one.draining) == (True, False)


def test_stopping_engine_is_tried_again_after_the_longest_ejection() -> None:
    ward = Ward()
    one = ward.instances[0]
    ward.health.stopping(one)
    ward.after(299.0)
    assert one.draining
    ward.after(2.0)
    assert not one.draining


def test_aborted_answers_twice_in_a_row_mark_the_engine_as_stopping() -> None:
    ward = Ward()
    one = ward.instances[0]
    ward.health.aborted(one)
    ward.health.succeeded(one)
    ward.health.aborted(one)
    assert not one.draining
    ward.health.aborted(one)
    assert one.state is State.STOPPING


def test_aborted_answers_do_not_mark_the_last_instance_as_stopping() -> None:
    ward = Ward(2)
    one, other = ward.instances
    ward.health.refused(other)
    ward.health.aborted(one)
    ward.health.aborted(one)
    assert not one.draining
    ward.probe(other, ok=True, times=2)
    ward.health.aborted(one)
    assert one.state is State.STOPPING


def test_drain_and_undrain_are_independent_of_health() -> None:
    ward = Ward()
    one = ward.instances[0]
    ward.health.drain(one)
    assert (one.draining, one.state, ward.health.drained()) == (True, State.DRAINING, ["gpu-00"])
    ward.health.refused(one)
    ward.probe(one, ok=True, times=2)
    ward.health.restarted(one)
    assert one.draining
    ward.health.undrain(one)
    assert (one.draining, one.state, ward.health.drained()) == (False, State.WARMING, [])


def test_slow_start_warms_a_returning_instance_evenly() -> None:
    ward = Ward()
    one, other = ward.instances[:2]
    assert ward.health.slow_start_remaining([one, other]) is None
    ward.health.refused(one)
    ward.probe(one, ok=True, times=2)
    shares = []
    for _ in range(4):
        cold = ward.health.slow_start_remaining([one, other])
        assert cold is not None
        shares.append(cold)
        ward.after(7.5)
    assert shares == [[1.0, 0.0], [0.75, 0.0], [0.5, 0.0], [0.25, 0.0]]
    assert ward.health.slow_start_remaining([one, other]) is None
    assert one.state is State.WELL


def test_slow_start_applies_to_an_unnoticed_restart() -> None:
    ward = Ward()
    ward.health.restarted(ward.instances[0])
    assert ward.states()[0] is State.WARMING


def test_slow_start_may_be_off() -> None:
    ward = Ward(slow_start=0)
    ward.health.restarted(ward.instances[0])
    assert ward.health.slow_start_remaining(ward.instances) is None


# Attempts of requests


def ask(ward: Ward, *attempts: tuple[int, str, int | None]) -> None:
    trial = AttemptLog(ward.health)
    for number, result, status in attempts:
        trial.ended(ward.instances[number].charge(1, 0), result, status)
    trial.close()


@pytest.mark.parametrize(
    ("result", "status"),
    [
        *((names.OK, status) for status in (400, 401, 403, 404, 429)),
        *((names.STATUS_5XX, status) for status in (501, 503)),
        *((names.ABORTED, status) for status in (200, None)),
    ],
)
def test_client_errors_and_full_queues_do_not_count_as_failures(result: str, status: int | None) -> None:
    ward = Ward()
    for _ in range(4):
        ask(ward, (0, names.STATUS_5XX, 500))
    for _ in range(20):
        ask(ward, (0, result, status))
    assert ward.states()[0] is State.WELL
    ask(ward, (0, names.STATUS_5XX, 500))  # nor was it a success
    assert ward.states()[0] is State.EJECTED


def test_poisonous_request_never_ejects() -> None:
    ward = Ward()
    for _ in range(100):
        ask(ward, (0, names.STATUS_5XX, 500), (1, names.STATUS_5XX, 500))
        ask(ward, (2, names.CLOSED, None), (3, names.CLOSED, None))
    assert ward.states() == [State.WELL] * 4


def test_failure_counts_if_another_instance_succeeds() -> None:
    ward = Ward()
    for _ in range(5):
        ask(ward, (0, names.CLOSED, None), (1, names.OK, 200))
    assert ward.states() == [State.EJECTED, *[State.WELL] * 3]


def test_failure_counts_when_another_instance_begins_to_answer() -> None:
    ward = Ward()
    trials = [AttemptLog(ward.health) for _ in range(5)]
    for trial in trials:
        trial.ended(ward.instances[0].charge(1, 0), names.STATUS_5XX, 500)
        trial.answers(200)
    assert ward.states() == [State.EJECTED, *[State.WELL] * 3]
    for trial in trials:  # a stream that breaks afterwards is no second fault
        trial.ended(ward.instances[1].charge(1, 0), names.CLOSED, 200)
        trial.close()
    assert ward.states() == [State.EJECTED, *[State.WELL] * 3]


@pytest.mark.parametrize("is_judged", [False, True], ids=["before it ends", "before it is judged"])
def test_failure_of_a_past_process_does_not_count(is_judged: bool) -> None:
    ward = Ward()
    one = ward.instances[0]
    trials = [(AttemptLog(ward.health), one.charge(1, 0)) for _ in range(10)]
    if is_judged:
        for trial, lease in trials:
            trial.ended(lease, names.CLOSED, None)
    one.restarted()
    ward.health.restarted(one)
    for trial, lease in trials:
        if not is_judged:
            trial.aborted(lease)
            trial.stopping(lease)
            trial.ended(lease, names.CLOSED, 200)
        trial.answers(200)
        trial.close()
    assert (one.state, one.deprioritized, ward.ejections) == (State.WARMING, False, [])


def test_full_instance_is_deprioritized_briefly_and_stays_well() -> None:
    ward = Ward()
    one, two, *_ = ward.instances
    changes: list[str] = []
    one.load_changed = lambda: changes.append(one.id)
    ask(ward, (0, names.STATUS_5XX, 503))
    assert (one.deprioritized, one.state, two.deprioritized) == (True, State.WELL, False)
    ward.after(0.9)
    assert changes == []
    ward.after(0.1)
    assert (one.deprioritized, changes) == (False, ["gpu-00"])
    ask(ward, (0, names.STATUS_5XX, 503))
    ward.health.restarted(one)
    assert [instance.deprioritized for instance in ward.instances] == [False] * 4
    assert ward.ejections == []


@pytest.mark.parametrize(("result", "status"), [(names.STATUS_5XX, 500), (names.CLOSED, None), (names.OK, 429)])
def test_suspect_failures_deprioritize_after_five(result: str, status: int) -> None:
    ward = Ward()

    def try_on(number: int, result: str, status: int | None) -> None:
        AttemptLog(ward.health).ended(ward.instances[number].charge(1, 0), result, status)

    for _ in range(4):
        try_on(0, result, status)
    try_on(0, names.OK, 200)
    for _ in range(4):
        try_on(0, result, status)
    assert not any(instance.deprioritized for instance in ward.instances)
    try_on(0, result, status)
    assert [instance.deprioritized for instance in ward.instances] == [True, False, False, False]
    assert ward.states() == [State.WELL] * 4
    ward.after(1.0)
    assert not any(instance.deprioritized for instance in ward.instances)


def test_refused_connections_do_not_count_for_the_request() -> None:
    ward = Ward()
    ask(ward, (0, names.CONNECT_ERROR, None), (1, names.CONNECT_TIMEOUT, None))
    assert ward.states() == [State.REFUSING, State.REFUSING, State.WELL, State.WELL]


def test_aborted_answer_is_not_a_success() -> None:
    ward = Ward()
    for _ in range(2):
        trial = AttemptLog(ward.health)
        lease = ward.instances[0].charge(1, 0)
        trial.aborted(lease)
        trial.ended(lease, names.OK, 200)
        trial.close()
    assert ward.states()[0] is State.STOPPING


# Random events

EVENTS = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["ok", "miss", "refuse", "fail", "succeed", "stop", "abort", "restart", "drain", "undrain"]),
    st.floats(0.0, 100.0),
)


@given(st.lists(EVENTS, max_size=60))
def test_instances_that_answer_recover_in_the_end(events: list[tuple[int, str, float]]) -> None:
    ward = Ward()
    health = ward.health
    for number, what, seconds in events:
        one = ward.instances[number]
        ward.after(seconds)
        match what:
            case "ok" | "miss":
                ward.probe(one, ok=what == "ok")
            case "refuse":
                health.refused(one)
            case "fail":
                ward.fail(one, 3)
            case "succeed":
                health.succeeded(one)
            case "stop":
                health.stopping(one)
            case "abort":
                health.aborted(one)
            case "restart":
                health.restarted(one)
            case "drain":
                health.drain(one)
            case "undrain":
                health.undrain(one)
        assert ward.states().count(State.EJECTED) <= 4
        for instance in ward.instances:
            assert instance.healthy == (instance.state not in (State.ILL, State.REFUSING, State.EJECTED)) or (
                instance.draining
            )
    for one in ward.instances:
        health.undrain(one)
        ward.probe(one, ok=True, times=2)
    ward.after(health.settings.longest_ejection)
    ward.after(health.settings.slow_start)
    assert ward.states() == [State.WELL] * 4
    assert health.slow_start_remaining(ward.instances) is None


def test_states_and_reasons_match_the_table_of_names() -> None:
    assert tuple(state.value for state in State) == names.STATES

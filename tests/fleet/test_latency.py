"""Whose streams wait far longer than those of their peers, and whose only seem to."""

from __future__ import annotations

import pytest

from smetric.fleet.health import FEWEST, FRESH_S, KEPT, NOTICED_S, Health, Tolerance
from smetric.fleet.instance import Instance, State


class Ward:
    """Instances whose streams wait as they are told to."""

    def __init__(self, *instances: Instance, **tolerance: float) -> None:
        self.now = 1000.0
        self.instances = list(instances) or [Instance(f"gpu-{i}", f"http://gpu-{i}") for i in range(4)]
        self.reasons: list[tuple[str, str]] = []
        self.health = Health(
            self.instances,
            Tolerance(**tolerance),  # type: ignore[arg-type]
            on_ejected=lambda instance, reason: self.reasons.append((instance.id, reason)),
            clock=lambda: self.now,
        )

    def stream(self, *seconds: float, times: int = 1, tokens: int = 0) -> None:
        """*times* streams on each instance, a second apart, which wait for *seconds* there."""
        for _ in range(times):
            self.now += 1.0
            for instance, waited in zip(self.instances, seconds, strict=True):
                self.health.waited(instance, waited, tokens)

    def states(self) -> list[State]:
        return [instance.state for instance in self.instances]


def test_one_whose_streams_wait_ten_times_longer_is_ejected_within_a_few_of_them() -> None:
    ward = Ward()
    ward.stream(0.3, 0.3, 0.3, 0.3, times=20)
    assert ward.reasons == []
    ward.stream(3.0, 0.3, 0.3, 0.3, times=FEWEST + 1)
    assert ward.states() == [State.EJECTED, State.WELL, State.WELL, State.WELL]
    assert ward.reasons == [("gpu-0", "slow")]


def test_it_comes_back_by_a_slow_start_and_what_it_did_before_is_forgotten() -> None:
    ward = Ward()
    ward.stream(3.0, 0.3, 0.3, 0.3, times=KEPT)
    ward.now += 30.0
    ward.health.settle()
    assert ward.states()[0] is State.WARMING
    ward.stream(0.3, 0.3, 0.3, 0.3, times=KEPT)
    assert ward.reasons == [("gpu-0", "slow")]


def test_one_that_is_still_slow_is_ejected_again_for_longer() -> None:
    ward = Ward()
    ward.stream(3.0, 0.3, 0.3, 0.3, times=KEPT)
    ward.now += 30.0
    ward.health.settle()
    ward.stream(3.0, 0.3, 0.3, 0.3, times=FEWEST)
    assert ward.states()[0] is State.EJECTED
    ward.now += 45.0
    ward.health.settle()
    assert ward.states()[0] is State.EJECTED


def test_four_times_longer_is_borne_and_so_is_what_nobody_notices() -> None:
    ward = Ward()
    ward.stream(1.2, 0.3, 0.3, 0.3, times=20)
    ward.stream(NOTICED_S * 0.9, 0.002, 0.002, 0.002, times=20)
    assert ward.reasons == []


def test_a_single_late_answer_says_nothing() -> None:
    ward = Ward()
    for _ in range(10):
        ward.stream(30.0, 0.3, 0.3, 0.3)
        ward.stream(0.3, 0.3, 0.3, 0.3, times=3)
    assert ward.reasons == []


def test_where_most_are_slow_nobody_is() -> None:
    ward = Ward()
    ward.stream(3.0, 3.0, 3.0, 0.3, times=20)
    assert ward.reasons == []


def test_of_two_the_slower_one_is_ejected_and_one_alone_never() -> None:
    two = Ward(Instance("a", "http://a"), Instance("b", "http://b"))
    two.stream(3.0, 0.3, times=KEPT)
    assert two.reasons == [("a", "slow")]
    one = Ward(Instance("a", "http://a"))
    one.stream(100.0, times=KEPT)
    assert one.reasons == []


def test_long_prompts_and_queues_of_our_making_count_against_nobody() -> None:
    ward = Ward()
    for _ in range(20):
        ward.now += 1.0
        ward.health.waited(ward.instances[0], 6.0, 60_000)
        for instance in ward.instances[1:]:
            ward.health.waited(instance, 0.3, 1_000)
    assert ward.reasons == []


def test_prompts_that_are_cached_more_than_the_router_knows_count_against_nobody() -> None:
    ward = Ward()
    for _ in range(20):
        ward.now += 1.0
        ward.health.waited(ward.instances[0], 0.6, 500)
        for instance in ward.instances[1:]:
            ward.health.waited(instance, 0.3, 50_000)
    assert ward.reasons == []


@pytest.mark.parametrize("other", [Instance("o", "http://o", role="prefill"), Instance("o", "http://o", pool="old")])
def test_only_those_of_one_kind_are_compared(other: Instance) -> None:
    ward = Ward(other, *(Instance(f"gpu-{i}", f"http://{i}") for i in range(2)))
    ward.stream(30.0, 0.3, 0.3, times=20)
    assert ward.reasons == []


def test_only_those_that_serve_the_same_models_are_compared_whatever_their_adapters() -> None:
    large = Instance("large", "http://large", models=["large"])
    small = [Instance(f"small-{i}", f"http://{i}", models=["small"]) for i in range(3)]
    small[0].models, small[0].adapters = frozenset({"small", "lora"}), frozenset({"lora"})
    ward = Ward(large, *small)
    ward.stream(30.0, 3.0, 0.3, 0.3, times=KEPT)
    assert ward.reasons == [("small-0", "slow")]


def test_what_was_long_ago_is_no_measure() -> None:
    ward = Ward()
    ward.stream(0.3, 0.3, 0.3, 0.3, times=KEPT)
    ward.now += FRESH_S
    for _ in range(KEPT):
        ward.now += 1.0
        ward.health.waited(ward.instances[0], 30.0, 0)
    assert ward.reasons == []


def test_no_more_are_ejected_than_may_be() -> None:
    ward = Ward(*(Instance(f"gpu-{i:02}", f"http://{i}") for i in range(10)))
    ward.stream(*[3.0] * 4, *[0.3] * 6, times=20)
    assert ward.states().count(State.EJECTED) == 3


def test_a_factor_of_zero_ejects_nobody() -> None:
    ward = Ward(slow_factor=0.0)
    ward.stream(100.0, 0.3, 0.3, 0.3, times=20)
    assert ward.reasons == []


def test_a_new_process_is_not_judged_by_what_the_old_one_did() -> None:
    ward = Ward(slow_start_s=0.0)
    ward.stream(3.0, 0.3, 0.3, 0.3, times=FEWEST - 1)
    ward.health.restarted(ward.instances[0])
    ward.stream(3.0, 0.3, 0.3, 0.3, times=FEWEST - 1)
    assert ward.reasons == []

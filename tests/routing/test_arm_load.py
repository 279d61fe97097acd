"""What can be said of how an arm's own requests lie, and from how many of them on."""

from __future__ import annotations

import random

import pytest

from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord
from smetric.request.request import InferenceRequest
from smetric.routing.guardrail import ArmLoad, Spread
from tests.records.drive import Fleet, policy

POLICY = policy("policy p\nroute rr_argmin(requests) as least\n")


def sent(to: Instance, turn: int = 0) -> DecisionRecord:
    record = Fleet(random.Random(), 2).decide(POLICY, InferenceRequest(turn=turn))
    record.instance = to
    return record


@pytest.fixture
def instances() -> list[Instance]:
    return [Instance(f"gpu-{i}", f"http://{i}") for i in range(4)]


def test_loads_are_means_over_the_last_looks(instances: list[Instance]) -> None:
    load = ArmLoad(2)
    records = [sent(instances[0]) for _ in range(4)]
    load.look()
    for record in records:
        load.placed(record)
    load.look()
    assert load.over(instances) == Spread(4, 0.5, 2.0, 4)
    load.left(records[0])
    load.look()
    assert load.over(instances) == Spread(4, 3.5 / 4, 3.5, 4)
    load.clear()
    assert load.over(instances) == Spread(4, 0.0, 0.0, 0)
    assert load.over(instances).imbalance == 1


def test_other_instances_are_left_out(instances: list[Instance]) -> None:
    load = ArmLoad(1)
    for instance in instances:
        load.placed(sent(instance))
    load.look()
    assert load.over(instances[:2]) == Spread(2, 1.0, 1.0, 2)


def test_first_turns_are_a_choice_each_and_later_ones_only_as_many_as_are_under_way_at_once(
    instances: list[Instance],
) -> None:
    load = ArmLoad(10)
    for _ in range(10):
        first, later = sent(instances[0]), sent(instances[1], turn=3)
        load.placed(first)
        load.placed(later)
        load.look()
        load.left(first)
        load.left(later)
    assert load.over(instances).choices == 10 + 1


def test_a_pile_that_moves_on_is_even_on_average_and_on_one_instance_at_once(instances: list[Instance]) -> None:
    load = ArmLoad(4)
    for instance in instances:
        records = [sent(instance) for _ in range(6)]
        for record in records:
            load.placed(record)
        load.look()
        for record in records:
            load.left(record)
    assert load.over(instances) == Spread(4, 1.5, 1.5, 24)
    assert load.at_once(instances) == Spread(4, 1.5, 6.0, 24, 4)
    assert load.at_once(instances[:2]) == Spread(2, 1.5, 3.0, 12, 4)


def test_few_requests_at_once_show_a_pile_that_moves_where_it_does_so_often(instances: list[Instance]) -> None:
    load = ArmLoad(10)
    for look in range(10):
        records = [sent(instances[look % 2]) for _ in range(8)]
        for record in records:
            load.placed(record)
        load.look()
        for record in records:
            load.left(record)
        assert load.at_once(instances[:2]).shows(1.9) == (look > 1)
    assert load.at_once(instances[:2]) == Spread(2, 4.0, 8.0, 80, 10)


def test_without_requests_nothing_is_at_once(instances: list[Instance]) -> None:
    assert ArmLoad(4).at_once(instances) == Spread(4, 0.0, 0.0, 0)


@pytest.mark.parametrize(("count", "choices"), [(2, 15), (4, 8), (32, 4)])
def test_all_on_one_instance_shows_from_a_few_requests_on(count: int, choices: int) -> None:
    assert Spread(count, 1, count, choices).shows(count)
    assert not Spread(count, 1, count, choices - 1).shows(count)


def test_what_is_no_imbalance_never_shows() -> None:
    assert not Spread(4, 1, 1, 10_000).shows(1.0)
    assert not Spread(4, 0, 0, 0).shows(4.0)


def test_short_requests_that_are_placed_at_random_hardly_ever_look_like_a_pile_that_moves() -> None:
    rng = random.Random(6)
    alarms = 0
    for _ in range(60):
        among = [Instance(f"gpu-{i}", f"http://{i}") for i in range(rng.choice([2, 3, 4, 8, 32]))]
        load = ArmLoad(10)
        for _ in range(10):
            records = [sent(rng.choice(among)) for _ in range(rng.randint(1, 12))]
            for record in records:
                load.placed(record)
            load.look()
            for record in records:
                load.left(record)
        spread = load.at_once(among)
        alarms += spread.shows(spread.imbalance)
    assert alarms == 0


def test_requests_that_are_placed_at_random_hardly_ever_look_piled_up() -> None:
    rng = random.Random(5)
    alarms = 0
    for _ in range(3000):
        count, choices = rng.choice([2, 4, 8, 32]), rng.randint(1, 200)
        loads = [0] * count
        for _ in range(choices):
            loads[rng.randrange(count)] += 1
        spread = Spread(count, choices / count, max(loads), choices)
        alarms += spread.shows(spread.imbalance)
    assert alarms <= 1

"""Candidates are kept while nothing changes, and nobody can tell but by the time it takes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.errors import NoCandidate
from smetric.features import VOCABULARY
from smetric.fleet.fleet import MOST_MODELS, Candidates, Fleet
from smetric.fleet.instance import Instance, Scrape

READS = ("requests", "running", "waiting", "kv_usage", "id")
SCRAPES = st.none() | st.builds(
    Scrape, st.sampled_from([900.0, 990.0, 1000.0]), st.integers(0, 3), st.integers(0, 3), st.none(), st.integers(0, 2)
)
CHANGES = st.one_of(
    st.tuples(st.just("healthy"), st.booleans()),
    st.tuples(st.just("draining"), st.booleans()),
    st.tuples(st.just("deprioritized"), st.booleans()),
    st.tuples(st.just("models"), st.none() | st.frozensets(st.sampled_from("mn"), max_size=2)),
    st.tuples(st.just("scrape"), SCRAPES),
    st.tuples(st.just("own"), st.integers(0, 3)),
)
STEPS = st.lists(st.tuples(st.integers(0, 2), CHANGES, st.sampled_from("mn")), max_size=12)


def instances() -> list[Instance]:
    return [Instance(name, f"http://{name}") for name in "abc"]


def clock() -> float:
    return 1000.0


def seen(fleet: Fleet, model: str) -> object:
    """The candidates for *model*, and what a policy sees of them."""
    try:
        candidates = fleet.candidates(model)
    except NoCandidate as error:
        return error.status
    snapshot = fleet.snapshot(candidates, READS)
    return list(candidates), snapshot.ids, snapshot.columns, snapshot.known, snapshot.stamps


@given(STEPS)
def test_kept_or_found_anew_they_are_the_same(steps: list[tuple[int, tuple[str, object], str]]) -> None:
    fleet = Fleet(instances(), VOCABULARY, clock=clock)
    for which, (name, value), model in steps:
        seen(fleet, model)
        setattr(fleet.instances[which], name, value)
        anew = Fleet(fleet.instances, VOCABULARY, clock=clock)
        assert seen(fleet, model) == seen(fleet, model) == seen(anew, model)


def test_they_are_the_same_object_until_something_of_an_instance_changes() -> None:
    fleet = Fleet(instances(), VOCABULARY, clock=clock)
    first = fleet.candidates("m")
    fleet["a"].charge(1, 100)
    assert fleet.candidates("m") is first
    assert fleet.candidates("m", exclude=[fleet["c"]]) == first[:2]
    assert fleet.candidates("m") is first
    fleet["a"].restarted()
    assert fleet.candidates("m") is not first
    assert fleet.candidates("m") == first


def test_a_client_that_names_ever_new_models_takes_no_more_memory() -> None:
    fleet = Fleet(instances(), VOCABULARY, clock=clock)
    kept = [fleet.candidates(str(number)) for number in range(2 * MOST_MODELS)]
    again = [fleet.candidates(str(number)) for number in range(2 * MOST_MODELS)]
    assert sum(one is other for one, other in zip(kept, again, strict=True)) == MOST_MODELS
    assert kept == again


def test_each_panic_is_counted() -> None:
    fleet = Fleet(instances(), VOCABULARY, clock=clock)
    for instance in fleet.instances:
        instance.healthy = False
    for _ in range(3):
        assert len(fleet.candidates("m")) == 3
    assert fleet.panics == 3


@pytest.mark.parametrize(("running", "own", "others"), [(3, 1, 3.0), (1, 5, 0.0), (0, 0, 1.0)])
def test_what_others_sent_is_what_was_scraped_beyond_the_routers_own(running: int, own: int, others: float) -> None:
    scrape = Scrape(990.0, running, 1, None, own)
    assert scrape.others == others
    assert dataclasses.replace(scrape, own=0).others == running + 1


def test_of_none_nothing_is_old() -> None:
    assert (Candidates([]).ids, Candidates([]).others) == ([], [])

"""Who may serve a request, and what a policy sees of them."""

from __future__ import annotations

import pytest

from smetric.errors import NoCandidate
from smetric.features import VOCABULARY
from smetric.fleet.fleet import CERTAIN, SCRAPED, Candidates, Fleet
from smetric.fleet.health import Health, Tolerance
from smetric.fleet.instance import Instance, Scrape
from tests.clock import Clock


def fleet_of(*instances: Instance, clock: Clock | None = None) -> Fleet:
    return Fleet(instances, VOCABULARY, clock=clock or Clock())


def ids(instances: list[Instance]) -> list[str]:
    return [instance.id for instance in instances]


def test_instances_stand_in_the_order_of_their_ids() -> None:
    fleet = fleet_of(Instance("b", "http://b"), Instance("a", "http://a"))
    assert ids(fleet.instances) == ["a", "b"]
    assert fleet["b"].url == "http://b"
    assert fleet.get("c") is None


def test_candidates_serve_the_model_or_have_not_said_what_they_serve() -> None:
    fleet = fleet_of(
        Instance("a", "http://a", models=["m", "m-alias"]),
        Instance("b", "http://b", models=["n"]),
        Instance("c", "http://c"),
    )
    assert ids(fleet.candidates("m-alias")) == ["a", "c"]
    assert ids(fleet.candidates("")) == ["a", "b", "c"]


def test_a_model_that_all_are_known_not_to_serve_is_not_found() -> None:
    fleet = fleet_of(Instance("a", "http://a", models=["m"]))
    with pytest.raises(NoCandidate) as caught:
        fleet.candidates("secret-name")
    assert (caught.value.status, caught.value.kind) == (404, "model_not_found")
    assert "secret-name" not in str(caught.value)


def test_a_known_model_whose_instances_are_all_out_is_unavailable() -> None:
    fleet = fleet_of(Instance("a", "http://a", models=["m"]), Instance("b", "http://b", models=["n"]))
    fleet["a"].draining = True
    with pytest.raises(NoCandidate) as caught:
        fleet.candidates("m")
    assert caught.value.status == 503
    assert caught.value.retry_after_s == 1.0


def test_unhealthy_instances_are_left_out_until_all_are_unhealthy() -> None:
    fleet = fleet_of(Instance("a", "http://a"), Instance("b", "http://b"))
    fleet["a"].healthy = False
    assert ids(fleet.candidates("m")) == ["b"]
    fleet["b"].healthy = False
    assert ids(fleet.candidates("m")) == ["a", "b"]


def test_as_many_healthy_ones_as_the_tolerated_share_are_no_panic() -> None:
    instances = [Instance(f"gpu-{number}", f"http://gpu-{number}") for number in range(25)]
    fleet = Fleet(instances, VOCABULARY, health=Health(instances, Tolerance(panic_below=56 / 100)))
    for instance in instances[14:]:
        instance.healthy = False
    assert len(fleet.candidates("m")) == 14
    instances[13].healthy = False
    assert len(fleet.candidates("m")) == 25


def test_those_that_said_they_are_full_are_left_out_while_there_are_others() -> None:
    one, two = Instance("a", "http://a"), Instance("b", "http://b")
    fleet = fleet_of(one, two)
    one.deprioritized = True
    assert ids(fleet.candidates("m")) == ["b"]
    assert ids(fleet.candidates("m", exclude=[two])) == ["a"]
    two.deprioritized = True
    assert ids(fleet.candidates("m")) == ["a", "b"]
    assert fleet.panics == 0


def test_excluded_instances_are_left_out() -> None:
    fleet = fleet_of(*(Instance(name, f"http://{name}") for name in "abc"))
    assert ids(fleet.candidates("m", exclude=[fleet["a"]])) == ["b", "c"]


def test_a_snapshot_holds_a_column_for_every_feature_that_is_no_lookup() -> None:
    fleet = fleet_of(Instance("a", "http://a", role="prefill", pool="p", zone="z"), Instance("b", "http://b"))
    snapshot = fleet.snapshot(Candidates(fleet.instances), VOCABULARY.features)
    assert set(snapshot.columns) == {name for name, feature in VOCABULARY.features.items() if not feature.lookup}
    assert snapshot.columns["role"] == ["prefill", "both"]
    assert all(len(column) == 2 for column in snapshot.columns.values())


def test_every_feature_of_the_table_is_filled_by_somebody() -> None:
    by_sources = {name for name, feature in VOCABULARY.features.items() if feature.lookup or feature.measured}
    filled = set(SCRAPED) | set(CERTAIN) | by_sources
    assert filled == set(VOCABULARY.features)


def test_a_scraped_value_keeps_its_stamp_and_is_corrected_by_the_ledger() -> None:
    clock = Clock()
    fleet = fleet_of(Instance("a", "http://a"), clock=clock)
    instance = fleet["a"]
    instance.scrape = Scrape(measured_at=998.0, running=4, waiting=2, kv_usage=0.5, own=0)
    instance.charge(1, 10)
    snapshot = fleet.snapshot(Candidates([instance]), ["requests", "running", "waiting", "kv_usage"])
    assert snapshot.columns == {"requests": [7], "running": [5], "waiting": [2], "kv_usage": [0.5]}
    assert snapshot.age("requests") == [2.0]


def test_a_silent_instance_keeps_its_last_load_and_then_takes_the_mean_of_the_known() -> None:
    clock = Clock()
    fleet = fleet_of(*(Instance(name, f"http://{name}") for name in "abc"), clock=clock)
    a, b, c = fleet.instances
    a.scrape = Scrape(measured_at=1000.0, running=1, waiting=0, kv_usage=0.1, own=0)
    clock.now = 1029.0
    b.scrape = Scrape(measured_at=1029.0, running=6, waiting=0, kv_usage=0.4, own=0)
    c.scrape = Scrape(measured_at=1029.0, running=8, waiting=2, kv_usage=0.6, own=0)
    assert fleet.snapshot(Candidates([a, b, c]), ["requests"]).columns["requests"] == [1, 6, 10]
    clock.now = 1031.0
    snapshot = fleet.snapshot(Candidates([a, b, c]), ["requests", "kv_usage"])
    assert snapshot.columns == {"requests": [8, 6, 10], "kv_usage": [0.5, 0.4, 0.6]}
    assert snapshot.is_known("requests") == [False, True, True]


def test_what_we_sent_ourselves_is_certain_even_when_nothing_else_is() -> None:
    fleet = fleet_of(Instance("a", "http://a"), Instance("b", "http://b"))
    a, b = fleet.instances
    for _ in range(9):
        a.charge(1, 10)
    # Nobody is known: own counts.
    assert fleet.snapshot(Candidates([a, b]), ["requests"]).columns["requests"] == [9, 0]
    # The mean of the known never hides what we sent.
    b.scrape = Scrape(measured_at=1000.0, running=2, waiting=0, kv_usage=None, own=0)
    assert fleet.snapshot(Candidates([a, b]), ["requests"]).columns["requests"] == [9, 2]


def test_hits_are_clamped_to_the_prompt_and_carry_their_origin() -> None:
    fleet = fleet_of(Instance("a", "http://a"), Instance("b", "http://b"))
    snapshot = fleet.snapshot(Candidates(fleet.instances), ["hit_len"])
    fleet.fill(snapshot, "hit_len", [5000.0, None], "kv_events", 4096)
    assert snapshot.columns["hit_len"] == [4096, 0]
    assert snapshot.is_known("hit_len") == [True, False]
    assert snapshot.origins_of("hit_len") == ["kv_events", ""]
    assert [snapshot.origin("hit_len", at) for at in range(2)] == ["kv_events", ""]


def test_a_lookup_not_fetched_yet_is_absent() -> None:
    fleet = fleet_of(Instance("a", "http://a"))
    assert "hit_len" not in fleet.snapshot(Candidates(fleet.instances), ["hit_len", "requests"]).columns

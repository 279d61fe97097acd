"""Replay of records: shipped policies, other policies and other settings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.policy import Policy, PolicyError, PolicyText, load
from smetric.records.reader import Reading
from smetric.records.replay import RECORDED, Comparison, Judges, replay
from tests.records.drive import Fleet, policy, write

pytestmark = pytest.mark.slow

SHIPPED = {name: path.read_text() for name, path in shipped_policies().items()}

#: Reads every field of a request in every way, and known(), age() and fresh().
READS_ALL = """
policy reads_all
hold for 1 second when req.held < 0.2 seconds and mean(kv_usage) > 0.8 as later
reject 429 "not today" when req.tenant == "blue" and req.priority < 0 as shed
prefer fresh(requests, 10 seconds) and known(kv_usage)
prefer zone == req.tenant
prefer req.tenant in loras or req.lora in loras
route rr_argmin(waiting) when req.lora == req.model and req.priority > 1 as adapter
route argmin(requests where id == req.session) when req.session != "" and req.session != req.id as named
route rr_argmin(requests, then: kv_usage) when req.model in {"m", "other"} as model_m
route argmax(hit_len where healthy, then: age(requests)) when req.turn != 0 and req.est_hit > 100 as warm
route rr_argmin(0) as rest
"""


def compare(path: Path, after: Policy | None = None, before: Policy | None = None, **settings: float) -> Comparison:
    found = Comparison(RECORDED if before is None else before.name, "it" if after is None else after.name)
    replay(Reading([path]), Judges(after, settings), Judges(before) if before else None, found)
    return found


@pytest.mark.parametrize("name", SHIPPED)
def test_replay_repeats_each_shipped_policy(name: str, path: Path) -> None:
    fleet, acting = Fleet(random.Random(name), 8), policy(SHIPPED[name])
    assert write(path, [fleet.decide(acting) for _ in range(1000)]) == {"written": 1000}
    found = compare(path)
    assert (found.compared, found.agreed, found.renamed.total()) == (1000, 1000, 0)


def test_replay_repeats_a_rejected_retry(path: Path) -> None:
    fleet = Fleet(random.Random(3), 8)
    record = fleet.decide(policy('policy p\nreject 429 "no" when true\nroute argmin(requests)\n'))
    record.rank, record.status = 1, 502  # as the first instance answered
    write(path, [record])
    found = compare(path)
    assert (found.compared, found.agreed) == (1, 1)


def test_replay_sets_a_parameter_where_a_policy_has_it(path: Path) -> None:
    fleet = Fleet(random.Random(3), 8)
    policies = [policy(SHIPPED["smetric"]), policy(SHIPPED["load_only"]), policy(SHIPPED["lmetric"])]
    write(path, [fleet.decide(policies[n % 3], generation=n % 3 + 1) for n in range(300)])
    found = Comparison(RECORDED, "it")
    after = Judges(None, {"OVERLOAD": 1.0})
    replay(Reading([path]), after, None, found)
    after.require_used()
    assert found.compared == 300
    assert 0 < found.moves.total() < 100
    assert {move.before for move in found.moves} == {"stick"}


def test_replay_refuses_an_unknown_parameter(path: Path) -> None:
    fleet = Fleet(random.Random(3), 8)
    write(path, [fleet.decide(policy(SHIPPED[name]), generation=n) for n, name in enumerate(("smetric", "load_only"))])
    after = Judges(None, {"OVERLOAD": 1.0, "OVERLOD": 1.0})
    replay(Reading([path]), after, None, Comparison(RECORDED, "it"))
    with pytest.raises(PolicyError, match="sets `OVERLOD`, which this policy does not declare"):
        after.require_used()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 40))
def test_replay_repeats_any_policy_and_request(seed: int, count: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(seed)
    fleet, acting = Fleet(rng, count), policy(READS_ALL)
    path = tmp_path_factory.mktemp("record") / "decisions.jsonl"
    sessions = ["", "gpu-0", "gpu-1", "a session nobody names"]
    write(path, [fleet.decide(acting, fleet.request(session=rng.choice(sessions))) for _ in range(40)])
    found = compare(path)
    assert (found.compared, found.agreed, found.renamed.total()) == (40, 40, 0)


def test_replay_finds_libraries_in_the_record(path: Path) -> None:
    library = "library guards\nparam MOST = 1.5 in 1..9\ndef calm(s, l) = l[s] <= MOST * mean(l)\n"
    text = (
        "policy with_library\nuse guards (calm, MOST)\nlet s = argmax(hit_len)\n"
        "route s when calm(s, requests) as warm\nroute rr_argmin(requests) as rest\n"
    )
    acting = load(
        text,
        VOCABULARY,
        path="test.policy",
        settings={"MOST": 1.2},
        libraries=lambda name: PolicyText(library, "guards.policy") if name == "guards" else None,
    )
    fleet = Fleet(random.Random(12), 6)
    write(path, [fleet.decide(acting) for _ in range(300)])
    found = compare(path)
    assert (found.compared, found.agreed, found.renamed.total()) == (300, 300, 0)
    assert found.rules_after.keys() == {"warm", "rest"}
    assert compare(path, MOST=9.0).rules_after["rest"] < found.rules_after["rest"]


def test_replay_places_pseudonyms_like_their_texts(path: Path) -> None:
    acting = policy(
        'policy keys\nlet two = top(hrw(req.session), 2)\nroute argmin(requests where two) when req.session != ""\n'
        "route argmin(requests where draw(2)) when bucket(req.tenant) < 0.5\nroute argmax(hrw(req.id))\n"
    )
    fleet = Fleet(random.Random(13), 9)
    write(path, [fleet.decide(acting, fleet.request(session=f"s{i % 7}" if i % 2 else "")) for i in range(400)])
    found = compare(path)
    assert (found.compared, found.agreed, found.renamed.total()) == (400, 400, 0)
    assert len(found.rules_after) == 3
    assert b'"s1"' not in path.read_bytes()


def test_replay_leaves_missing_lookups_unanswered(path: Path) -> None:
    fleet, acting = Fleet(random.Random(3), 4), policy(SHIPPED["smetric"])
    write(path, [fleet.decide(acting, fleet.request(turn=turn, est_hit=0)) for turn in [0] * 7 + [2] * 5])
    found = compare(path, policy(SHIPPED["bailian"]))
    assert found.unanswered == {"not answerable: hit_len not read": 7}
    assert found.compared == 5


def test_replay_needs_only_reached_columns(path: Path) -> None:
    fleet, acting = Fleet(random.Random(5), 4), policy(SHIPPED["load_only"])
    write(path, [fleet.decide(acting, fleet.request(turn=turn)) for turn in (0, 0, 4)])
    either = policy("policy either\nroute rr_argmin(requests) when req.turn == 0\nroute argmin(kv_usage)\n")
    found = compare(path, either)
    assert (found.compared, found.unanswered) == (2, {"not answerable: kv_usage not read": 1})


def test_replay_leaves_unread_fields_unanswered(tmp_path: Path, path: Path) -> None:
    fleet, acting = Fleet(random.Random(6), 4), policy(SHIPPED["load_only"])
    by_tenant = policy('policy by_tenant\nreject 429 "no" when req.tenant == "blue"\nroute rr_argmin(requests)\n')
    records = [fleet.decide(acting, fleet.request(tenant=tenant)) for tenant in ("blue", "red", "blue")]
    write(path, records)
    assert compare(path, by_tenant).unanswered == {"not answerable: req.tenant not read": 3}
    observed = tmp_path / "observed.jsonl"
    write(observed, records, observed=[by_tenant])
    found = compare(observed, by_tenant)
    assert [found.rules_after[rule] for rule in ("reject_1", "route_1")] == [2, 1]


def test_replay_compares_strings_the_recorded_policy_did_not_name(path: Path) -> None:
    fleet = Fleet(random.Random(7), 4)
    acting = policy('policy one\nreject 429 "no" when req.tenant == "blue"\nroute rr_argmin(requests)\n')
    write(path, [fleet.decide(acting, fleet.request(tenant=tenant)) for tenant in ("blue", "red", "green", "red")])
    other = policy('policy two\nreject 429 "no" when req.tenant in {"red", "white"}\nroute rr_argmin(requests)\n')
    found = compare(path, other)
    assert [found.rules_after[rule] for rule in ("reject_1", "route_1")] == [2, 2]
    assert b"red" not in path.read_bytes()


def test_replay_continues_rotations_without_recorded_cursors(path: Path) -> None:
    fleet = Fleet(random.Random(8), 4)
    write(path, [fleet.decide(policy(SHIPPED["bailian"])) for _ in range(400)])
    turns = policy("policy turns\nroute rr_argmin(0) as turns\n")
    spread = compare(path, turns).spread_after
    assert max(spread.requests.values()) - min(spread.requests.values()) < 60


def test_replay_repeats_first_rotations_in_any_order_of_lines(path: Path) -> None:
    """Lines stand in the order in which requests ended, so the first decision of all may come last."""
    turns = policy("policy turns\nroute rr_argmin(0) as turns\n")
    for seed in range(8):
        fleet = Fleet(random.Random(seed), 4)
        write(path, [fleet.decide(turns) for _ in range(5)][::-1])
        assert compare(path).agreement == compare(path, turns).agreement == 1.0


def test_replay_compares_two_policies(path: Path) -> None:
    fleet = Fleet(random.Random(9), 6)
    write(path, [fleet.decide(policy(SHIPPED["smetric_basic"])) for _ in range(300)])
    found = compare(path, policy(SHIPPED["lmetric"]), policy(SHIPPED["lmetric"]))
    assert found.compared > 100
    assert found.agreement == 1.0
    assert compare(path, policy(SHIPPED["lmetric"]), policy(SHIPPED["bailian"])).moves.total() > 0


def test_replay_reports_load_hits_and_examples_of_both_sides(path: Path) -> None:
    fleet = Fleet(random.Random(10), 3)
    write(path, [fleet.decide(policy(SHIPPED["lmetric"])) for _ in range(200)])
    found = compare(path, policy(SHIPPED["bailian"]))
    for spread in (found.spread_before, found.spread_after):
        assert spread.requests.total() == 200
        assert 1 <= (spread.imbalance(3) or 0) <= 3
    assert found.spread_before.hit_prompt_tokens == found.spread_after.hit_prompt_tokens > 0
    (example,) = found.examples.values()
    moved = [one for one in Reading([path]) if one.line.request.prompt_len > example.recorded.line.request.prompt_len]
    after = Judges(policy(SHIPPED["bailian"]))
    for one in moved:  # no larger request moves, but for ties
        decision = after.of(one.policy).decide(one)
        assert getattr(decision, "instance", None) == one.line.instance or getattr(decision, "tied", 0) > 1

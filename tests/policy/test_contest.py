"""What a decision says of its candidates: ranks, the runner-up, the margin."""

from __future__ import annotations

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.policy import Decision, Policy, Snapshot, load
from tests.policy.deciding import decide

POLICIES = [
    load(f"policy p\n{body}\n", VOCABULARY)
    for body in (
        "route argmin(requests)",
        "keep waiting < 5 as calm\nroute argmax(requests)",
        "route rr_argmin(requests where waiting < 5) as few\nroute rr_argmin(0) as any",
    )
]


@pytest.mark.parametrize("rule", ["rr_argmin(kv_usage", "rr_argmax(-kv_usage"])
def test_those_tied_are_those_who_have_their_turn(rule: str) -> None:
    # 0.42 + 0.83 is 1.25, and 1.25 - 0.42 more than 0.83.
    seen = Snapshot(["a", "b"], {"kv_usage": [0.42, 1.25]})
    decisions = [decide(f"route {rule}, within: 0.83)", seen, last=last) for last in seen.ids]
    assert [decision.instance for decision in decisions] == ["b", "a"]
    assert [decision.tied for decision in decisions] == [2, 2]


@given(
    st.sampled_from(POLICIES),
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([0.0, 1.0, 2.0, float("inf")]), st.integers(0, 9).map(float)),
        min_size=1,
        max_size=7,
        unique_by=lambda cell: cell[0],
    ),
    st.integers(0, 2**63),
)
def test_the_runner_up_is_the_second_of_the_ranked(
    policy: Policy, cells: list[tuple[int, float, float]], seed: int
) -> None:
    columns = {"requests": [requests for _, requests, _ in cells], "waiting": [waiting for _, _, waiting in cells]}
    snapshot = Snapshot([f"gpu-{number}" for number, _, _ in cells], columns)
    request = types.SimpleNamespace(**{name: field.default for name, field in VOCABULARY.request.items()})
    decision = policy.decide(snapshot, request, {}, seed)
    assert isinstance(decision, Decision)
    ranked = decision.ranked
    second = ranked[1] if decision.index >= 0 and len(ranked) > 1 else None
    assert decision.runner_up_index == second
    assert decision.runner_up == (None if second is None else snapshot.ids[second])
    if decision.score is None or second is None:
        assert decision.margin is None

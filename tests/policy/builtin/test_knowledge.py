from __future__ import annotations

from smetric.policy import Snapshot
from smetric.policy.builtin import age, known


def test_a_value_is_known_where_all_its_features_are_and_as_old_as_the_oldest() -> None:
    snapshot = Snapshot(
        ["a", "b", "c"],
        {"x": [1, 2, 3], "y": [1, 2, 3]},
        known={"x": [True, False, True]},
        stamps={"x": [8.0, 9.0, None], "y": [9.0, 1.0, 9.0]},
        now=10.0,
    )
    assert known(snapshot, ["x", "y"]) == [True, False, True]
    assert age(snapshot, ["x", "y"]) == [2.0, 1e9, 1e9]
    assert age(snapshot, []) == [0.0, 0.0, 0.0]

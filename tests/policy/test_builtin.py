from __future__ import annotations

import pytest

from smetric.policy.builtin import BUILTINS, UNAVAILABLE, Builtin
from smetric.policy.interval import Interval


@pytest.mark.parametrize("row", BUILTINS.values(), ids=BUILTINS.keys())
def test_a_row_agrees_with_itself(row: Builtin) -> None:
    assert row.signature.startswith(f"{row.name}(")
    assert row.doc.endswith(".")
    assert ("where" in row.signature) == row.where
    assert all(f"{name}:" in row.signature for name in row.named)
    assert set(row.required) <= set(row.named)
    assert row.most is None or row.least <= row.most
    assert row.of_nobody or "default" in row.named


def test_no_built_in_is_both_there_and_missing() -> None:
    assert not BUILTINS.keys() & UNAVAILABLE


def test_bounds_follow_the_arguments() -> None:
    one, two = Interval(1.0, 4.0), Interval(-2.0, 3.0)
    assert BUILTINS["greatest"].bounds([one, two]) == Interval(1.0, 4.0)
    assert BUILTINS["least"].bounds([one, two]) == Interval(-2.0, 3.0)
    assert BUILTINS["norm"].bounds([one]) == Interval(0.0, 1.0)
    assert BUILTINS["mean"].bounds([two]) == two

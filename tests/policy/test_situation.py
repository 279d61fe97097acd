"""What is asked in a situation that is written down."""

from __future__ import annotations

from typing import Any

import pytest

from smetric.features import VOCABULARY
from smetric.policy.testing import Situation


@pytest.mark.parametrize(
    ("hits", "given", "asked"),
    [
        ([None], {}, (1.0, 0.0)),
        ([600.0], {}, (600.0, 0.0)),
        ([600.0], {"est_hit": 900.0}, (900.0, 900.0)),
        ([600.0], {"est_hit": None}, (600.0, None)),
        ([600.0], {"est_hit": 900.0, "prompt_len": 500.0}, (500.0, 500.0)),
    ],
)
def test_a_prompt_is_as_long_as_what_is_said_of_its_parts(
    hits: list[float | None], given: dict[str, Any], asked: tuple[float, float | None]
) -> None:
    request = Situation(["a"], {"hit_len": hits}, request=given).asking(VOCABULARY)
    assert (request.prompt_len, request.est_hit) == asked

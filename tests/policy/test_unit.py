from __future__ import annotations

import pytest

from smetric.features import VOCABULARY
from smetric.policy.types import PLAIN, canonical, parse_unit


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (("token", ""), "tokens"),
        (("tokens", "seconds"), "tokens per second"),
        (("seconds", "token"), "seconds per token"),
        (("reqs", "second"), "reqs per second"),
    ],
)
def test_units_are_written_in_one_way(words: tuple[str, str], written: str) -> None:
    assert canonical(*words) == written


def test_products_and_quotients_cancel() -> None:
    tokens, rate = parse_unit("tokens"), parse_unit("tokens per second")
    assert str(tokens / rate) == "seconds"
    assert tokens / tokens == PLAIN
    assert str(tokens * tokens * parse_unit("requests")) == "requests·tokens²"
    assert str(PLAIN / rate / rate) == "seconds² per token²"


def test_a_unit_reads_back_as_written() -> None:
    for feature in VOCABULARY.features.values():
        assert str(parse_unit(feature.unit)) == feature.unit
    with pytest.raises(ValueError, match="unknown unit `reqs`"):
        parse_unit("reqs")

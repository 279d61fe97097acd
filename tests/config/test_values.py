import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.config.values import BYTES, SECONDS, read_quantity, show_quantity, text


@given(count=st.decimals(min_value=0, max_value=3600, places=3), unit=st.sampled_from(sorted(SECONDS)))
def test_duration_reads_back_as_shown(count: object, unit: str) -> None:
    value = read_quantity(f"{count}{unit}", SECONDS)
    assert read_quantity(show_quantity(value, SECONDS), SECONDS) == pytest.approx(value, rel=1e-12, abs=1e-12)


@given(count=st.integers(min_value=0, max_value=4096), unit=st.sampled_from(sorted(BYTES)))
def test_size_reads_back_as_shown(count: int, unit: str) -> None:
    value = read_quantity(f"{count}{unit}", BYTES)
    assert read_quantity(show_quantity(value, BYTES), BYTES) == value


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.02, "20ms"), (90.0, "90s"), (180.0, "3m"), (0.0, "0s"), (1.5, "1500ms"), (0.00025, "250us")],
)
def test_duration_is_shown_in_the_largest_whole_unit(value: float, shown: str) -> None:
    assert show_quantity(value, SECONDS) == shown


@pytest.mark.parametrize(("value", "fits"), [("ab", True), ("ab\n", False), ("abc", False), ("", False)])
def test_text_pattern_matches_from_end_to_end(value: str, fits: bool) -> None:
    pattern = text("[a-z]{2}", "two letters").pattern
    assert pattern is not None
    assert bool(re.search(pattern, value)) is fits

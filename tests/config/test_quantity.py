import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.config.values import BYTES, SECONDS, Duration, Scalar, Size


def scalar(text: str) -> Scalar:
    return Scalar(text=text, place="here")


@given(count=st.decimals(min_value=0, max_value=3600, places=3), unit=st.sampled_from(sorted(SECONDS)))
def test_a_time_that_is_shown_reads_as_itself(count: object, unit: str) -> None:
    kind = Duration("0s", "3600h")
    value = kind.parse(scalar(f"{count}{unit}"), "x")
    assert kind.parse(scalar(kind.show(value)), "x") == pytest.approx(value, rel=1e-12, abs=1e-12)


@given(count=st.integers(min_value=0, max_value=4096), unit=st.sampled_from(sorted(BYTES)))
def test_a_size_that_is_shown_reads_as_itself(count: int, unit: str) -> None:
    kind = Size("0B", "8192GiB")
    value = kind.parse(scalar(f"{count}{unit}"), "x")
    assert kind.parse(scalar(kind.show(value)), "x") == value


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.02, "20ms"), (90.0, "90s"), (180.0, "3m"), (0.0, "0s"), (1.5, "1500ms"), (0.00025, "250us")],
)
def test_a_time_is_shown_in_the_largest_unit_that_keeps_it_whole(value: float, shown: str) -> None:
    assert Duration().show(value) == shown

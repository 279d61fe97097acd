"""Bytes per token, learned from engines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.request.request import INITIAL, LEAST, MAX_MODELS, MOST, TokenRatio


def test_a_model_starts_at_four_bytes_per_token() -> None:
    assert TokenRatio().of("m") == INITIAL == 4.0


def test_the_ratio_of_one_model_comes_to_what_its_engine_counts() -> None:
    ratio = TokenRatio()
    for size in range(1000, 3000, 100):
        ratio.learn("m", size * 3, size)
    assert abs(ratio.of("m") - 3.0) < 0.01
    assert ratio.of("other") == INITIAL


def test_one_absurd_report_moves_it_little() -> None:
    ratio = TokenRatio()
    for _ in range(50):
        ratio.learn("m", 3500, 1000)
    ratio.learn("m", 3500, 1_000_000)
    assert 3.5 * 0.95 < ratio.of("m") <= 3.5


def test_short_prompts_teach_nothing() -> None:
    ratio = TokenRatio()
    ratio.learn("m", 20, 30)
    ratio.learn("m", 0, 1000)
    ratio.learn("m", 1000, 0)
    assert ratio.of("m") == INITIAL


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9))))
def test_the_ratio_stays_in_its_bounds_whatever_is_reported(reports: list[tuple[int, int]]) -> None:
    ratio = TokenRatio()
    for size, tokens in reports:
        ratio.learn("m", size, tokens)
    assert LEAST <= ratio.of("m") <= MOST


def test_the_number_of_models_is_bounded_and_the_stalest_goes() -> None:
    ratio = TokenRatio()
    for i in range(MAX_MODELS):
        ratio.learn(f"m{i}", 3000, 1000)
    ratio.learn("m0", 3000, 1000)
    ratio.learn("new", 3000, 1000)
    assert ratio.of("m0") == ratio.of("new") == 3.0
    assert ratio.of("m1") == INITIAL

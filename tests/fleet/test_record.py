from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric import names
from smetric.fleet.record import CLIENT_TEXT_MAX, safe
from tests.telemetry import samples


def test_hits_of_a_decision_are_the_known_ones() -> None:
    made = samples.record(hits=(0, 880, 0), loads=(2, 1, 3), known=[True, True, False])
    assert made.instance is not None
    assert (made.instance.id, made.hit, made.best_hit) == ("gpu-1", (880, "prefix_index"), 880)
    elsewhere = samples.record(hits=(0, 880, 0), loads=(2, 30, 1), known=[True, True, False])
    assert elsewhere.instance is not None
    assert (elsewhere.instance.id, elsewhere.hit, elsewhere.best_hit) == ("gpu-2", None, 880)
    assert samples.record(known=[False] * 3).best_hit is None


def test_hit_is_unknown_without_a_chosen_instance() -> None:
    rejected, pinned = samples.record(names.REJECTED), samples.record(names.PINNED)
    assert (rejected.hit, rejected.best_hit) == (None, 880)
    assert (pinned.hit, pinned.best_hit) == (None, None)


def test_count_keeps_the_share_of_an_estimated_prompt() -> None:
    made = samples.record()  # of 1,000 tokens
    assert made.as_counted(880, 500) == 440
    made.tokens_source = "exact"
    assert made.as_counted(880, 500) == 880


@given(st.text(st.characters(codec="utf-8"), max_size=2 * CLIENT_TEXT_MAX))
def test_safe_text_is_bounded_and_printable(text: str) -> None:
    shown = safe(text)
    assert shown.isprintable()
    assert len(shown) <= CLIENT_TEXT_MAX


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("m" * CLIENT_TEXT_MAX, "m" * CLIENT_TEXT_MAX),
        ("m" * (CLIENT_TEXT_MAX + 1), "m" * (CLIENT_TEXT_MAX - 1) + "…"),
        ("a\nb\x1b[31m", "a\\nb\\x1b[31m"),
    ],
)
def test_safe_text_keeps_short_harmless_text(text: str, shown: str) -> None:
    assert safe(text) == shown

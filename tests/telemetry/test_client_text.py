"""Text from clients: bounded, and without anything that a terminal or a log reader would obey."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.fleet.record import CLIENT_TEXT_MAX, safe


@given(st.text(st.characters(codec="utf-8"), max_size=2 * CLIENT_TEXT_MAX))
def test_whatever_comes_is_bounded_and_has_no_control_characters(text: str) -> None:
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
def test_what_is_short_and_harmless_stays_as_it_is(text: str, shown: str) -> None:
    assert safe(text) == shown

"""Moved."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, words: Iterable[str]) -> str:
    """The one of *words* that *word* was probably meant to be, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return close[0] if close else ""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`; did you mean …?` when one of *words* is close to *word*, else nothing."""
    close = closest(word, words)
    return f"; did you mean {close}?" if close else ""

"""Rendering of diagnostics, and their codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import smetric.policy
from smetric.features import VOCABULARY
from smetric.policy import load
from smetric.policy.diagnostic import (
    WAYS_OUT,
    Diagnostic,
    PolicyError,
    Severity,
    Span,
    quote,
    unreadable,
)


def test_diagnostic_marks_only_the_first_line() -> None:
    text = "policy p\nroute a\n  when b\n"
    found = Diagnostic("unused", "wrong", Span(9, 25)).render(text, "f")
    assert found == "error: wrong\n --> f:2:1\n  |\n2 | route a\n  | ^^^^^^^\n  = help: remove it"


def test_diagnostic_keeps_tabs_and_hides_control_characters() -> None:
    text = "\tlet\tx\x1b[2J = 1"
    lines = Diagnostic("unused", "wrong", Span(5, 6), severity=Severity.WARNING).render(text, "f").split("\n")
    assert lines[0] == "warning: wrong"
    assert lines[3] == "1 | \tlet\tx�[2J = 1"
    assert lines[4] == "  | \t   \t^"


def test_diagnostic_cuts_a_long_line_around_the_caret() -> None:
    text = "a" * 5000 + "!" + "b" * 5000
    lines = Diagnostic("unused", "wrong", Span(5000, 5001)).render(text, "f").split("\n")
    assert len(lines[3]) < 200
    assert lines[3][lines[4].index("^")] == "!"


def test_policy_error_holds_each_diagnostic_once_in_text_order() -> None:
    late, early = Diagnostic("unused", "late", Span(5, 6)), Diagnostic("unused", "early", Span(1, 2))
    error = PolicyError([late, early, late], "abcdefgh", "f")
    assert error.diagnostics == (early, late)
    assert str(error).index("early") < str(error).index("late")


def test_diagnostic_of_an_unreadable_file_shows_no_frame() -> None:
    shown = unreadable("policy x: cannot be read: No such file or directory").render("", "x")
    assert shown.splitlines() == [
        "error: policy x: cannot be read: No such file or directory",
        " = help: name an existing file with read permission",
    ]


def test_quote_is_one_short_line_without_comments() -> None:
    text = 'a + # why\n  b != "#" # a'
    assert quote(text, Span(0, len(text) - 4)) == 'a + b != "#"'
    assert len(quote("a" * 500, Span(0, 500))) == 60


def test_policy_error_lists_errors_before_warnings() -> None:
    with pytest.raises(PolicyError) as caught:
        load("policy p\nparam A = 1\nroute rr_argmin(0) when req.turn == 0\n", VOCABULARY)
    assert [found.severity.value for found in caught.value.diagnostics] == ["error", "warning"]


_MADE = re.compile(r"(?:[._]error|\.warn|Bad|Diagnostic)\(\s*\"([a-z0-9-]+)\"")


_ROW = re.compile(r"^\| `([a-z-]+)` \| (error|warning) \| \S.*\. \|$", re.MULTILINE)


def test_manual_lists_the_codes_in_use_in_order() -> None:
    package = Path(smetric.policy.__file__).parent
    made = {code for path in package.rglob("*.py") for code in _MADE.findall(path.read_text())}
    rows = _ROW.findall((package.parents[1] / "docs" / "reference" / "language.md").read_text())
    assert [code for code, _ in sorted(rows, key=lambda row: row[::-1])] == list(WAYS_OUT)
    assert made == WAYS_OUT.keys()

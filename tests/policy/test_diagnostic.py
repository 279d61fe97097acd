from __future__ import annotations

import pytest

from smetric.features import VOCABULARY
from smetric.policy import load
from smetric.policy.diagnostic import Diagnostic, PolicyError, Severity, Span, quote


def test_a_caret_stays_on_the_first_line_of_what_it_marks() -> None:
    text = "policy p\nroute a\n  when b\n"
    found = Diagnostic("unused", "wrong", Span(9, 25)).render(text, "f")
    assert found == "error: wrong\n --> f:2:1\n  |\n2 | route a\n  | ^^^^^^^\n  = help: take it out"


def test_tabs_keep_the_caret_in_place_and_strange_characters_do_not_reach_the_terminal() -> None:
    text = "\tlet\tx\x1b[2J = 1"
    lines = Diagnostic("unused", "wrong", Span(5, 6), severity=Severity.WARNING).render(text, "f").split("\n")
    assert lines[0] == "warning: wrong"
    assert lines[3] == "1 | \tlet\tx�[2J = 1"
    assert lines[4] == "  | \t   \t^"


def test_a_long_line_is_shown_around_the_caret() -> None:
    text = "a" * 5000 + "!" + "b" * 5000
    lines = Diagnostic("unused", "wrong", Span(5000, 5001)).render(text, "f").split("\n")
    assert len(lines[3]) < 200
    assert lines[3][lines[4].index("^")] == "!"


def test_an_error_holds_each_finding_once_in_the_order_of_the_text() -> None:
    late, early = Diagnostic("unused", "late", Span(5, 6)), Diagnostic("unused", "early", Span(1, 2))
    error = PolicyError([late, early, late], "abcdefgh", "f")
    assert error.diagnostics == (early, late)
    assert str(error).index("early") < str(error).index("late")


def test_a_quote_is_one_short_line_without_comments() -> None:
    text = 'a + # why\n  b != "#" # a'
    assert quote(text, Span(0, len(text) - 4)) == 'a + b != "#"'
    assert len(quote("a" * 500, Span(0, 500))) == 60


def test_errors_come_before_warnings() -> None:
    with pytest.raises(PolicyError) as caught:
        load("policy p\nparam A = 1\nroute rr_argmin(0) when req.turn == 0\n", VOCABULARY)
    assert [found.severity.value for found in caught.value.diagnostics] == ["error", "warning"]

"""The automaton of the grammar."""

from __future__ import annotations

from typing import Any

import pytest
from lark import Lark

from smetric.policy.diagnostic import Span
from smetric.policy.lexer import Scanner
from smetric.policy.parser import Automaton, Reduced, Stuck

GRAMMAR = r"""
start: "(" NAME ("," NAME)* [SIGN] ")"
?both: start | start "+" both -> both
SIGN: "-"
NAME: /[a-z]+/
%ignore " "
"""
LARK = Lark(GRAMMAR, parser="lalr", lexer="basic", start=["start", "both"], tree_class=Reduced)


class Rules:
    """Nodes are tuples: the rule, its place, its parts."""

    def start(self, span: Span, parts: list[Any]) -> tuple[str, int, int, list[Any]]:
        return ("start", span.start, span.end, parts)

    def both(self, span: Span, parts: list[Any]) -> tuple[str, int, int, list[Any]]:
        return ("both", span.start, span.end, parts)


def read(text: str, rule: str) -> Any:
    return Automaton(LARK, ("start", "both")).run(rule, Scanner(LARK).scan(text, 0)[0], Rules())


def test_a_rule_gets_its_parts_and_its_place_with_its_brackets() -> None:
    assert read(" (a, b, c -)", "start") == ("start", 1, 12, ["a", "b", "c", "-"])


def test_an_optional_part_that_is_absent_is_none() -> None:
    assert read("(a)", "start") == ("start", 0, 3, ["a", None])


def test_a_rule_that_only_passes_on_makes_no_node() -> None:
    assert read("(a)", "both") == ("start", 0, 3, ["a", None])
    assert read("(a) + (b)", "both") == ("both", 0, 9, [("start", 0, 3, ["a", None]), ("start", 6, 9, ["b", None])])


@pytest.mark.parametrize("text", ["(a", "a)", "(a))", "(,)", "()"])
def test_what_the_grammar_does_not_allow_is_stuck(text: str) -> None:
    with pytest.raises(Stuck):
        read(text, "start")

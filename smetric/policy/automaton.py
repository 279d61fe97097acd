"""Runs the automaton that Lark makes of the grammar over the tokens of one statement, each part with its place.

Lark's own way is a tree with positions and then a walk over it, which takes three times as long; what the automaton
does is the same. Why a statement does not parse is not said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lark import Lark
from lark.parsers.lalr_analysis import Shift

from smetric.policy.token import Token
from smetric.policy.tree import Span


@dataclass(frozen=True, slots=True)
class Reduced:
    """What Lark makes of a rule: its name, and its parts, None where an optional one is absent."""

    rule: str
    children: list[Any]


class Stuck(Exception):
    """The tokens are no sentence of the grammar."""


def run(lark: Lark, start: str, tokens: Sequence[Token], rules: object) -> Any:
    """The node of the whole statement.

    Args:
        lark: the grammar, made with `Reduced` in place of Lark's trees.
        start: the rule that the tokens should follow.
        tokens: those of one statement, one at least.
        rules: makes the node of a rule by the method of its name, given its place and its parts.

    Raises:
        Stuck: they do not follow it.
    """
    automaton = lark.parse_interactive("", start=start).parser_state.parse_conf
    states, reduce = automaton.states, automaton.callbacks
    path: list[Any] = [automaton.start_state]
    values: list[Any] = []
    starts: list[int] = []
    ends: list[int] = []
    for token in (*tokens, Token("", "$END", 0, 0)):
        kind = token.type
        while True:
            try:
                action, target = states[path[-1]][kind]
            except KeyError:
                raise Stuck from None
            if action is Shift:
                path.append(target)
                values.append(token)
                starts.append(token.start)
                ends.append(token.end)
                break
            size = len(target.expansion)  # no rule of the grammar is empty
            begin, end = starts[-size], ends[-1]
            made = reduce[target](values[-size:])
            if type(made) is Reduced and made.rule[0] != "_":  # Lark's own rules, of repetitions, start with one
                made = getattr(rules, made.rule)(Span(begin, end), made.children)
            del path[-size:], values[-size:], starts[-size:], ends[-size:]
            path.append(states[path[-1]][target.origin.name][1])
            if path[-1] == automaton.end_state:
                return made
            values.append(made)
            starts.append(begin)
            ends.append(end)
    raise Stuck

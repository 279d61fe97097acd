"""The automaton that Lark makes of the grammar, run over the tokens of one statement, each part with its place.

Lark's own way is a tree with positions and then a walk over it, which takes three times as long; what the automaton
does is the same. Why a statement does not parse is not said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lark import Lark
from lark.parsers.lalr_analysis import Shift

from smetric.policy.span import Span
from smetric.policy.token import END, Token


@dataclass(frozen=True, slots=True)
class Reduced:
    """What Lark makes of a rule: its name, and its parts, None where an optional one is absent."""

    rule: str
    children: list[Any]


#: A rule that ends: how many parts it has, what is made of them, and its own symbol.
_Rule = tuple[int, Callable[[list[Any]], Any], str]


class Stuck(Exception):
    """The tokens are no sentence of the grammar."""


class Automaton:
    """Reads statements.

    Args:
        lark: the grammar, made with `Reduced` in place of Lark's trees. No rule of it is empty.
        starts: the rules that a statement may follow.
    """

    def __init__(self, lark: Lark, starts: Sequence[str]) -> None:
        made = {start: lark.parse_interactive("", start=start).parser_state.parse_conf for start in starts}
        self._ends = {start: (one.start_state, one.end_state) for start, one in made.items()}
        one = made[starts[0]]  # all have the same states

        #: By state and what comes next, a terminal or a rule, the state that follows; or what ends before a terminal.
        self._shifts: dict[int, dict[str, int]] = {}
        self._ended: dict[int, dict[str, _Rule]] = {}
        for state, moves in one.states.items():
            self._shifts[state] = {symbol: target for symbol, (action, target) in moves.items() if action is Shift}
            self._ended[state] = {
                symbol: (len(rule.expansion), one.callbacks[rule], rule.origin.name)
                for symbol, (action, rule) in moves.items()
                if action is not Shift
            }

    def run(self, start: str, tokens: Sequence[Token], rules: object) -> Any:
        """The node of a whole statement.

        Args:
            start: the rule that the tokens should follow.
            tokens: those of one statement, one at least.
            rules: makes the node of a rule by the method of its name, given its place and its parts.

        Raises:
            Stuck: they do not follow it.
        """
        shifts, ended = self._shifts, self._ended
        state, end_state = self._ends[start]
        path = [state]
        values: list[Any] = []
        starts: list[int] = []
        ends: list[int] = []
        for token in (*tokens, END):
            kind = token.type
            while (rule := ended[state].get(kind)) is not None:
                size, make, symbol = rule
                begin, end = starts[-size], ends[-1]
                made = make(values[-size:])
                if type(made) is Reduced and made.rule[0] != "_":  # Lark's own rules, of repetitions, start with one
                    made = getattr(rules, made.rule)(Span(begin, end), made.children)
                del path[-size:], values[-size:], starts[-size:], ends[-size:]
                state = shifts[path[-1]][symbol]
                if state == end_state:
                    return made
                path.append(state)
                values.append(made)
                starts.append(begin)
                ends.append(end)
            following = shifts[state].get(kind)
            if following is None:
                break
            state = following
            path.append(state)
            values.append(token)
            starts.append(token.start)
            ends.append(token.end)
        raise Stuck

"""What to tell somebody whose `test` does not parse: habits from other tables, words and values.

What is told of any statement is in `syntax_error`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from smetric.policy.diagnostic import Diagnostic, clip
from smetric.policy.lexer import same_line
from smetric.policy.stop import Stop, unexpected
from smetric.policy.suggestion import closest, truth
from smetric.policy.token import END, Token

#: The words that begin the parts of a test.
_PARTS = ("with", "given", "instance", "expect")


def explain_case(stop: Stop) -> Diagnostic | None:
    """The diagnostic for a *stop* in a test; None where it is in another statement, or like those there."""
    return next((found for rule in _RULES if (found := rule(stop)) is not None), None) if stop.in_test else None


def _outer_bar(stop: Stop) -> Diagnostic | None:
    """A `|` before the first cell of a row, or behind the last."""
    for before, token, behind in _around(stop):
        if token.type != "VBAR":
            continue
        if not same_line(before, token):
            return unexpected(token, "a row starts with the name of its instance, without a `|`")
        if behind is END or not same_line(token, behind):
            return unexpected(token, "a row ends with its last cell, without a `|`")
    return None


def _part(stop: Stop) -> Diagnostic | None:
    """A word that begins no part of a test, but was meant to."""
    for before, token, behind in _around(stop):
        starts = token.type == "NAME" and not same_line(before, token)
        is_other = behind.type in ("VBAR", "EQUAL")  # a row, or a setting
        is_next = behind.type == "STRING"  # the sentence of another test
        meant = closest(token, ("test",) if is_next else _PARTS) if starts and not is_other else ""
        if meant:
            return unexpected(token, f"did you mean `{meant}`?")
    return None


def _unit(stop: Stop) -> Diagnostic | None:
    """A unit in a cell."""
    for before, token, _ in _around(stop):
        if token.type == "NAME" and before.type == "NUMBER" and _in_table(stop, token):
            return unexpected(token, "cells carry no unit: a column has that of its feature")
    return None


def _bare_word(stop: Stop) -> Diagnostic | None:
    """A string without quotes in a cell."""
    token, previous = stop.token, stop.previous
    if token.type != "NAME" or previous.type not in ("VBAR", "LBRACE", "COMMA"):
        return None
    if "UNKNOWN" not in stop.accepted and "STRING" not in stop.accepted:
        return None
    help_text = truth(token) or f'quote it if it is a string, "{clip(token)}"; what nobody knows is `?`'
    return unexpected(token, help_text)


def _field(stop: Stop) -> Diagnostic | None:
    """`req.` in `given`, or in a guard without quotes."""
    token = stop.token
    if token.type != "DOT" or stop.previous != "req":
        return None
    if any(earlier.type == "FAILING" for earlier in stop.before):
        return unexpected(token, 'quote what is no name: failing "req.turn != 0"')
    return unexpected(token, f"`given` is of the request, so write `{stop.following or 'turn'} = …`")


_RULES: tuple[Callable[[Stop], Diagnostic | None], ...] = (_outer_bar, _part, _unit, _bare_word, _field)


def _around(stop: Stop) -> Iterator[tuple[Token, Token, Token]]:
    """Each token up to where the parse stopped, but the first, with its neighbours."""
    tokens = stop.tokens
    return islice(zip(tokens, tokens[1:], (*tokens[2:], END), strict=False), stop.place)


def _in_table(stop: Stop, token: Token) -> bool:
    """Whether *token* stands behind a `|` of its own line."""
    return any(each.type == "VBAR" and same_line(each, token) and each.start < token.start for each in stop.tokens)

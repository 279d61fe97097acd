"""What to tell somebody who writes a number as it is written elsewhere, where that does not parse.

What parses all the same, as `4k` does, is the checker's of units.
"""

from __future__ import annotations

from collections.abc import Callable

from smetric.policy.diagnostic import Diagnostic, clip
from smetric.policy.stop import Stop, unexpected
from smetric.policy.suggestion import BEHIND_NUMBERS, NUMBERS, PRODUCT, did_you_mean
from smetric.policy.unit import base_unit


def explain_number(stop: Stop) -> Diagnostic | None:
    """The diagnostic for *stop*; None where no number is the reason."""
    return next((found for rule in _RULES if (found := rule(stop)) is not None), None)


def _separator(stop: Stop) -> Diagnostic | None:
    """`1,000`, or `0,9`."""
    token, before = stop.token, stop.previous
    if token.type != "COMMA" or before.type != "NUMBER":
        return None
    parts, end = [str(before)], before.end
    for comma, behind in zip(stop.tokens[stop.place :: 2], stop.tokens[stop.place + 1 :: 2], strict=False):
        if (comma.type, comma.start, behind.type, behind.start) != ("COMMA", end, "NUMBER", comma.end):
            break
        parts.append(str(behind))
        end = behind.end
    if len(parts) == 1:
        return None
    if len(parts) == 2 and (len(parts[1]) != 3 or parts[0] == "0"):
        return unexpected(token, f"decimals follow a dot: write {'.'.join(parts)}")
    return unexpected(token, f"numbers have no separators: write {''.join(parts)}")


def _thousands(stop: Stop) -> Diagnostic | None:
    """`4k tokens`: the unit stands behind what was taken for one."""
    number, unit = stop.second_last, stop.previous
    if stop.token.type != "NAME" or unit.type != "NAME" or number.type != "NUMBER" or number.end != unit.start:
        return None
    return Diagnostic("unit", f"unknown unit `{clip(unit)}`", unit.span, NUMBERS)


def _product(stop: Stop) -> Diagnostic | None:
    """`3 norm(v)`: a call, taken for a unit."""
    token, word, number = stop.token, stop.previous, stop.second_last
    if token.type != "LPAR" or word.type != "NAME" or word.end != token.start:
        return None
    return unexpected(word, f"{PRODUCT} {clip(number)} * {clip(word)}(…)") if number.type == "NUMBER" else None


def _mistyped(stop: Stop) -> Diagnostic | None:
    """`2 annd mean(requests) < 3`: the word was taken for a unit."""
    word = stop.previous
    if word.type != "NAME" or stop.second_last.type != "NUMBER":
        return None
    meant = did_you_mean(word, BEHIND_NUMBERS) if base_unit(word) is None else ""
    return Diagnostic("unit", f"unknown unit `{clip(word)}`", word.span, meant) if meant else None


def _bare_per(stop: Stop) -> Diagnostic | None:
    if stop.token.type != "PER" or stop.previous.type != "NUMBER":
        return None
    return Diagnostic("unit", "a unit is missing before `per`", stop.token.span, "e.g. 5 requests per second")


def _divided(stop: Stop) -> Diagnostic | None:
    """`5 tokens/s`, where no division can stand."""
    if (stop.second_last.type, stop.previous.type, stop.token.type) != ("NUMBER", "NAME", "SLASH"):
        return None
    return unexpected(stop.token, "units divide with `per`: 5 tokens per second")


def _bare_point(stop: Stop) -> Diagnostic | None:
    """`1.`"""
    token, number = stop.token, stop.previous
    if token.type != "DOT" or number.type != "NUMBER" or number.end != token.start:
        return None
    return unexpected(token, f"a digit follows the dot: write {clip(number)}.0, or {clip(number)}")


_RULES: tuple[Callable[[Stop], Diagnostic | None], ...] = (
    _separator,
    _thousands,
    _product,
    _mistyped,
    _bare_per,
    _divided,
    _bare_point,
)

"""What an argument of a built-in must be: of which kind, in which unit, how large; `Bad` where it is not.

What the call gives is in `check_family`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smetric.policy import tree
from smetric.policy.builtin import Builtin
from smetric.policy.check_unit import Units, describe
from smetric.policy.figure import exact
from smetric.policy.span import Span
from smetric.policy.suggestion import comparison
from smetric.policy.types import Sort, Type
from smetric.policy.unit import PLAIN

Pair = tuple[tree.Argument, Type]

_WORDS = {
    Sort.NUMBER: "a number",
    Sort.BOOL: "a truth value",
    Sort.STRING: "a string",
    Sort.INSTANCE: "an instance",
}


class Bad(Exception):
    """A call has no type; `found` is why, as `Findings.error` takes it."""

    def __init__(self, code: str, span: Span, message: str, help_text: str = "") -> None:
        super().__init__(message)
        self.found = code, span, message, help_text


@dataclass(frozen=True, slots=True)
class Given:
    """A call whose shape is as its row says: positional and named arguments with their types, and that of `where`."""

    call: tree.Call
    builtin: Builtin
    plain: Sequence[Pair]
    named: Sequence[Pair]
    mask: Type | None

    @property
    def types(self) -> list[Type]:
        """The types of what is always read."""
        return [*(found for _, found in self.plain), *(() if self.mask is None else (self.mask,))]

    def among(self, made: Type, values: Sequence[Type], told: Sequence[Type]) -> Type:
        """*made*, computed from *values*; and from what is *told* besides, where `where` leaves somebody."""
        if self.mask is None:
            return made.reading(*values, *told)
        return made.reading(*values, self.mask).perhaps(*told)

    def other(self, *names: str) -> list[Pair]:
        """The named arguments called one of *names*."""
        return [pair for pair in self.named if pair[0].name in names]


def need(given: Given, pair: Pair, sort: Sort, *, vector: bool | None = None) -> None:
    """An argument must be of *sort*; per instance or single, if *vector* says."""
    argument, found = pair
    if found.sort is sort and vector in (None, found.vector):
        return
    wanted = _WORDS[sort] + {True: " per instance", False: "", None: ""}[vector]
    help_text = ""
    if sort is Sort.INSTANCE:
        help_text = "e.g. first(argmin(x where m), argmin(x))"
    elif sort is Sort.BOOL and found.sort is not sort:
        help_text = comparison(found.sort)
    elif sort is Sort.NUMBER and found.sort is Sort.BOOL:
        help_text = "for how many it holds says count(…)"
    elif found.sort is sort:
        reduced = "make one of it, e.g. mean(…), or look one up: v[s]" if sort is Sort.NUMBER else "look one up: v[s]"
        help_text = "it is one value already" if vector else reduced
    where = f"`{argument.name}:` of " if argument.name else ""
    message = f"{where}`{given.builtin.name}` needs {wanted}, found {found}"
    raise Bad("arguments", argument.value.span, message, help_text)


def need_plain(given: Given, pair: Pair) -> None:
    """An argument must be one number without a unit."""
    need(given, pair, Sort.NUMBER, vector=False)
    argument, found = pair
    if found.unit is not None and not found.unit.plain:
        message = f"`{given.builtin.name}` needs a plain number, found {found}"
        help_text = f"take its unit away: … {(PLAIN / found.unit).as_literals}"
        raise Bad("units", argument.value.span, message, help_text)


def need_share(given: Given, pair: Pair) -> None:
    """An argument must be one plain number in 0..1."""
    need_plain(given, pair)
    argument, found = pair
    if found.interval.low < 0 or found.interval.high > 1:
        message = f"`{given.builtin.name}` needs a share in 0..1, and this {found.interval.place}"
        help_text = "keep it there: clamp(…, 0, 1); a parameter: `in 0..1`"
        if found.interval.low == found.interval.high and 1 < found.interval.high <= 100:
            help_text = f"write {exact(found.interval.high / 100)} for {exact(found.interval.high)} %"
        raise Bad("range", argument.value.span, message, help_text)


def need_never_negative(pair: Pair, what: str) -> None:
    """An argument, which *what* names, must be a number that is never below 0."""
    argument, found = pair
    if found.interval.low < 0:
        raise Bad("range", argument.value.span, f"{what} may be below 0", "keep it above: greatest(…, 0)")


def need_amount(given: Given, pair: Pair) -> None:
    """An argument may be 1 or more, and is no single number with a fraction."""
    argument, found = pair
    low, high = found.interval.low, found.interval.high
    if high < 1 or (low == high and low % 1):
        message = f"`{given.builtin.name}` takes 1, 2, 3, … of the instances, and this {found.interval.place}"
        raise Bad("range", argument.value.span, message, "write a whole number, 1 at least")


def need_like_score(units: Units, given: Given, pair: Pair, what: str, help_text: str) -> None:
    """A named argument must be one number, never below 0, in the unit of what is compared."""
    need(given, pair, Sort.NUMBER, vector=False)
    argument, found = pair
    score = given.plain[0][1]
    if score.sort is Sort.NUMBER and not units.agree(score, found):
        message = f"{what} has the unit of the score, {describe(score)}, not {describe(found)}"
        named = units.unit_of_name(argument.value, found, score)
        raise Bad("units", argument.value.span, message, named or help_text)
    need_never_negative(pair, what)

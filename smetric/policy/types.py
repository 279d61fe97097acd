"""The type of an expression: its kind, its unit, whether there is one for each candidate, and where it can lie."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from smetric.policy.interval import TRUTH, Interval
from smetric.policy.unit import PLAIN, Unit
from smetric.policy.vocabulary import Feature, Kind, RequestField


class Sort(enum.Enum):
    """The kinds of values; `BROKEN` is what an error left behind, and fits everywhere."""

    NUMBER = "number"
    BOOL = "bool"
    STRING = "string"
    SET = "set"
    INSTANCE = "instance"
    BROKEN = "broken"


_SORTS = {Kind.NUMBER: Sort.NUMBER, Kind.BOOL: Sort.BOOL, Kind.STRING: Sort.STRING, Kind.SET: Sort.SET}


@dataclass(frozen=True, slots=True)
class Type:
    """What is known of an expression.

    Args:
        sort: kind of value.
        vector: one for each candidate.
        unit: of a number; None for a literal without one, which fits any.
        interval: where a number can lie.
        maybe: an instance that may be absent.
        constant: the same in every decision, parameters set aside.
    """

    sort: Sort
    vector: bool = False
    unit: Unit | None = PLAIN
    interval: Interval = TRUTH
    maybe: bool = False
    constant: bool = False

    @property
    def broken(self) -> bool:
        """Whether an error was already reported about it."""
        return self.sort is Sort.BROKEN

    @property
    def named(self) -> Type:
        """The type under a name: a literal without a unit is a plain number from here on."""
        return replace(self, unit=PLAIN) if self.unit is None else self

    def __str__(self) -> str:
        word = self.sort.value
        if self.sort is Sort.NUMBER and self.unit is not None and not self.unit.plain:
            word = str(self.unit)
        return f"{word} per instance" if self.vector else word


BROKEN = Type(Sort.BROKEN)


def number(unit: Unit | None, interval: Interval, *, vector: bool = False, constant: bool = False) -> Type:
    """The type of a number."""
    return Type(Sort.NUMBER, vector, unit, interval, constant=constant)


def truth(*, vector: bool = False, constant: bool = False) -> Type:
    """The type of a truth value."""
    return Type(Sort.BOOL, vector, constant=constant)


def of_word(word: Feature | RequestField, unit: Unit) -> Type:
    """The type of a feature, one for each candidate, or of a request's field, which is single."""
    return Type(_SORTS[word.kind], isinstance(word, Feature), unit, Interval(word.low, word.high))

"""The type of an expression: its kind, its unit, whether there is one for each candidate, and where it can lie."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from smetric.policy.interval import TRUTH, Interval
from smetric.policy.unit import PLAIN, Unit
from smetric.policy.vocabulary import Feature, Kind, RequestField


class Sort(enum.Enum):
    """The kinds of values, those of the vocabulary among them; `BROKEN` is what an error left behind, and fits all."""

    NUMBER = "number"
    BOOL = "bool"
    STRING = "string"
    SET = "set"
    INSTANCE = "instance"
    BROKEN = "broken"


NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Type:
    """What is known of an expression.

    Args:
        sort: kind of value.
        vector: one for each candidate.
        unit: of a number; None for a literal without one, which fits any.
        interval: where a number can lie; of a truth value 1..1 or 0..0 where it is the same always.
        maybe: an instance that may be absent.
        must: the features, `req.` fields and parameters read whenever it is computed.
        may: those that may be read.
    """

    sort: Sort
    vector: bool = False
    unit: Unit | None = PLAIN
    interval: Interval = TRUTH
    maybe: bool = False
    must: frozenset[str] = NOTHING
    may: frozenset[str] = NOTHING

    @property
    def broken(self) -> bool:
        """Whether an error was already reported about it."""
        return self.sort is Sort.BROKEN

    @property
    def named(self) -> Type:
        """The type under a name: a literal without a unit is a plain number from here on."""
        return replace(self, unit=PLAIN) if self.unit is None else self

    @property
    def decided(self) -> bool:
        """Whether this truth value is the same whatever is read."""
        return self.sort is Sort.BOOL and self.interval.low == self.interval.high

    def reading(self, *types: Type) -> Type:
        """This type, computed from values of *types*."""
        must = NOTHING.union(*(each.must for each in types))
        return replace(self, must=must, may=NOTHING.union(*(each.may for each in types)))

    def perhaps(self, *types: Type) -> Type:
        """This type, perhaps computed from values of *types* too."""
        return replace(self, may=self.may.union(*(each.may for each in types)))

    def __str__(self) -> str:
        word = self.sort.value
        if self.sort is Sort.NUMBER and self.unit is not None and not self.unit.plain:
            word = str(self.unit)
        return f"{word} per instance" if self.vector else word


BROKEN = Type(Sort.BROKEN)


def of_word(word: Feature | RequestField, unit: Unit) -> Type:
    """The type of a feature, one for each candidate, or of a request's field, which is single."""
    interval = Interval(word.low, word.high) if word.kind is Kind.NUMBER else TRUTH
    return Type(Sort(word.kind.value), isinstance(word, Feature), unit, interval)

"""Types of expressions: kind, unit, interval, one value or one per instance; and the printing of values."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smetric.policy.vocabulary import Feature, Kind, RequestField

_WIDTH = 40


def figure(value: Any, digits: int = 4) -> str:
    """Return a value for an explanation: decimals cut to *digits* figures, long strings cut."""
    if type(value) is not float:  # most are
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, frozenset | set):
            return clipped("{" + ", ".join(sorted(value)) + "}")
        if isinstance(value, str):
            return clipped(value)
    if value == int(value):
        return str(int(value))
    decimals = max(0, digits - len(str(int(abs(value)))))
    shown = f"{value:.{decimals}f}"
    if float(shown) == 0:
        return f"{value:.{digits - 1}g}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def exact(value: float) -> str:
    """Return a number with all its figures, as the language writes it."""
    return f"{value + 0.0:.15g}"  # -0.0 is 0


def written(value: Any) -> str:
    """Return a value of any kind as the language writes it, `?` for None."""
    if value is None:
        return "?"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, frozenset):
        return "{" + ", ".join(f'"{text}"' for text in sorted(value)) + "}"
    return f'"{value}"' if isinstance(value, str) else exact(value)


def clipped(text: str) -> str:
    """Return *text* cut to 40 characters."""
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


# ── units ────────────────────────────────────────────────────────────────────

#: Singular to plural of every base unit.
BASES = {"token": "tokens", "request": "requests", "block": "blocks", "byte": "bytes", "second": "seconds"}
_SINGULAR = {plural: singular for singular, plural in BASES.items()}
_POWER = {1: "", 2: "²", 3: "³"}


@dataclass(frozen=True, slots=True)
class Unit:
    """Product of base units: their plurals with exponents, sorted and without zeros; empty for a plain number."""

    factors: tuple[tuple[str, int], ...] = ()

    def __mul__(self, other: Unit) -> Unit:
        return self._combine(other, 1)

    def __truediv__(self, other: Unit) -> Unit:
        return self._combine(other, -1)

    def _combine(self, other: Unit, sign: int) -> Unit:
        powers = dict(self.factors)
        for base, power in other.factors:
            powers[base] = powers.get(base, 0) + sign * power
        return Unit(tuple(sorted((base, power) for base, power in powers.items() if power)))

    @property
    def plain(self) -> bool:
        """Whether this is a plain number."""
        return not self.factors

    @property
    def writable(self) -> bool:
        """Whether one literal can have it: `tokens`, or `tokens per second`."""
        powers = [power for _, power in self.factors]
        return powers.count(1) == 1 and powers.count(-1) <= 1 and len(powers) <= 2 and set(powers) <= {1, -1}

    @property
    def as_literals(self) -> str:
        """The factors that give a plain number this unit: `* 1 request * 1 token`."""
        signs = [("*" if power > 0 else "/", base) for base, power in self.factors for _ in range(abs(power))]
        return " ".join(f"{sign} 1 {_SINGULAR[base]}" for sign, base in signs)

    def __str__(self) -> str:
        above = "·".join(f"{base}{_exponent(power)}" for base, power in self.factors if power > 0)
        below = " per ".join(f"{_SINGULAR[base]}{_exponent(-power)}" for base, power in self.factors if power < 0)
        if not below:
            return above
        return f"{above} per {below}" if above else f"per {below}"


PLAIN = Unit()
SECONDS = Unit((("seconds", 1),))


def base_unit(word: str) -> Unit | None:
    """Return the unit with the singular or plural *word*, or None."""
    plural = BASES.get(word, word)
    return Unit(((plural, 1),)) if plural in _SINGULAR else None


def canonical(numerator: str, denominator: str = "") -> str:
    """Return a unit as the language writes it, such as `tokens per second`. Unknown words stay as they are."""
    above = BASES.get(numerator, numerator)
    return f"{above} per {_SINGULAR.get(denominator, denominator)}" if denominator else above


def parse_unit(text: str) -> Unit:
    """Read a canonical unit such as `tokens per second`; the empty text is a plain number.

    Raises:
        ValueError: a word names no base unit.
    """
    result = PLAIN
    for place, word in enumerate(text.split(" per ")) if text else ():
        base = base_unit(word)
        if base is None:
            raise ValueError(f"unknown unit `{word}` in {text!r}")
        result = base if place == 0 else result / base
    return result


def _exponent(power: int) -> str:
    return _POWER.get(power, f"^{power}")


# ── intervals ────────────────────────────────────────────────────────────────

#: The bound of every expression, which keeps values finite.
MAX_VALUE = 1e300
#: Candidates a decision may have, for the bounds of sums and counts.
MAX_CANDIDATES = 1e6
#: A divisor of `ratio` nearer to 0 than this counts as 0, so that the result stays bounded.
SMALLEST_DIVISOR = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """Closed interval from `low` to `high`, both finite."""

    low: float
    high: float

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Interval) -> Interval:
        return Interval(self.low - other.high, self.high - other.low)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __mul__(self, other: Interval) -> Interval:
        corners = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(min(corners), max(corners))

    def __truediv__(self, other: Interval) -> Interval:
        """Divide by an interval without 0."""
        corners = [a / b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(min(corners), max(corners))

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{exact(self.low)}..{exact(self.high)}"

    @property
    def place(self) -> str:
        """Its bounds, in words."""
        return f"is {exact(self.low)}" if self.low == self.high else f"lies in {self}"

    @property
    def bounded(self) -> bool:
        """Whether it lies within `MAX_VALUE`; False for NaN too."""
        return self.low >= -MAX_VALUE and self.high <= MAX_VALUE


TRUTH = Interval(0.0, 1.0)
TRUE = Interval(1.0, 1.0)
FALSE = Interval(0.0, 0.0)
ZERO = Interval(0.0, 0.0)
COUNT = Interval(0.0, MAX_CANDIDATES)
COUNT_ALL = Interval(1.0, MAX_CANDIDATES)


def hull(intervals: Sequence[Interval]) -> Interval:
    """Return the smallest interval around all of them."""
    return Interval(min(each.low for each in intervals), max(each.high for each in intervals))


def total(intervals: Sequence[Interval]) -> Interval:
    """Return the interval of a sum over any number of candidates, 0 included."""
    return intervals[0] * COUNT


def spread(intervals: Sequence[Interval]) -> Interval:
    """Return the interval of a standard deviation, which is at most half the width."""
    return Interval(0.0, (intervals[0].high - intervals[0].low) / 2)


def least(intervals: Sequence[Interval]) -> Interval:
    """Return the interval of the smallest of one value out of each."""
    return Interval(min(each.low for each in intervals), min(each.high for each in intervals))


def greatest(intervals: Sequence[Interval]) -> Interval:
    """Return the interval of the largest of one value out of each."""
    return Interval(max(each.low for each in intervals), max(each.high for each in intervals))


def clamped(intervals: Sequence[Interval]) -> Interval:
    """Return the interval of `clamp(x, lo, hi)`: the least of hi and the greatest of x and lo."""
    value, low, high = intervals
    return least([greatest([value, low]), high])


def absolute(intervals: Sequence[Interval]) -> Interval:
    """Return the interval of `abs(x)`."""
    value = intervals[0]
    if value.low >= 0:
        return value
    return -value if value.high <= 0 else Interval(0.0, max(-value.low, value.high))


def ratio(above: Interval, below: Interval) -> Interval:
    """Return the interval of `above / below`, where `below` does not count as 0."""
    parts = []
    if below.high >= SMALLEST_DIVISOR:
        parts.append(above / Interval(max(below.low, SMALLEST_DIVISOR), below.high))
    if below.low <= -SMALLEST_DIVISOR:
        parts.append(above / Interval(below.low, min(below.high, -SMALLEST_DIVISOR)))
    return hull(parts) if parts else ZERO


# ── types ────────────────────────────────────────────────────────────────────


class Sort(enum.Enum):
    """Kind of a value. `BROKEN` is the kind of an expression with an error, and fits all."""

    NUMBER = "number"
    BOOL = "bool"
    STRING = "string"
    SET = "set"
    INSTANCE = "instance"
    BROKEN = "broken"


NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Type:
    """Type of an expression.

    Args:
        sort: its kind.
        vector: whether it has one value for each candidate.
        unit: the unit of a number; None for a literal without one, which fits any.
        interval: the bounds of a number; 1..1 or 0..0 for a truth value that is always the same.
        maybe: whether it is an instance that may be absent.
        must: the features, `req.` fields and parameters that are always read for it.
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
        """Whether an error in it is already reported."""
        return self.sort is Sort.BROKEN

    @property
    def named(self) -> Type:
        """The type under a name, where a literal without a unit is a plain number."""
        return replace(self, unit=PLAIN) if self.unit is None else self

    @property
    def decided(self) -> bool:
        """Whether this truth value is always the same."""
        return self.sort is Sort.BOOL and self.interval.low == self.interval.high

    def reading(self, *types: Type) -> Type:
        """Return this type as computed from values of *types*."""
        must = NOTHING.union(*(each.must for each in types))
        return replace(self, must=must, may=NOTHING.union(*(each.may for each in types)))

    def perhaps(self, *types: Type) -> Type:
        """Return this type for a value that may also be computed from values of *types*."""
        return replace(self, may=self.may.union(*(each.may for each in types)))

    def __str__(self) -> str:
        word = self.sort.value
        if self.sort is Sort.NUMBER and self.unit is not None and not self.unit.plain:
            word = str(self.unit)
        return f"{word} per instance" if self.vector else word


BROKEN = Type(Sort.BROKEN)


def of_word(word: Feature | RequestField, unit: Unit) -> Type:
    """Return the type of a feature or a request field."""
    interval = Interval(word.low, word.high) if word.kind is Kind.NUMBER else TRUTH
    return Type(Sort(word.kind.value), isinstance(word, Feature), unit, interval)


# ── help texts ───────────────────────────────────────────────────────────────

#: Help for `1_000` and `4k`.
NUMBERS = "numbers have no separators and no letters: e.g. 5000 or 5e3"
#: Start of the help for `2 hit_len`.
PRODUCT = "a product needs its sign:"
#: The keywords that can follow a number.
BEHIND_NUMBERS = ("when", "as", "and", "or", "retry", "else", "if", "in")


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name closest to *name*; empty if none is close."""
    names = sorted(known)
    for candidate in names:
        if candidate.lower() == name.lower():
            return candidate
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.65)
    return found[0] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the help for an unknown *name*: the closest known one, or empty."""
    found = closest(name, known)
    return f"did you mean `{found}`?" if found else ""


def truth(name: str) -> str:
    """Return the help for an unknown *name* that is a truth value in other languages, or empty."""
    return f"did you mean `{name.lower()}`?" if name.lower() in ("true", "false") else ""


def comparison(sort: Sort) -> str:
    """Return the help for a value of this sort in place of a truth value, or empty."""
    compared = {Sort.NUMBER: "> 0", Sort.STRING: '== "…"'}.get(sort)
    return f"compare it with something, e.g. `{compared}`" if compared else ""


def looked_up(name: str) -> str:
    """Return the help for a value that is called like a function."""
    return f"for one picked instance s write `{name}[s]`"

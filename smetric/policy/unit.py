"""Units of the policy language: products and quotients of five base units.

How literals and features write them is here; what may be added or compared is in `check_expression`.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Singular to plural of every base unit.
BASES = {"token": "tokens", "request": "requests", "block": "blocks", "byte": "bytes", "second": "seconds"}
_SINGULAR = {plural: singular for singular, plural in BASES.items()}
_POWER = {1: "", 2: "²", 3: "³"}


@dataclass(frozen=True, slots=True)
class Unit:
    """Base units (plural) with their exponents, sorted and without zeros; no factors is a plain number."""

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
        """Whether this is the unit of a plain number."""
        return not self.factors

    @property
    def writable(self) -> bool:
        """Whether one literal can have it: `tokens`, or `tokens per second`."""
        powers = [power for _, power in self.factors]
        return powers.count(1) == 1 and powers.count(-1) <= 1 and len(powers) <= 2 and set(powers) <= {1, -1}

    @property
    def as_literals(self) -> str:
        """What a plain number is multiplied by, and divided by, to have it: `* 1 request * 1 token`."""
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
    """The unit that *word* names, singular or plural; None when it names none."""
    plural = BASES.get(word, word)
    return Unit(((plural, 1),)) if plural in _SINGULAR else None


def canonical(numerator: str, denominator: str = "") -> str:
    """A unit as the language writes it, `tokens per second`; words that name no base unit stay as they are."""
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

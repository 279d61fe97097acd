"""Words a policy may read: features of instances and fields of the request, with unit, range and rule for unknown."""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The mean, of what a policy asks it of and in place of what nobody knows: never beside values that are all alike.

#: How far, as a share of a value, rounding can carry the mean of values that are alike from them.
_ROUNDING = 1e-15


def mean_of(values: Sequence[float]) -> float:
    """The mean of at least one value. `fsum` is exact, so the order of the candidates plays no part."""
    middle, one = math.fsum(values) / len(values), values[0]
    if middle != one and abs(middle - one) <= abs(one) * _ROUNDING:
        # All may be alike, and rounding must not put the mean beside all of them: `v >= mean(v)` holds for somebody.
        return min(max(middle, min(values)), max(values))
    return middle


# The words a policy may read: features of instances and fields of the request, with unit, range and rule for unknown.
#
# The language is handed a `Vocabulary`; it knows none by itself. The router's own is `smetric.features.VOCABULARY`.

#: No number that a policy reads lies above this (language: numbers stay finite).
LARGEST = 1e15
#: The age in seconds of a value that nobody knows.
NEVER = 1e9


class Kind(enum.Enum):
    """What sort of value a feature or a request field holds."""

    NUMBER = "number"
    BOOL = "bool"
    STRING = "string"
    SET = "set"


class Unknown(enum.Enum):
    """What arithmetic sees in place of a cell that nobody knows."""

    DEFAULT = "its default"
    MEAN = "the mean of the known, its default when none is known"


_MEAN = Unknown.MEAN  # asked for each request: a look into an enumeration costs as much as a call


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One value per candidate instance.

    Args:
        name: as policies write it.
        doc: one sentence.
        kind: number, bool, string or set.
        unit: as the language writes it: `tokens`, `requests`, `tokens per second`, or empty for a plain number.
        low: smallest value; snapshots clamp to it.
        high: largest value; snapshots clamp to it.
        at_most: name of a request field that bounds it too, or empty.
        lookup: it costs a look-up, so it is fetched only when evaluation reaches it.
        measured: some source measures it on what has passed; without that source it is unknown everywhere.
        load: the more of it, the busier the instance.
        counted: the router counts its own part of it: an unknown cell is never below that.
        unknown: the rule for a cell nobody knows.
        default: the value of an unknown cell under that rule.
        instead: the feature whose value stands in for an unknown cell, whatever the rule; empty for none.
        source: who fills it, in words.
        staleness: how old it may be, in words.
    """

    name: str
    doc: str
    kind: Kind = Kind.NUMBER
    unit: str = ""
    low: float = 0.0
    high: float = LARGEST
    at_most: str = ""
    lookup: bool = False
    measured: bool = False
    load: bool = False
    counted: bool = False
    unknown: Unknown = Unknown.DEFAULT
    default: Any = 0.0  # of the feature's kind: float, bool, str or frozenset[str]
    instead: str = ""
    source: str
    staleness: str = "none: read with the decision"

    def fill(
        self, cells: Sequence[Any | None], fallback: Sequence[Any] | None = None
    ) -> tuple[list[Any], list[bool] | None]:
        """Replace unknown cells (None) by what arithmetic sees instead.

        Args:
            cells: one value per candidate, None where unknown.
            fallback: what is known for certain of each candidate (the router's own count). A filled cell is never
                below it, and it is the value where no candidate is known.

        Returns:
            The values without None, and which of them were known, or None when all were.
        """
        if None not in cells:
            return list(cells), None
        known = [cell is not None for cell in cells]
        mean = None
        if self.unknown is _MEAN and any(known):
            # Never below all that are known, not by rounding either, or not knowing would attract.
            mean = mean_of([cell for cell in cells if cell is not None])
        if fallback is None:
            instead = self.default if mean is None else max(mean, self.default)
            return [instead if cell is None else cell for cell in cells], known
        if mean is not None:
            fallback = [max(mean, certain) for certain in fallback]
        return [certain if cell is None else cell for cell, certain in zip(cells, fallback, strict=True)], known


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField:
    """One value of the request, read as `req.NAME`; units, ranges, bounds and kinds as in `Feature`.

    `default` is its value in a policy's tests when `given` does not set it. A field with `may_be_unknown` can be None;
    a guard that reads it then fails. One that is `on_demand` is filled only where a loaded policy reads it.
    """

    name: str
    doc: str
    kind: Kind = Kind.NUMBER
    unit: str = ""
    low: float = 0.0
    high: float = LARGEST
    at_most: str = ""
    default: Any = 0.0  # of the field's kind
    may_be_unknown: bool = False
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All features and request fields, by name."""

    features: Mapping[str, Feature]
    request: Mapping[str, RequestField]


# Stand-ins for strings of a request that must not be written down: session ids, tenants, request ids.
#
# A stand-in is `#` and the 64-bit key of the string in hex. What depends on a string's key alone, as `hrw` and `bucket`
# do, comes out alike for both, because the key of a stand-in is the key it shows.

_STAND_IN = re.compile(r"#[0-9a-f]{16}\Z")


def key_of(text: str) -> int:
    """64 bits that stand for *text*, the same in every process and version."""
    if text.startswith("#") and _STAND_IN.match(text):
        return int(text[1:], 16)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


def pseudonym(text: str) -> str:
    """What stands for *text*; the empty string for itself."""
    return f"#{key_of(text):016x}" if text else ""

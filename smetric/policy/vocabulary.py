"""Features and request fields that a policy may read, with unit, range and rule for unknown values.

The language is handed a `Vocabulary`. The router's own is `smetric.features.VOCABULARY`.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: The largest rounding error of the mean of equal values, as a share of them.
_ROUNDING = 1e-15


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of at least one value. `fsum` is exact, so the order of the candidates does not matter."""
    middle, one = math.fsum(values) / len(values), values[0]
    if middle != one and abs(middle - one) <= abs(one) * _ROUNDING:
        # If all are equal, rounding must not move the mean away from them: `v >= mean(v)` holds for at least one.
        return min(max(middle, min(values)), max(values))
    return middle


#: The bound of every number that a policy reads.
LARGEST = 1e15
#: The age in seconds of an unknown value.
NEVER = 1e9


class Kind(enum.Enum):
    """Kind of the values of a feature or a request field."""

    NUMBER = "number"
    BOOL = "bool"
    STRING = "string"
    SET = "set"


class Unknown(enum.Enum):
    """Rule for the value of an unknown cell."""

    DEFAULT = "its default"
    MEAN = "the mean of the known, its default when none is known"


_MEAN = Unknown.MEAN  # asked for each request: a look into an enumeration costs as much as a call


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyWord:
    """Name that policies read a value by.

    Args:
        name: as policies write it.
        doc: one sentence.
        kind: number, bool, string or set.
        unit: as the language writes it: `tokens`, `requests`, `tokens per second`, or empty for a plain number.
        low: smallest value; snapshots clamp to it.
        high: largest value; snapshots clamp to it.
        at_most: name of a request field that bounds it too, or empty.
        default: of a feature, the value of an unknown cell under its rule; of a request field, its value in tests of
            policies that do not give it. Of its kind: float, bool, str or frozenset[str].
    """

    name: str
    doc: str
    kind: Kind = Kind.NUMBER
    unit: str = ""
    low: float = 0.0
    high: float = LARGEST
    at_most: str = ""
    default: Any = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature(VocabularyWord):
    """Feature: one value per candidate instance.

    Args:
        lookup: it costs a look-up, so it is fetched only when evaluation reaches it.
        measured: a source measures it on past traffic; without that source it is unknown everywhere.
        load: a larger value means a busier instance.
        counted: the router counts its own part of it, and an unknown cell is never below that.
        unknown: the rule for unknown cells.
        instead: the feature that replaces an unknown cell, whatever the rule; empty for none.
        source: its source, in words.
        staleness: how old it may be, in words.
    """

    lookup: bool = False
    measured: bool = False
    load: bool = False
    counted: bool = False
    unknown: Unknown = Unknown.DEFAULT
    instead: str = ""
    source: str
    staleness: str = "none: read with the decision"

    def fill(
        self, cells: Sequence[Any | None], fallback: Sequence[Any] | None = None
    ) -> tuple[list[Any], list[bool] | None]:
        """Replace unknown cells (None) by values.

        Args:
            cells: one value per candidate, None where unknown.
            fallback: the router's own count for each candidate. A filled cell is never below it, and has this value if
                no candidate is known.

        Returns:
            The values without None, and which of them were known, or None when all were.
        """
        if None not in cells:
            return list(cells), None
        known = [cell is not None for cell in cells]
        mean = None
        if self.unknown is _MEAN and any(known):
            # Never below all known values, not even by rounding: an unknown cell must not attract.
            mean = mean_of([cell for cell in cells if cell is not None])
        if fallback is None:
            instead = self.default if mean is None else max(mean, self.default)
            return [instead if cell is None else cell for cell in cells], known
        if mean is not None:
            fallback = [max(mean, certain) for certain in fallback]
        return [certain if cell is None else cell for cell, certain in zip(cells, fallback, strict=True)], known


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestField(VocabularyWord):
    """Field of the request, read as `req.NAME`.

    A field with `may_be_unknown` can be None; a guard that reads it then fails. One that is `on_demand` is filled only
    where a loaded policy reads it.
    """

    may_be_unknown: bool = False
    on_demand: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All features and request fields, by name."""

    features: Mapping[str, Feature]
    request: Mapping[str, RequestField]


# ── pseudonyms of texts that must not be recorded: session ids, tenants, request ids ──

_PSEUDONYM = re.compile(r"#[0-9a-f]{16}\Z")


def key_of(text: str) -> int:
    """Return 64 bits for *text*, the same in every process and version. A pseudonym has the key that it shows."""
    if text.startswith("#") and _PSEUDONYM.match(text):
        return int(text[1:], 16)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


def pseudonym(text: str) -> str:
    """Return `#` and the key of *text* in hex; the empty text stays empty.

    `hrw` and `bucket` depend on the key alone, so they give the same value for a text and its pseudonym.
    """
    return f"#{key_of(text):016x}" if text else ""

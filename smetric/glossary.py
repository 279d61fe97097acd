"""Every word of the policy language with what it means, one by one, as hovers and completions show it.

All of them on a few pages are in `reference`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from smetric.features import VOCABULARY
from smetric.policy import Feature, RequestField, Unknown
from smetric.policy.builtin import BUILTINS
from smetric.policy.keyword import KEYWORDS
from smetric.policy.unit import BASES
from smetric.reference import range_of


class Kind(enum.Enum):
    """What a word is; the value is what editors mark it as."""

    KEYWORD = "Keyword"
    FUNCTION = "Function"
    FEATURE = "Field"
    FIELD = "Property"
    NAME = "Variable"
    UNIT = "Unit"


@dataclass(frozen=True, slots=True)
class Word:
    """Something that can be written.

    Args:
        text: itself.
        kind: what it is.
        form: how it is written with what belongs to it, or its unit and range.
        doc: what it means.
    """

    text: str
    kind: Kind
    form: str
    doc: str


def _feature(row: Feature) -> Word:
    unknown = "the mean of the known" if row.unknown is Unknown.MEAN else f"{row.default!r}"
    lookup = " Looked up when evaluation reaches it." if row.lookup else ""
    source = f"From {row.source}. Staleness: {row.staleness}. Where unknown, arithmetic sees {unknown}."
    form = f"{row.name}: {row.unit} {range_of(row)} per instance".replace("  ", " ")
    return Word(row.name, Kind.FEATURE, form, f"{row.doc}{lookup}\n\n{source}")


def _field(row: RequestField) -> Word:
    doc = row.doc + (" May be unknown; a guard that reads it then fails." if row.may_be_unknown else "")
    return Word(row.name, Kind.FIELD, f"req.{row.name}: {row.unit} {range_of(row)}".replace("  ", " "), doc)


#: Each kind of word by name.
WORDS: Mapping[str, Word] = {word: Word(word, Kind.KEYWORD, row.form, row.doc) for word, row in KEYWORDS.items()}
FUNCTIONS: Mapping[str, Word] = {
    name: Word(name, Kind.FUNCTION, row.signature, row.doc) for name, row in BUILTINS.items()
}
FEATURES: Mapping[str, Word] = {name: _feature(row) for name, row in VOCABULARY.features.items()}
FIELDS: Mapping[str, Word] = {name: _field(row) for name, row in VOCABULARY.request.items()}
#: What `given` takes besides the request's fields.
LAST = Word("last", Kind.FIELD, "last = a", "The last winner of every rotation.")
#: Units, in both numbers.
UNITS: Mapping[str, Word] = {
    written: Word(written, Kind.UNIT, f"5 {plural}", "A unit.")
    for singular, plural in BASES.items()
    for written in (plural, singular)
}

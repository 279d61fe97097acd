"""Every word of the policy language and of a text in it with what it means, as hovers and completions show it.

All of them on a few pages are in `reference`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smetric.features import VOCABULARY
from smetric.policy import Feature, PolicyError, RequestField, tree
from smetric.policy.builtin import BUILTINS
from smetric.policy.guard import one_line
from smetric.policy.keyword import KEYWORDS
from smetric.policy.parser import read
from smetric.policy.unit import BASES
from smetric.reference import range_of, unknown_of


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
    lookup = " Looked up when evaluation reaches it." if row.lookup else ""
    source = f"From {row.source}. Staleness: {row.staleness}. Where unknown, arithmetic sees {unknown_of(row)}."
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


@functools.lru_cache(maxsize=16)
def own_words(text: str) -> Sequence[tuple[Word, tree.Statement]]:
    """The names that a file defines or takes, each with the statement that does; none of one too long to look at.

    Kept for a while: a library is asked for each name that is taken of it, at each stroke of a key.
    """
    try:
        file, _ = read(text)
    except PolicyError:
        return ()
    found: list[tuple[Word, tree.Statement]] = []
    for statement in file.statements:
        form = one_line(text[statement.span.start : statement.span.end])
        if isinstance(statement, tree.Param | tree.Let | tree.Def):
            found.append((Word(statement.name, Kind.NAME, form, statement.doc), statement))
        elif isinstance(statement, tree.Use):
            found += [(Word(name.name, Kind.NAME, form, statement.doc), statement) for name in statement.names]
    return found

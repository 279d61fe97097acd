"""Policy language reference, and the meaning of every word of it."""

from __future__ import annotations

import enum
import functools
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from smetric.features import VOCABULARY
from smetric.policy import PolicyError, tree
from smetric.policy.builtin import BUILTINS
from smetric.policy.keywords import KEYWORDS, OPERATORS, Role
from smetric.policy.lexer import one_line
from smetric.policy.parser import read
from smetric.policy.types import BASES, written
from smetric.policy.vocabulary import LARGEST, Feature, Kind, RequestField, Unknown

# The policy language on a few pages: every word, operator, built-in, feature and request field, from their tables.
#
# `smetric reference` prints it for people and language models; the manual takes its tables from here.

#: Lines that `smetric reference` keeps below, so that it fits into a prompt.
MAX_LINES = 200
#: Columns of a cell beyond which it pushes the rest of its row to the right.
_WIDEST_CELL = 44


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Chapter:
    """One piece of the reference: prose, code, a table, or several of them, in this order."""

    name: str
    title: str
    prose: str = ""
    code: str = ""
    table: Table | None = None


_ABOUT = """\
A policy file decides one thing: which instance gets this request, or that none does. The first line is `policy NAME`;
then come statements, top to bottom. The first outcome (`route`, `reject`, `hold`) whose `when` holds is the decision;
the last one has no `when`. It always ends, always answers and changes nothing: no loops, recursion, assignment, clock
or memory. A feature is a vector, one value per candidate instance; arithmetic and comparisons work element by element
and spread single values. Layout is free: every statement starts with its own keyword. `#` starts a comment; `##` right
above a statement documents it."""

_EXAMPLE = """\
## Balance the first request of a session; stick its later ones to the warmest instance.
policy my_policy

param OVERLOAD = 2.0 in 1.0..

let warmest = argmax(hit_len, then: requests)

def not_overloaded(s, l) = l[s] <= OVERLOAD * mean(l)

route warmest  when req.turn != 0 and not_overloaded(warmest, requests)  as stick
route rr_argmin(requests)                                                as balance

test "a hot instance sheds a session"
  given turn = 3, est_hit = 900
  instance | hit_len | requests
  a        |     900 |       20
  b        |       0 |        4
  c        |       0 |        3
  expect c as balance failing not_overloaded
"""

_RULES = """\
- Units: {units} (singular or plural) and quotients such as `15928 tokens per second`; durations
  are `62us 250ms 2s 5m 1h`, without a space. Unlike units neither add nor compare. A literal without a unit fits any; a
  name never does: `param MAX = 16 requests`. `norm(v)`, `rank(v)` and `x / y` of like units are plain.
- No hidden zero: a divisor that may be 0 is an error; write `greatest(y, 1 token)` or `ratio(x, y, default: z)`.
  `mean`, `min`, `max` and `quantile` with `where` need `default:`, since nobody may be left.
- A `when` is one truth value: wrap a vector in `any(…)` or `all(…)`. `route` takes a pick, never a vector.
- Names are defined once, above their use, and hide neither features nor built-ins; only arguments of a `def` may repeat
  names of the file. Filters come before picks. The last outcome is unconditional and its pick has no `where`.
- Unknown cells count as a value that never attracts; a guard that reads an unknown field of the request fails.
- Features marked L are looked up only when evaluation reaches them: put cheap guards first.
- Ties: `argmin` and `argmax` draw one after `then:`; `rr_argmin` and `rr_argmax` take turns.
- Tests must hold for every rotation, and with anything random for 64 seeds; on a tie write `expect a or b`. Features
  left out of a table are unknown."""


def chapters() -> list[Chapter]:
    """The reference, in order."""
    return [
        Chapter("language", "The SMetric policy language", prose=_ABOUT, code=_EXAMPLE),
        Chapter("statements", "Statements (`when` and `as` are optional)", table=statements()),
        Chapter("tests", "In a test", table=_keywords("part", (Role.CASE,))),
        Chapter("operators", "Operators, from the loosest to the tightest", table=operators()),
        Chapter("rules", "Rules", prose=_RULES.format(units=" ".join(BASES.values()))),
        Chapter(
            "builtins",
            "Built-in functions (v: number per instance, m: truth per instance, x: any number, n: one plain number)",
            table=builtins(),
        ),
        Chapter("features", "Features: one value per candidate instance", table=_features()),
        Chapter("request", "Fields of the request", table=_request()),
    ]


def statements() -> Table:
    """How each statement is written, and what it means."""
    return _keywords("statement", (Role.HEADER, Role.STATEMENT))


def operators() -> Table:
    """Operators by precedence."""
    return Table(("operator", "meaning"), OPERATORS)


def builtins() -> Table:
    """Built-in functions."""
    return Table(("function", "gives"), tuple((row.signature, row.doc) for row in BUILTINS.values()))


def range_of(word: Feature | RequestField) -> str:
    """The values it may have: a range of numbers, or the kind of anything else."""
    if word.kind is not Kind.NUMBER:
        return str(word.kind.value)
    low = "" if word.low <= -LARGEST else f"{word.low:g}"
    high = f"req.{word.at_most}" if word.at_most else ("" if word.high >= LARGEST else f"{word.high:g}")
    return f"{low}..{high}"


def unknown_of(feature: Feature) -> str:
    """What arithmetic sees in place of a cell that nobody knows."""
    if feature.instead:
        return f"`{feature.instead}`"
    default = f"`{written(feature.default)}`"
    if feature.unknown is not Unknown.MEAN:
        return default
    return "the mean of the known, " + ("at least the router's own count" if feature.counted else f"else {default}")


def _keywords(column: str, roles: Sequence[Role]) -> Table:
    rows = (row for row in KEYWORDS.values() if row.role in roles)
    return Table((column, "meaning"), tuple((row.form, row.doc) for row in rows))


def _features() -> Table:
    rows = (
        (row.name + (" L" if row.lookup else ""), row.unit, range_of(row), row.doc)
        for row in VOCABULARY.features.values()
    )
    return Table(("feature", "unit", "range", "meaning"), tuple(rows))


def _request() -> Table:
    rows = (
        (f"req.{row.name}", row.unit, range_of(row), row.doc + (" May be unknown." if row.may_be_unknown else ""))
        for row in VOCABULARY.request.values()
    )
    return Table(("field", "unit", "range", "meaning"), tuple(rows))


def as_text() -> str:
    """For a terminal."""
    return "\n\n".join(_text(chapter) for chapter in chapters())


def as_markdown() -> str:
    """For a page or a prompt."""
    return "\n\n".join(_markdown(chapter) for chapter in chapters())


def as_json() -> str:
    """For a program: each chapter by name, the rows of tables by column."""
    return json.dumps({chapter.name: _fields(chapter) for chapter in chapters()}, indent=2, ensure_ascii=False)


#: How the reference can be printed.
REFERENCE_FORMATS: dict[str, Callable[[], str]] = {"text": as_text, "markdown": as_markdown, "json": as_json}


def markdown_table(table: Table) -> str:
    """A Markdown table, its first column as code; bars in cells are escaped."""
    lines = ["| " + " | ".join(table.columns) + " |", "|" + " --- |" * len(table.columns)]
    for first, *others in table.rows:
        cells = [f"`{first}`", *(cell or "–" for cell in others)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _text(chapter: Chapter) -> str:
    parts = [chapter.title.replace("`", "")]
    if chapter.prose:
        parts.append(chapter.prose.replace("`", ""))
    if chapter.code:
        parts.append(textwrap.indent(chapter.code.rstrip(), "    "))
    if chapter.table is not None:
        parts.append("\n".join(_text_rows(chapter.table)))
    return "\n".join(parts)


def _text_rows(table: Table) -> Iterable[str]:
    """One line per row, its columns aligned; a cell wider than most does not push the others out."""
    widths = [min(max(len(row[at]) for row in table.rows), _WIDEST_CELL) for at in range(len(table.columns) - 1)]
    for *firsts, last in table.rows:
        cells = [cell.ljust(width) for cell, width in zip(firsts, widths, strict=True)]
        yield "  ".join([*cells, last.replace("`", "")])


def _markdown(chapter: Chapter) -> str:
    parts = [f"## {chapter.title}"]
    if chapter.prose:
        parts.append(chapter.prose)
    if chapter.code:
        parts.append(f"```text\n{chapter.code}```")
    if chapter.table is not None:
        parts.append(markdown_table(chapter.table))
    return "\n\n".join(parts)


def _fields(chapter: Chapter) -> dict[str, object]:
    found: dict[str, object] = {"title": chapter.title}
    if chapter.prose:
        found["prose"] = chapter.prose
    if chapter.code:
        found["code"] = chapter.code
    if chapter.table is not None:
        found["rows"] = [dict(zip(chapter.table.columns, row, strict=True)) for row in chapter.table.rows]
    return found


# Every word of the policy language and of a text in it with what it means, as hovers and completions show it.
#
# All of them on a few pages are in `reference`.


class WordKind(enum.Enum):
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
    kind: WordKind
    form: str
    doc: str


def _feature(row: Feature) -> Word:
    lookup = " Looked up when evaluation reaches it." if row.lookup else ""
    source = f"From {row.source}. Staleness: {row.staleness}. Where unknown, arithmetic sees {unknown_of(row)}."
    form = f"{row.name}: {row.unit} {range_of(row)} per instance".replace("  ", " ")
    return Word(row.name, WordKind.FEATURE, form, f"{row.doc}{lookup}\n\n{source}")


def _field(row: RequestField) -> Word:
    doc = row.doc + (" May be unknown; a guard that reads it then fails." if row.may_be_unknown else "")
    return Word(row.name, WordKind.FIELD, f"req.{row.name}: {row.unit} {range_of(row)}".replace("  ", " "), doc)


#: Each kind of word by name.
WORDS: Mapping[str, Word] = {word: Word(word, WordKind.KEYWORD, row.form, row.doc) for word, row in KEYWORDS.items()}
FUNCTIONS: Mapping[str, Word] = {
    name: Word(name, WordKind.FUNCTION, row.signature, row.doc) for name, row in BUILTINS.items()
}
FEATURES: Mapping[str, Word] = {name: _feature(row) for name, row in VOCABULARY.features.items()}
FIELDS: Mapping[str, Word] = {name: _field(row) for name, row in VOCABULARY.request.items()}
#: What `given` takes besides the request's fields.
LAST = Word("last", WordKind.FIELD, "last = a", "The last winner of every rotation.")
#: Units, in both numbers.
UNITS: Mapping[str, Word] = {
    written: Word(written, WordKind.UNIT, f"5 {plural}", "A unit.")
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
            found.append((Word(statement.name, WordKind.NAME, form, statement.doc), statement))
        elif isinstance(statement, tree.Use):
            found += [(Word(name.name, WordKind.NAME, form, statement.doc), statement) for name in statement.names]
    return found

"""Reference of the policy language on a few pages, for people, language models and the manual."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from smetric.features import VOCABULARY
from smetric.policy.builtin import BUILTINS
from smetric.policy.keywords import KEYWORDS, OPERATORS, Role
from smetric.policy.types import BASES, written
from smetric.policy.vocabulary import LARGEST, Feature, Kind, RequestField, Unknown

#: The reference has fewer lines than this, so that it fits into a prompt.
MAX_LINES = 200
#: The widest column; a longer cell pushes the rest of its row to the right.
_WIDEST_CELL = 44


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Chapter:
    """A part of the reference: prose, code and a table, in this order."""

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
  `mean`, `min`, `max` and `quantile` with `where` need `default:`, since no candidate may be left.
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
    """Statements: form and meaning."""
    return _keywords("statement", (Role.HEADER, Role.STATEMENT))


def operators() -> Table:
    """Operators by precedence."""
    return Table(("operator", "meaning"), OPERATORS)


def builtins() -> Table:
    """Built-in functions."""
    return Table(("function", "gives"), tuple((row.signature, row.doc) for row in BUILTINS.values()))


def range_of(word: Feature | RequestField) -> str:
    """The range of a number, or the kind of another value."""
    if word.kind is not Kind.NUMBER:
        return str(word.kind.value)
    low = "" if word.low <= -LARGEST else f"{word.low:g}"
    high = f"req.{word.at_most}" if word.at_most else ("" if word.high >= LARGEST else f"{word.high:g}")
    return f"{low}..{high}"


def unknown_of(feature: Feature) -> str:
    """The value of an unknown cell in arithmetic."""
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
    names = ((row, row.name + (" L" if row.lookup else "")) for row in VOCABULARY.features.values())
    rows = tuple((name, row.unit, range_of(row), row.doc) for row, name in names)
    return Table(("feature", "unit", "range", "meaning"), rows)


def _request() -> Table:
    docs = ((row, row.doc + (" May be unknown." if row.may_be_unknown else "")) for row in VOCABULARY.request.values())
    rows = tuple((f"req.{row.name}", row.unit, range_of(row), doc) for row, doc in docs)
    return Table(("field", "unit", "range", "meaning"), rows)


# ── formats ──────────────────────────────────────────────────────────────────


def markdown_table(table: Table) -> str:
    """A Markdown table; its first column is code, and bars in cells are escaped."""
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
    """One line per row, its columns aligned."""
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
    """The chapter for JSON, without empty parts; the cells of a row by column."""
    table = chapter.table
    rows = [] if table is None else [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    fields = {"title": chapter.title, "prose": chapter.prose, "code": chapter.code, "rows": rows}
    return {name: value for name, value in fields.items() if value}


def _as_json() -> str:
    return json.dumps({chapter.name: _fields(chapter) for chapter in chapters()}, indent=2, ensure_ascii=False)


#: The formats in which the reference can be printed: text for a terminal, Markdown for a page, JSON for a program.
REFERENCE_FORMATS: dict[str, Callable[[], str]] = {
    "text": lambda: "\n\n".join(map(_text, chapters())),
    "markdown": lambda: "\n\n".join(map(_markdown, chapters())),
    "json": _as_json,
}

"""Syntax tree of a policy file: frozen nodes, each with its place in the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from smetric.policy.diagnostic import COMMENT, Diagnostic, Severity, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Node of the tree. Spans do not count in comparisons."""

    span: Span = field(compare=False, repr=False)


# ── expressions ──────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Expr(Node):
    """Any expression."""


@dataclass(frozen=True, slots=True)
class Number(Expr):
    """`8`, `16 requests`, `15928 tokens per second`, `250ms`, `62us per token`, `0 LOAD`.

    `value` is in the base unit (durations in seconds). `unit` is as written, normalised to `tokens`, `requests`, …,
    `seconds`, joined by ` per `, or a parameter's name. It is empty for a literal without a unit, which fits any.
    """

    value: float
    unit: str = ""
    unit_span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """`"…"`."""

    value: str


@dataclass(frozen=True, slots=True)
class Truth(Expr):
    """`true` or `false`."""

    value: bool


@dataclass(frozen=True, slots=True)
class Name(Expr):
    """A bare name: an argument, a name of the file, or a feature."""

    name: str


@dataclass(frozen=True, slots=True)
class FieldExpr(Expr):
    """`req.NAME`; `base` is the name before the dot."""

    base: str
    name: str


@dataclass(frozen=True, slots=True)
class SetOf(Expr):
    """`{a, b}`."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Unary(Expr):
    """`-x` or `not x`; `op` is `-` or `not`."""

    op: str
    operand: Expr


@dataclass(frozen=True, slots=True)
class Binary(Expr):
    """`+ - * / == != <= >= < > and or`, and `in`, `not in`. `op_span` is the operator's own place."""

    op: str
    left: Expr
    right: Expr
    op_span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class IfElse(Expr):
    """`then if condition else otherwise`."""

    then: Expr
    condition: Expr
    otherwise: Expr


@dataclass(frozen=True, slots=True)
class AtExpr(Expr):
    """`vector[pick]`."""

    vector: Expr
    pick: Expr


@dataclass(frozen=True, slots=True)
class Argument(Node):
    """Argument of a call: `x`, `x where m`, or `name: x`."""

    value: Expr
    where: Expr | None = None
    name: str = ""
    name_span: Span | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class CallExpr(Expr):
    """`function(arguments)`: a built-in or a `def`. `name_span` is the function's name alone."""

    function: str
    arguments: tuple[Argument, ...]
    name_span: Span = field(compare=False, repr=False)


# ── statements ───────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement(Node):
    """Any statement. `doc` is the text of the `##` lines right above it."""

    doc: str = ""


@dataclass(frozen=True, slots=True)
class Range(Node):
    """`lo..` or `lo..hi`."""

    low: Number
    high: Number | None


@dataclass(frozen=True, slots=True)
class Choices(Node):
    """`{a, b, c}`."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Param(Statement):
    """`param NAME = value [in domain]`."""

    name: str
    name_span: Span = field(compare=False, repr=False)
    value: Expr
    domain: Range | Choices | None


@dataclass(frozen=True, slots=True)
class Let(Statement):
    """`let NAME = value`."""

    name: str
    name_span: Span = field(compare=False, repr=False)
    value: Expr


@dataclass(frozen=True, slots=True)
class Def(Statement):
    """`def NAME(arguments) = body`."""

    name: str
    name_span: Span = field(compare=False, repr=False)
    arguments: tuple[Name, ...]
    body: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Statement):
    """Filter or outcome, `… [when condition] [as label]`.

    Args:
        word: its keyword: keep, prefer, route, reject or hold.
        value: the mask, the pick, or the seconds after `retry` or `for`; None for a `reject` without `retry`.
        when: its condition, or None.
        label: the name after `as`, or None.
        status: the status after `reject`, else None.
        message: the message after it, else None.
    """

    word: str
    value: Expr | None
    when: Expr | None
    label: Name | None
    status: Number | None = None
    message: Text | None = None


@dataclass(frozen=True, slots=True)
class Use(Statement):
    """`use library (names)`."""

    library: Name
    names: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Broken(Statement):
    """Statement that does not parse. The checker reads it, so as not to report consequences of the error.

    `word` is its keyword, the likely keyword, or empty; `names` are the names it would define.
    """

    word: str
    names: tuple[str, ...]


# ── tests ────────────────────────────────────────────────────────────────────

#: An unknown value in a `given` or in a cell.
UNKNOWN = None


@dataclass(frozen=True, slots=True)
class Setting(Node):
    """`NAME = value` in `with` or `given`; value is float, str, bool, frozenset[str] or None for `?`.

    A bare name (a feature in `with LOAD = unprefilled`, an instance in `given last = a`) is a `Name`. `unit` is as in
    `Number`, empty when the value names none.
    """

    name: str
    value: float | str | bool | frozenset[str] | Name | None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class TestColumn(Node):
    """Column of a test table: a feature, or `age(feature)`."""

    feature: str
    of_age: bool = False


@dataclass(frozen=True, slots=True)
class Cell(Node):
    """Value of a test table, None for `?`. `unit` is `seconds` for a duration, else empty."""

    value: float | str | bool | frozenset[str] | None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Row(Node):
    """Instance of a test table, with one cell per column."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Expect(Node):
    """`expect a or b`, `expect reject 429`, `expect hold`; then `as rule` and `failing guard`."""

    kind: str  # route | reject | hold
    instances: tuple[Name, ...] = ()
    status: float = 0
    rule: Name | None = None
    failing: Name | Text | None = None


@dataclass(frozen=True, slots=True)
class Test(Statement):
    """`test "sentence" with … given … table expect …`."""

    sentence: str
    settings: tuple[Setting, ...]
    given: tuple[Setting, ...]
    columns: tuple[TestColumn, ...]
    rows: tuple[Row, ...]
    expect: Expect

    @property
    def configured(self) -> dict[str, Any]:
        """Its settings of parameters, in the form of a configuration."""
        return {each.name: each.value.name if isinstance(each.value, Name) else each.value for each in self.settings}


@dataclass(frozen=True, slots=True)
class File:
    """Policy or library: its statements in order, its text and the path of it.

    `kind` is its first word, `policy` or `library`; `stray` are warnings of `##` lines that document nothing.
    """

    name: str
    name_span: Span
    doc: str
    statements: tuple[Statement, ...]
    text: str = field(repr=False)
    path: str = "<policy>"
    kind: str = "policy"
    stray: tuple[Diagnostic, ...] = ()

    @property
    def tests(self) -> tuple[Test, ...]:
        """Its test blocks."""
        return tuple(each for each in self.statements if isinstance(each, Test))


class Comments:
    """The `##` lines of a text, which document the statement below them. The grammar ignores comments."""

    def __init__(self, text: str) -> None:
        self._lines: dict[int, tuple[str, Span]] = {}
        self._text = text
        line, seen = 0, 0
        for match in COMMENT.finditer(text):
            if not (match["comment"] or "").startswith("##"):
                continue
            start = match.start()
            line += text.count("\n", seen, start)
            seen = start
            alone = not text[text.rfind("\n", 0, start) + 1 : start].strip()
            # A `##` behind code documents nothing: no statement starts below a negative line.
            key = line if alone else -1 - line
            self._lines[key] = (match.group()[2:].strip(), Span(start, start + len(match.group().rstrip())))

    def above(self, offset: int) -> str:
        """Return the documentation of the statement that starts at *offset*."""
        return "\n".join(self._lines[line][0] for line in self._lines_above(offset))

    def _lines_above(self, offset: int) -> range:
        """Return the unbroken `##` lines right above the statement that starts at *offset*."""
        end = start = self._text.count("\n", 0, offset)
        if not self._text[self._text.rfind("\n", 0, offset) + 1 : offset].strip():
            while start - 1 in self._lines:
                start -= 1
        return range(start, end)

    def stray(self, statements: Iterable[int]) -> list[Diagnostic]:
        """Return a warning for each `##` line that documents none of the statements starting at the given offsets."""
        documents = {line for offset in statements for line in self._lines_above(offset)}
        return [
            Diagnostic(
                "stray-doc",
                "this `##` documents nothing",
                span,
                "put it right above a statement, or write `#`",
                Severity.WARNING,
            )
            for line, (_, span) in self._lines.items()
            if line not in documents
        ]

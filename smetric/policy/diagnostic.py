"""Diagnostics of a policy: code, place, message and help; and `PolicyError`, the one exception of the language."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Span:
    """Piece of the source text: offsets `start` (included) to `end` (excluded)."""

    start: int
    end: int


#: Codes of diagnostics, errors first, each with the help for diagnostics without their own. Tools rely on the meaning
#: of a code, which stands in the manual of the language; messages and helps may change.
WAYS_OUT: Mapping[str, str] = {
    "arguments": "`smetric reference` lists what each function takes",
    "bare-fraction": "write a 0 before it",
    "bracket": "open and close each bracket in one statement",
    "branches": "give both sides one kind and one unit",
    "chain": "write `a < b and b < c`",
    "character": "remove it",
    "choices": "list the features it may be: in {…}",
    "column": "remove one of them",
    "condition": "compare something, or wrap it in any(…) or all(…)",
    "default": "widen the range, or choose another default",
    "divisor": "give the value for that case: ratio(x, y, default: …)",
    "domain": "write a range for a number, in lo..hi, and choices for all else, in {a, b}",
    "duration": "e.g. 500ms or 2s",
    "encoding": "save the file as UTF-8",
    "expect": "name instances of the table, and rules and guards of this policy",
    "filter-order": "move the filter above the pick",
    "given": "give each field once, and give `last` an instance of the table",
    "header": "write `policy NAME` or `library NAME` on the first line",
    "hidden": "choose another name",
    "hold": "give it a `when`",
    "label": "choose another label",
    "library": "a library shares `param`s and `def`s; a policy decides",
    "long-name": "choose a shorter name",
    "lookup": "write v[s], with a value per instance and an instance",
    "mask": "compare a feature with something",
    "maybe": "give it a second choice: first(…, …)",
    "no-instance": "compare with what the instances of this fleet have, or remove it",
    "nobody": "give the value for that case: default: …",
    "operand": "`smetric reference` lists what each operator takes",
    "outage": "name what some instance has, or write `prefer`",
    "overflow": "bound its parts with clamp(…)",
    "range": "keep it within its range: clamp(…)",
    "redefined": "choose another name",
    "reserved": "choose another name",
    "route": "pick one: route argmin(…)",
    "row": "one instance a row, with one cell for each column",
    "set": "put it into quotes",
    "setting": "set a value that the parameter's declaration allows",
    "statement": "start with a keyword",
    "status": "use 429 to shed load, and 503 if no instance can serve",
    "syntax": "`smetric reference` shows the form of each statement",
    "test": "remove or rename it",
    "too-deep": "name its parts with `let`",
    "too-large": "make it smaller, or name what repeats with `let`",
    "too-long": "share definitions by libraries, and put tests into NAME.test.policy",
    "too-many-errors": "fix the first ones",
    "unclosed-string": "end it with a quote on the same line",
    "undecided": "end with an unconditional `route`",
    "unfinished": "`smetric reference` shows the form of each statement",
    "unit": "units are tokens, requests, blocks, bytes and seconds, and one `per` another",
    "units": "convert both to one unit, or remove the unit with norm(…)",
    "unknown-feature": "`smetric reference` lists the features",
    "unknown-field": "`smetric reference` lists the fields of a request",
    "unknown-function": "`smetric reference` lists the functions",
    "unknown-name": "define it above this line",
    "unreachable": "give the rule above a `when`, or remove this one",
    "unreadable": "name an existing file with read permission",
    "use": "`use NAME (a, b)` takes what the library NAME.policy beside this file defines",
    "value": "write a value of its kind and within its range, or `?` for unknown",
    "where": "`where` follows the first argument of a pick or a reduction, with a truth value per instance",
    "constant": "remove it, or what it guards",
    "late-guard": "move it to the front, right behind `when`",
    "no-label": "compare with what the instances of this fleet have, or remove it",
    "stray-doc": "put it right above a statement, or write `#`",
    "unfilled": "configure a source that fills it, or do not read it",
    "unused": "remove it",
}


#: Errors reported of one file.
MAX_DIAGNOSTICS = 50
#: Characters of a source line that a report shows.
_LINE_WIDTH = 160
#: Characters of source text that a message quotes.
_QUOTE_WIDTH = 60
#: A comment, or a string, which may hold a `#`.
COMMENT = re.compile(r'(?P<string>"[^"\n]*")|(?P<comment>#[^\n]*)')


class Severity(enum.Enum):
    """An error stops the policy from loading, a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class PolicyText:
    """Text of a file, and its path in reports."""

    text: str
    path: str


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Error or warning: a stable code, a message, its place, and its own help if it has one.

    `source` is the library it belongs to; None for the policy itself.
    """

    code: str
    message: str
    span: Span
    help: str = ""
    severity: Severity = Severity.ERROR
    source: PolicyText | None = None

    @property
    def way_out(self) -> str:
        """Its own help, or that of its code."""
        return self.help or WAYS_OUT[self.code]

    def within(self, source: PolicyText) -> Diagnostic:
        """Return the same diagnostic in the library *source*."""
        return replace(self, source=source)

    def headline(self, text: str) -> str:
        """Return place and message."""
        line, column = position(self.source.text if self.source else text, self.span.start)
        file = f"{self.source.path}:" if self.source else ""
        return f"{file}{line}:{column}: {self.message}"

    def brief(self, text: str) -> str:
        """Return the diagnostic on one line: place, message, way out."""
        return f"{self.headline(text)}; {self.way_out}"

    def render(self, text: str, path: str) -> str:
        """Return the diagnostic with its source line and a caret."""
        if self.source is not None:
            text, path = self.source.text, self.source.path
        if self.code == "unreadable":  # there is no text to show, and the message names the file
            return f"{self.severity.value}: {self.message}\n = help: {self.way_out}"
        line, column = position(text, self.span.start)
        start = text.rfind("\n", 0, self.span.start) + 1
        end = text.find("\n", self.span.start)
        source = text[start : len(text) if end < 0 else end].rstrip()
        skipped = max(0, column - 1 - _LINE_WIDTH // 2) if len(source) > _LINE_WIDTH else 0
        shown = _printable(source[skipped : skipped + _LINE_WIDTH])
        indent = "".join("\t" if char == "\t" else " " for char in shown[: column - 1 - skipped])
        width = max(1, min(self.span.end - self.span.start, len(shown) - len(indent)))
        margin = " " * len(str(line))
        lines = (
            f"{self.severity.value}: {self.message}",
            f"{margin}--> {path}:{line}:{column}",
            f"{margin} |",
            f"{line} | {shown}",
            f"{margin} | {indent}{'^' * width}",
            f"{margin} = help: {self.way_out}",
        )
        return "\n".join(line.rstrip() for line in lines)


def unreadable(why: str) -> Diagnostic:
    """Return the diagnostic of a file that cannot be read."""
    return Diagnostic("unreadable", why, Span(0, 0))


class PolicyError(Exception):
    """Policy that cannot be used. The text of the exception is the whole report."""

    def __init__(self, diagnostics: Iterable[Diagnostic], text: str, path: str) -> None:
        self.diagnostics = in_order(diagnostics)
        self.text = text
        self.path = path
        super().__init__(report(self.diagnostics, text, path))


def in_order(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return each diagnostic once, in text order, at most `MAX_DIAGNOSTICS` and one that says that more follow."""
    unique = dict.fromkeys(sorted(diagnostics, key=_place))
    ordered = tuple(unique)
    if len(ordered) <= MAX_DIAGNOSTICS:
        return ordered
    kept = ordered[:MAX_DIAGNOSTICS]
    rest = Diagnostic("too-many-errors", "more errors follow; fix these first", kept[-1].span)
    return (*kept, rest)


def _place(found: Diagnostic) -> tuple[bool, str, int, int]:
    """Sort errors before warnings, and the file itself before its libraries."""
    path = found.source.path if found.source else ""
    return (found.severity is Severity.WARNING, path, found.span.start, found.span.end)


def report(diagnostics: Sequence[Diagnostic], text: str, path: str) -> str:
    """Return all diagnostics as one text, separated by empty lines."""
    return "\n\n".join(found.render(text, path) for found in diagnostics)


def position(text: str, offset: int) -> tuple[int, int]:
    """Return line and column of *offset*, both from 1."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def quote(text: str, span: Span) -> str:
    """Return the source at *span* on one line, without comments, cut to the length of a quote."""
    return clip(" ".join(COMMENT.sub(r"\g<string>", text[span.start : span.end]).split()))


def clip(text: str) -> str:
    """Return *text* cut to the length of a quote."""
    text = _printable(text)
    return text if len(text) <= _QUOTE_WIDTH else text[: _QUOTE_WIDTH - 1] + "…"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\t" else "�" for char in text)

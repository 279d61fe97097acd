"""What is wrong with a policy, where, and the way out; and the one exception the language raises.

No judgement here: `lexer`, `parser` and the checker make the diagnostics.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from smetric.policy.codes import WAYS_OUT
from smetric.policy.span import Span

#: Errors reported of one file; a file with more is cut short and says so.
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
class Source:
    """The text of a file, and what reports call it."""

    text: str
    path: str


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding: a stable code for tools, a sentence, the place, and help of its own where there is any.

    `source` is the library it was found in; None for the file that was asked about.
    """

    code: str
    message: str
    span: Span
    help: str = ""
    severity: Severity = Severity.ERROR
    source: Source | None = None

    @property
    def way_out(self) -> str:
        """The help, or what helps with all findings of this code."""
        return self.help or WAYS_OUT[self.code]

    def within(self, source: Source) -> Diagnostic:
        """The same finding, in the library *source*."""
        return replace(self, source=source)

    def headline(self, text: str) -> str:
        """Place and sentence."""
        line, column = position(self.source.text if self.source else text, self.span.start)
        file = f"{self.source.path}:" if self.source else ""
        return f"{file}{line}:{column}: {self.message}"

    def brief(self, text: str) -> str:
        """The finding on one line: place, sentence, way out."""
        return f"{self.headline(text)}; {self.way_out}"

    def render(self, text: str, path: str) -> str:
        """The finding with its line and caret, as language reports print it."""
        if self.source is not None:
            text, path = self.source.text, self.source.path
        line, column = position(text, self.span.start)
        start = text.rfind("\n", 0, self.span.start) + 1
        end = text.find("\n", self.span.start)
        source = text[start : len(text) if end < 0 else end].rstrip()
        skipped = max(0, column - 1 - _LINE_WIDTH // 2) if len(source) > _LINE_WIDTH else 0
        shown = _printable(source[skipped : skipped + _LINE_WIDTH])
        indent = "".join("\t" if char == "\t" else " " for char in shown[: column - 1 - skipped])
        width = max(1, min(self.span.end - self.span.start, len(shown) - len(indent)))
        margin = " " * len(str(line))
        lines = [
            f"{self.severity.value}: {self.message}",
            f"{margin}--> {path}:{line}:{column}",
            f"{margin} |",
            f"{line} | {shown}",
            f"{margin} | {indent}{'^' * width}",
        ]
        lines.append(f"{margin} = help: {self.way_out}")
        return "\n".join(line.rstrip() for line in lines)


def unreadable(why: str) -> Diagnostic:
    """What to say of a file whose text nobody has."""
    return Diagnostic("unreadable", why, Span(0, 0))


class PolicyError(Exception):
    """A policy that cannot be used; its text is the whole report."""

    def __init__(self, diagnostics: Iterable[Diagnostic], text: str, path: str) -> None:
        self.diagnostics = in_order(diagnostics)
        self.text = text
        self.path = path
        super().__init__(report(self.diagnostics, text, path))


def in_order(diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Each finding once, in the order of the texts, at most `MAX_DIAGNOSTICS` and a last one that says so."""
    unique = dict.fromkeys(sorted(diagnostics, key=_place))
    ordered = tuple(unique)
    if len(ordered) <= MAX_DIAGNOSTICS:
        return ordered
    kept = ordered[:MAX_DIAGNOSTICS]
    rest = Diagnostic("too-many-errors", "more follows after this; mend these first", kept[-1].span)
    return (*kept, rest)


def _place(found: Diagnostic) -> tuple[bool, str, int, int]:
    """Errors come before warnings, and findings of the file itself before those of each library."""
    path = found.source.path if found.source else ""
    return (found.severity is Severity.WARNING, path, found.span.start, found.span.end)


def report(diagnostics: Sequence[Diagnostic], text: str, path: str) -> str:
    """All findings as one text, an empty line between them."""
    return "\n\n".join(found.render(text, path) for found in diagnostics)


def position(text: str, offset: int) -> tuple[int, int]:
    """Line and column of *offset*, both counted from 1."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def quote(text: str, span: Span) -> str:
    """The source at *span* on one line, without its comments, cut to what a message can carry."""
    return clip(" ".join(COMMENT.sub(r"\g<string>", text[span.start : span.end]).split()))


def clip(text: str) -> str:
    """*text* cut to what a message can carry."""
    text = _printable(text)
    return text if len(text) <= _QUOTE_WIDTH else text[: _QUOTE_WIDTH - 1] + "…"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\t" else "�" for char in text)

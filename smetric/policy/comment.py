"""Comments of a policy text: which `##` lines document the statement below them, and which document nothing.

The grammar ignores comments; this reads them from the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from smetric.policy.diagnostic import Diagnostic, Severity
from smetric.policy.span import Span

#: A string is matched only to be stepped over: it may hold a `#`.
_COMMENT = re.compile(r'"[^"\n]*"|(?P<comment>#[^\n]*)')


class Comments:
    """All `##` lines of a text."""

    def __init__(self, text: str) -> None:
        self._lines: dict[int, tuple[str, Span]] = {}
        self._text = text
        line, seen = 0, 0
        for match in _COMMENT.finditer(text):
            if not (match["comment"] or "").startswith("##"):
                continue
            start = match.start()
            line += text.count("\n", seen, start)
            seen = start
            alone = not text[text.rfind("\n", 0, start) + 1 : start].strip()
            # A `##` behind code stands under a line of its own that nothing can ask for.
            key = line if alone else -1 - line
            self._lines[key] = (match.group()[2:].strip(), Span(start, start + len(match.group().rstrip())))
        self._claimed: set[int] = set()

    def above(self, offset: int) -> str:
        """The documentation of the statement that starts at *offset*: the unbroken `##` lines right above it."""
        if self._text[self._text.rfind("\n", 0, offset) + 1 : offset].strip():
            return ""
        line = self._text.count("\n", 0, offset) - 1
        found: list[str] = []
        while line in self._lines:
            found.append(self._lines[line][0])
            self._claimed.add(line)
            line -= 1
        return "\n".join(reversed(found))

    def stray(self) -> list[Diagnostic]:
        """A warning for each `##` line that `above` has not returned."""
        return [
            Diagnostic(
                "stray-doc",
                "this `##` documents nothing",
                span,
                "put it right above a statement, or write `#`",
                Severity.WARNING,
            )
            for line, (_, span) in self._lines.items()
            if line not in self._claimed
        ]


def stray_comments(text: str, statements: Iterable[int]) -> list[Diagnostic]:
    """A warning for each `##` line of *text* that documents none of the statements starting at the given offsets."""
    comments = Comments(text)
    for offset in statements:
        comments.above(offset)
    return comments.stray()

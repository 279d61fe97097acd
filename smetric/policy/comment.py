"""Comments of a policy text: which `##` lines document the statement below them, and which document nothing.

The grammar ignores comments; this reads them from the text.
"""

from __future__ import annotations

from collections.abc import Iterable

from smetric.policy.diagnostic import COMMENT, Diagnostic, Severity
from smetric.policy.span import Span


class Comments:
    """All `##` lines of a text."""

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
            # A `##` behind code stands under a line of its own that nothing can ask for.
            key = line if alone else -1 - line
            self._lines[key] = (match.group()[2:].strip(), Span(start, start + len(match.group().rstrip())))

    def above(self, offset: int) -> str:
        """The documentation of the statement that starts at *offset*."""
        return "\n".join(self._lines[line][0] for line in self._lines_above(offset))

    def _lines_above(self, offset: int) -> range:
        """The unbroken `##` lines right above the statement that starts at *offset*."""
        end = start = self._text.count("\n", 0, offset)
        if not self._text[self._text.rfind("\n", 0, offset) + 1 : offset].strip():
            while start - 1 in self._lines:
                start -= 1
        return range(start, end)

    def stray(self, statements: Iterable[int]) -> list[Diagnostic]:
        """A warning for each `##` line that documents none of the statements starting at the given offsets."""
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

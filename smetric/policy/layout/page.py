"""A whole text in its canonical layout: statements in runs, comments where they stood, at most one blank line.

Runs are statements of one kind without a blank line between them; what is aligned is aligned within a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from smetric.policy.layout.case import lay_case
from smetric.policy.layout.declaration import lay_declarations
from smetric.policy.layout.rule import lay_rules
from smetric.policy.layout.words import Word, words_of
from smetric.policy.layout.writer import Line, Writer, rendered
from smetric.policy.lexer import Piece, cut
from smetric.policy.parser import parse, refuse_too_long, tokens_of

_KINDS = {
    "POLICY": "header",
    "LIBRARY": "header",
    "KEEP": "filter",
    "PREFER": "filter",
    "ROUTE": "outcome",
    "REJECT": "outcome",
    "HOLD": "outcome",
}


@dataclass(frozen=True, slots=True)
class _Part:
    """One statement.

    Args:
        words: its words.
        above: the lines between it and the statement before: comments, and empty ones, never two in a row.
        behind: the comment that ends its last line, or nothing.
    """

    words: list[Word]
    above: list[str]
    behind: str

    @property
    def kind(self) -> str:
        """Statements of one kind can be aligned with each other."""
        return _KINDS.get(self.words[0].type, self.words[0].text)


def format_text(text: str, path: str = "<policy>") -> str:
    """The canonical layout of a policy or a library: the same words and comments, in the same order.

    Args:
        text: the source.
        path: what errors call it.

    Raises:
        PolicyError: it does not parse, or would be longer than a policy may be.
    """
    parse(text, path)
    parts, below = _parts(text, cut(tokens_of(text)))
    lines = [line for run in _runs(parts) for line in _laid(run)]
    laid_out = "\n".join(rendered([*lines, *map(Line, below)])).strip("\n") + "\n"
    refuse_too_long(laid_out, path, "laid out, this file would be too long")
    return laid_out


def _parts(text: str, pieces: Sequence[Piece]) -> tuple[list[_Part], list[str]]:
    """The statements, an empty line before and after each header and test, and the lines below the last statement."""
    starts = [piece.tokens[0].start for piece in pieces]
    ends = [piece.tokens[-1].end for piece in pieces]
    _, above = _between("\n" + text[: starts[0]])
    parts: list[_Part] = []
    for piece, end, following in zip(pieces, ends, [*starts[1:], len(text)], strict=True):
        behind, below = _between(text[end:following])
        part = _Part(words_of(piece.tokens, text), above, behind)
        if parts and "" not in above and ("test" in (part.kind, parts[-1].kind) or parts[-1].kind == "header"):
            above.insert(0, "")
        parts.append(part)
        above = below
    return parts, above


def _between(gap: str) -> tuple[str, list[str]]:
    """The comment that ends the line where *gap* begins, and the lines up to the next statement."""
    behind, *rest = (line.strip() for line in gap.split("\n"))
    if rest and not rest[-1]:
        del rest[-1]  # the space before the next statement
    return behind, [line for before, line in zip((None, *rest), rest, strict=False) if line or before != ""]


def _runs(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """The statements cut where the kind changes or an empty line stands."""
    run: list[_Part] = []
    for part in parts:
        before = run[-1].kind if run else ""
        if before and (part.kind != before or "" in part.above):
            yield run
            run = []
        run.append(part)
    yield run


def _laid(run: Sequence[_Part]) -> Iterator[Line]:
    """The lines of one run with the comments around its statements."""
    for part, lines in zip(run, _LAYOUTS.get(run[0].kind, lay_declarations)([part.words for part in run]), strict=True):
        yield from map(Line, part.above)
        lines[-1].comment = part.behind
        yield from lines


def _lay_header(run: Sequence[Sequence[Word]]) -> list[list[Line]]:
    out = Writer()
    out.write(run[0], 0)
    return [out.lines]


#: How a run of each kind is laid out; the other kinds are declarations.
_LAYOUTS: dict[str, Callable[[Sequence[Sequence[Word]]], list[list[Line]]]] = {
    "header": _lay_header,
    "filter": lay_rules,
    "outcome": lay_rules,
    "test": lambda run: [lay_case(words) for words in run],
}

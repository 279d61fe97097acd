"""`test` blocks: one line for each part, and the columns of the table below each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from smetric.policy.layout.expression import write_list
from smetric.policy.layout.words import Word, spaced, split_at
from smetric.policy.layout.writer import Line, Writer

_INDENT = 2
#: Where a part goes on that a comment has broken.
_INNER = 4
#: Columns with a cell of these start at the left, as the first one does; numbers end at the right.
_LEFT = frozenset({"STRING", "LBRACE"})


def lay_case(words: Sequence[Word]) -> list[Line]:
    """The lines of one test."""
    parts = split_at(words, list(_starts(words)))
    columns = _columns([_cells(part) for part in parts if _is_row(part)])
    out = Writer()
    for part in parts:
        if part[0].type != "TEST":
            out.start_line(_INDENT)
        if _is_row(part):
            for cell, (width, left) in zip(_cells(part), columns, strict=False):
                _write_cell(out, cell, width, left)
        elif part[0].type in ("WITH", "GIVEN"):
            out.put(f"{part[0].text} ", 0)
            column = out.column
            out.follow(part[0])
            write_list(out, part[1:], column)
        else:
            out.write(part, _INNER)
    return out.lines


def _starts(words: Sequence[Word]) -> Iterator[int]:
    """Where each part but the first begins."""
    for place, (word, following) in enumerate(pairwise(words)):
        row = word.type == "NAME" and following.type == "VBAR" and words[place - 1].type != "VBAR"
        if row or word.type in ("WITH", "GIVEN", "INSTANCE", "EXPECT"):
            yield place


def _is_row(part: Sequence[Word]) -> bool:
    return len(part) > 1 and part[1].type == "VBAR"


def _cells(row: Sequence[Word]) -> list[Sequence[Word]]:
    """A row cut before its bars."""
    return split_at(row, [place for place, word in enumerate(row) if word.type == "VBAR"])


def _columns(rows: Sequence[Sequence[Sequence[Word]]]) -> list[tuple[int, bool]]:
    """The width of each column, its bar included, and whether its cells start at the left."""
    found: list[tuple[int, bool]] = []
    for at in range(max(map(len, rows))):
        cells = [row[at] for row in rows if at < len(row)]
        found.append((max(len(spaced(cell)) for cell in cells), at == 0 or any(c[1].type in _LEFT for c in cells)))
    return found


def _write_cell(out: Writer, cell: Sequence[Word], width: int, left: bool) -> None:
    """Write a cell with its bar, padded to the width of its column."""
    pad = " " * (width - len(spaced(cell)))
    value = cell
    if cell[0].type == "VBAR":
        out.put(f" {cell[0].text} ", _INNER)
        out.follow(cell[0])
        value = cell[1:]
    out.put("" if left else pad, _INNER)
    out.write(value, _INNER)
    if left and not out.closed:
        out.put(pad, _INNER)

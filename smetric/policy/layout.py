"""Canonical layout of policy texts, as `smetric fmt` writes it.

A layout changes white space only: words and comments stay, in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from smetric.policy.lexer import CLOSERS, OPENERS, Piece, Token, cut, space_between, tokenize, types_of
from smetric.policy.parser import parse, refuse_too_long


@dataclass(frozen=True, slots=True)
class Comment:
    """Comment, from its `#` on. `own_line` is false if it ends a line of code."""

    text: str
    own_line: bool


@dataclass(slots=True)
class _Word:
    """Token, and the comments between it and the next one of its statement."""

    type: str
    text: str
    comments: list[Comment] = field(default_factory=list)


def words_of(tokens: Sequence[Token], text: str) -> list[_Word]:
    """Return the words of one statement of *text*. Comments behind its last token are not the statement's."""
    words = [_Word(type_, str(token)) for type_, token in zip(types_of(tokens), tokens, strict=True)]
    for word, token, following in zip(words, tokens, tokens[1:], strict=False):
        lines = [line.strip() for line in text[token.end : following.start].split("\n")]
        word.comments = [Comment(line, at > 0) for at, line in enumerate(lines) if line]
    return words


def gap_between(previous: _Word | None, word: _Word) -> str:
    """Return the space between two neighbours on one line; none before the first word."""
    return "" if previous is None else space_between(previous.type, word.type)


def spaced(words: Sequence[_Word]) -> str:
    """Return the words on one line, without their comments."""
    return "".join(gap_between(before, word) + word.text for before, word in zip((None, *words), words, strict=False))


def commented(words: Sequence[_Word]) -> bool:
    """Whether a comment stands between two of the words."""
    return any(word.comments for word in words[:-1])


def outside_brackets(words: Sequence[_Word]) -> Iterator[tuple[int, _Word]]:
    """Yield the words outside of brackets, with their places."""
    depth = 0
    for place, word in enumerate(words):
        depth -= word.type in CLOSERS
        if not depth and word.type not in OPENERS and word.type not in CLOSERS:
            yield place, word
        depth += word.type in OPENERS


def split_at(words: Sequence[_Word], places: Sequence[int]) -> list[Sequence[_Word]]:
    """Cut words before each of the places. The first piece may be empty."""
    return [words[start:end] for start, end in zip((0, *places), (*places, len(words)), strict=True)]


# ── lines ────────────────────────────────────────────────────────────────────

#: Columns of a line, without the comment that ends it.
WIDTH = 100
#: The space before `when`, `as` and a comment.
GAP = "  "


@dataclass(slots=True)
class Line:
    """Line of code and the comment that ends it. A comment on a line of its own is `code`."""

    code: str
    comment: str = ""


class _Writer:
    """Lines of one statement."""

    def __init__(self) -> None:
        self.lines = [Line("")]
        #: Comments that go on lines of their own, above the next line of code.
        self._above: list[str] = []

    @property
    def column(self) -> int:
        """Column of the next text on the last line."""
        return len(self.lines[-1].code)

    @property
    def closed(self) -> bool:
        """Whether a comment ends the last line, so that no code can follow on it."""
        return bool(self.lines[-1].comment or self._above)

    def put(self, text: str, indent: int) -> None:
        """Add text to the last line, or at column *indent* of a new one if that is closed."""
        if self.closed:
            self.start_line(indent)
            text = text.lstrip()
        self.lines[-1].code += text

    def start_line(self, indent: int) -> None:
        """Begin a new line, below the comments that belong above it."""
        self.lines += [Line(" " * indent + comment) for comment in self._above]
        self._above = []
        self.lines.append(Line(" " * indent))

    def follow(self, word: _Word) -> None:
        """Add the comments behind *word*."""
        for comment in word.comments:
            if comment.own_line:
                self._above.append(comment.text)
            else:
                self.lines[-1].comment = comment.text

    def write(self, words: Sequence[_Word], indent: int, before: _Word | None = None) -> None:
        """Add words behind the word *before*, on new lines only behind comments."""
        for word in words:
            self.put(gap_between(before, word) + word.text, indent)
            self.follow(word)
            before = word


def rendered(lines: Iterable[Line]) -> Iterator[str]:
    """Yield the lines as text. The comments of adjacent lines are aligned."""
    for _, run in groupby(lines, key=lambda line: bool(line.comment)):
        block = list(run)
        width = max(len(line.code.rstrip()) for line in block)
        for line in block:
            yield line.code.rstrip().ljust(width) + GAP + line.comment if line.comment else line.code.rstrip()


# ── expressions: on one line if they fit, else broken at the loosest operators, then at the commas of brackets ──

_SUM = frozenset({"PLUS", "MINUS"})
#: Operators, the loosest first. `not in` is found by its `in`.
_LEVELS = (
    frozenset({"WHERE"}),
    frozenset({"IF", "ELSE"}),
    frozenset({"OR"}),
    frozenset({"AND"}),
    frozenset({"COMPARE", "IN"}),
    _SUM,
    frozenset({"STAR", "SLASH"}),
)


def write(
    out: _Writer, words: Sequence[_Word], *, tail: int = 0, nested: bool = False, spread: bool = False, indent: int = 2
) -> None:
    """Write an expression at the end of *out*.

    Args:
        out: the lines so far.
        words: the expression.
        tail: columns that the last line needs for the words behind it.
        nested: it is part of a broken expression, so its operators go further right than its start.
        spread: break at the loosest operators even if it fits.
        indent: its column if a comment ends the line before it.
    """
    if out.closed:
        out.start_line(indent)
    start = out.column
    if not spread and not commented(words) and start + len(spaced(words)) + tail <= WIDTH:
        out.put(spaced(words), start)
        out.follow(words[-1])
    elif len(parts := operands(words)) > 1:
        _write_chain(out, parts, tail, nested)
    elif (bracket := _widest_bracket(words)) is not None:
        _write_bracket(out, words, *bracket, tail)
    else:
        out.write(words, start)


def write_list(out: _Writer, words: Sequence[_Word], column: int, *, tail: int = 0, spread: bool = False) -> None:
    """Write a list on one line, or its items below each other at *column* if it does not fit or *spread* is set."""
    commas = [place + 1 for place, word in outside_brackets(words) if word.type == "COMMA"]
    fits = not spread and not commented(words) and column + len(spaced(words)) + tail <= WIDTH
    parts = [words] if fits else split_at(words, commas)
    for part in parts:
        if part is not parts[0]:
            out.start_line(column)
        write(out, part, tail=tail if part is parts[-1] else 0, nested=True, indent=column)


def operands(words: Sequence[_Word]) -> list[Sequence[_Word]]:
    """Cut words before each of their loosest operators."""
    outside = list(outside_brackets(words))
    for level in _LEVELS:
        places = [place for place, word in outside if place and word.type in level]
        if places:
            return split_at(words, [place - (words[place - 1].type == "NOT") for place in places])
    return [words]


def are_guards(words: Sequence[_Word]) -> bool:
    """Whether these are three or more operands of `and`, which are written one a line."""
    parts = operands(words)
    return len(parts) > 2 and parts[1][0].type == "AND"


def is_weighted_sum(words: Sequence[_Word]) -> bool:
    """Whether this is a sum of three or more products, which is written one term a line."""
    first, *rest = operands(words)
    terms = [first, *(term[1:] for term in rest)]
    return len(terms) > 2 and rest[0][0].type in _SUM and all(operands(term)[1:] for term in terms)


def _write_chain(out: _Writer, parts: Sequence[Sequence[_Word]], tail: int, nested: bool) -> None:
    """Write operands below each other. Operators end where the first operand starts; nested ones start behind that."""
    start = out.column
    write(out, parts[0], nested=True)
    for part in parts[1:]:
        size = 2 if part[0].type == "NOT" else 1
        operator, operand = part[:size], part[size:]
        width = len(spaced(operator)) + 1
        out.start_line(start + 2 if nested else max(1, start - width))
        column = out.column + width
        out.write(operator, column)
        out.put(" ", column)
        write(out, operand, tail=tail if part is parts[-1] else 0, nested=True)


def _write_bracket(out: _Writer, words: Sequence[_Word], opener: int, closer: int, tail: int) -> None:
    """Write the items of a bracket below each other, from behind the bracket."""
    before, inside, after = words[: opener + 1], words[opener + 1 : closer], words[closer:]
    column = out.column + len(spaced(before))
    out.write(before, out.column)
    write_list(out, inside, column, tail=len(spaced(after)) + tail, spread=True)
    out.write(after, column, before=inside[-1])


def _widest_bracket(words: Sequence[_Word]) -> tuple[int, int] | None:
    """Return opener and closer of the widest bracket; None if all are empty."""
    widest: tuple[int, int] | None = None
    width = 0
    opened: list[int] = []
    for place, word in enumerate(words):
        if word.type in OPENERS:
            opened.append(place)
        elif word.type in CLOSERS:
            opener = opened.pop()
            size = len(spaced(words[opener : place + 1]))
            if not opened and place > opener + 1 and size > width:
                widest, width = (opener, place), size
    return widest


# ── `test` blocks: a line for each part, and a table with aligned columns ──

_INDENT = 2
#: Column of a part behind a comment.
_INNER = 4
#: Columns with such a cell are aligned to the left, as the first one is; numbers to the right.
_LEFT = frozenset({"STRING", "LBRACE"})


def lay_case(words: Sequence[_Word]) -> list[Line]:
    """Return the lines of one test."""
    parts = split_at(words, list(_starts(words)))
    columns = _columns([_cells(part) for part in parts if _is_row(part)])
    out = _Writer()
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


def _starts(words: Sequence[_Word]) -> Iterator[int]:
    """Yield the place of each part but the first."""
    for place, (word, following) in enumerate(pairwise(words)):
        row = word.type in ("NAME", "STRING") and following.type == "VBAR" and words[place - 1].type != "VBAR"
        if row or word.type in ("WITH", "GIVEN", "INSTANCE", "EXPECT"):
            yield place


def _is_row(part: Sequence[_Word]) -> bool:
    return len(part) > 1 and part[1].type == "VBAR"


def _cells(row: Sequence[_Word]) -> list[Sequence[_Word]]:
    """Cut a row before its bars."""
    return split_at(row, [place for place, word in enumerate(row) if word.type == "VBAR"])


def _columns(rows: Sequence[Sequence[Sequence[_Word]]]) -> list[tuple[int, bool]]:
    """Return the width of each column with its bar, and whether it is aligned to the left."""
    found: list[tuple[int, bool]] = []
    for at in range(max(map(len, rows))):
        cells = [row[at] for row in rows if at < len(row)]
        found.append((max(len(spaced(cell)) for cell in cells), at == 0 or any(c[1].type in _LEFT for c in cells)))
    return found


def _write_cell(out: _Writer, cell: Sequence[_Word], width: int, left: bool) -> None:
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


# ── runs of `use`, `param`, `let` or `def`: aligned at `=` ──


def lay_declarations(run: Sequence[Sequence[_Word]]) -> list[list[Line]]:
    """Return the lines of each statement of a run of one keyword."""
    heads = [_head(words) for words in run]
    width = max(len(spaced(head)) for head in heads)
    return [_declaration(words, head, width) for words, head in zip(run, heads, strict=True)]


def _head(words: Sequence[_Word]) -> Sequence[_Word]:
    """Return the words before `=`; none without a `=`, or with a comment before the value."""
    equal = next((place for place, word in enumerate(words) if word.type == "EQUAL"), 0)
    return words[:equal] if equal and not commented(words[: equal + 2]) else []


def _declaration(words: Sequence[_Word], head: Sequence[_Word], width: int) -> list[Line]:
    out = _Writer()
    if head:
        out.put(f"{spaced(head).ljust(width)} = ", 0)
        value = words[len(head) + 1 :]
        write(out, value, spread=is_weighted_sum(value))
    elif words[0].type == "USE" and not commented(words[:3]):
        out.put(f"{spaced(words[:2])} ", 0)
        write(out, words[2:])
    else:
        out.write(words, 2)
    return out.lines


# ── runs of filters or of outcomes: aligned at `when` and at `as`, three or more guards one a line ──

#: Columns before `when`. Behind a longer head `when` goes on the next line.
_WIDEST_HEAD = 40
_WHEN = "when "
_BELOW = 2


class _Rule:
    """Statement cut at `when` and `as`, and its lines so far."""

    def __init__(self, words: Sequence[_Word]) -> None:
        places = [place for place, word in outside_brackets(words) if word.type in ("WHEN", "AS")]
        self.head, *parts = split_at(words, places)
        self.when = next((part for part in parts if part[0].type == "WHEN"), [])
        self.label = next((part for part in parts if part[0].type == "AS"), [])
        self.out = _Writer()

    @property
    def tail(self) -> int:
        """Columns that the label needs."""
        return len(GAP + spaced(self.label)) if self.label else 0

    def write_head(self, keyword: int) -> None:
        """Write the words before `when`, with the keyword padded to a width."""
        self.out.put(self.head[0].text.ljust(keyword), 0)
        self.out.follow(self.head[0])
        self.out.put(" ", _BELOW)
        write(self.out, self.head[1:], tail=0 if self.when else self.tail)

    def fits(self, column: int) -> bool:
        """Whether `when` fits behind the head, at *column*."""
        if len(self.out.lines) > 1 or self.out.closed or self.out.column > _WIDEST_HEAD:
            return False
        guards = operands(self.when[1:])
        ends = [column + len(_WHEN) + len(spaced(guard)) for guard in guards]
        return max(*ends, ends[-1] + self.tail) <= WIDTH

    def write_when(self, column: int | None) -> None:
        """Write the condition behind the head, at *column*, or below it."""
        if column is None:
            self.out.start_line(_BELOW)
        else:
            self.out.put(" " * (column - self.out.column), column)
        start = self.out.column + len(_WHEN)
        self.out.put(_WHEN, 0)
        self.out.follow(self.when[0])
        guards = self.when[1:]
        write(self.out, guards, tail=self.tail, spread=are_guards(guards), indent=start)

    def write_label(self, column: int) -> None:
        """Write the label at *column*, or behind it if that is taken."""
        self.out.put(" " * max(len(GAP), column - self.out.column), column)
        self.out.write(self.label, column)


def lay_rules(run: Sequence[Sequence[_Word]]) -> list[list[Line]]:
    """Return the lines of each statement of a run: `keep` and `prefer`, or `route`, `reject` and `hold`."""
    rules = [_Rule(words) for words in run]
    # `keep` is padded to the width of `prefer`; outcomes are not padded.
    filters = [len(rule.head[0].text) for rule in rules if rule.head[0].type in ("KEEP", "PREFER")]
    for rule in rules:
        rule.write_head(max(filters, default=0))
    beside = [rule for rule in rules if rule.when]
    column = 0
    while beside:
        column = max(rule.out.column for rule in beside) + len(GAP)
        fitting = [rule for rule in beside if rule.fits(column)]
        if len(fitting) == len(beside):
            break
        beside = fitting
    for rule in rules:
        if rule.when:
            rule.write_when(column if rule in beside else None)
    labelled = [rule for rule in rules if rule.label]
    column = max((rule.out.column for rule in labelled if not rule.out.closed), default=0) + len(GAP)
    if any(column + len(spaced(rule.label)) > WIDTH for rule in labelled):
        column = 0
    for rule in labelled:
        rule.write_label(column)
    return [rule.out.lines for rule in rules]


# ── whole texts: runs are statements of one kind without an empty line between them ──

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
    """Statement: its words, the comments and single empty lines above it, and the comment that ends its last line."""

    words: list[_Word]
    above: list[str]
    behind: str

    @property
    def kind(self) -> str:
        """Kind of the statement. Statements of one kind are aligned."""
        return _KINDS.get(self.words[0].type, self.words[0].text)


def format_text(text: str, path: str = "<policy>") -> str:
    """Return the canonical layout of a policy or a library.

    Args:
        text: the source.
        path: its name in errors.

    Raises:
        PolicyError: it does not parse, or would be longer than a policy may be.
    """
    parse(text, path)
    parts, below = _parts(text, cut(tokenize(text)))
    lines = [line for run in _runs(parts) for line in _laid(run)]
    laid_out = "\n".join(rendered([*lines, *map(Line, below)])).strip("\n") + "\n"
    refuse_too_long(laid_out, path, "laid out, this file would be too long")
    return laid_out


def _parts(text: str, pieces: Sequence[Piece]) -> tuple[list[_Part], list[str]]:
    """Return the statements, with an empty line around each header and test, and the lines below the last one."""
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
    """Return the comment that ends the line before *gap*, and the lines up to the next statement."""
    behind, *rest = (line.strip() for line in gap.split("\n"))
    if rest and not rest[-1]:
        del rest[-1]  # the space before the next statement
    return behind, [line for before, line in zip((None, *rest), rest, strict=False) if line or before != ""]


def _runs(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Cut statements into runs, at empty lines and changes of the kind."""
    run: list[_Part] = []
    for part in parts:
        before = run[-1].kind if run else ""
        if before and (part.kind != before or "" in part.above):
            yield run
            run = []
        run.append(part)
    yield run


def _laid(run: Sequence[_Part]) -> Iterator[Line]:
    """Yield the lines of one run with the comments around its statements."""
    for part, lines in zip(run, _LAYOUTS.get(run[0].kind, lay_declarations)([part.words for part in run]), strict=True):
        yield from map(Line, part.above)
        lines[-1].comment = part.behind
        yield from lines


def _lay_header(run: Sequence[Sequence[_Word]]) -> list[list[Line]]:
    out = _Writer()
    out.write(run[0], 0)
    return [out.lines]


#: The layout of each kind of run; the other kinds are declarations.
_LAYOUTS: dict[str, Callable[[Sequence[Sequence[_Word]]], list[list[Line]]]] = {
    "header": _lay_header,
    "filter": lay_rules,
    "outcome": lay_rules,
    "test": lambda run: [lay_case(words) for words in run],
}

"""Expressions on one line if they fit, else one operand a line with the operators in front.

The loosest operators break first, then brackets at their commas.
"""

from __future__ import annotations

from collections.abc import Sequence

from smetric.policy.layout.words import Word, commented, outside_brackets, spaced, split_at
from smetric.policy.layout.writer import WIDTH, Writer
from smetric.policy.lexer import CLOSERS, OPENERS

_SUM = frozenset({"PLUS", "MINUS"})
#: Operators, the loosest first. The `not` of `not in` is found by the word behind it.
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
    out: Writer, words: Sequence[Word], *, tail: int = 0, nested: bool = False, spread: bool = False, indent: int = 2
) -> None:
    """Write an expression at the end of *out*.

    Args:
        out: what is written so far.
        words: the expression.
        tail: columns that the last line needs for what follows.
        nested: whether it is a part of a broken expression; its own operators then stand further right than its start.
        spread: break the loosest operators even if it would fit.
        indent: where it starts if a comment ends the line before it.
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


def write_list(out: Writer, words: Sequence[Word], column: int, *, tail: int = 0, spread: bool = False) -> None:
    """Write what commas divide on one line, or if it does not fit or is to be spread, below each other at *column*."""
    commas = [place + 1 for place, word in outside_brackets(words) if word.type == "COMMA"]
    fits = not spread and not commented(words) and column + len(spaced(words)) + tail <= WIDTH
    parts = [words] if fits else split_at(words, commas)
    for part in parts:
        if part is not parts[0]:
            out.start_line(column)
        write(out, part, tail=tail if part is parts[-1] else 0, nested=True, indent=column)


def operands(words: Sequence[Word]) -> list[Sequence[Word]]:
    """The words cut before each of their loosest operators; one piece where there is none."""
    outside = list(outside_brackets(words))
    for level in _LEVELS:
        places = [place for place, word in outside if place and word.type in level]
        if places:
            return split_at(words, [place - (words[place - 1].type == "NOT") for place in places])
    return [words]


def are_guards(words: Sequence[Word]) -> bool:
    """Whether three or more operands are joined by `and`: guards, which read best one a line."""
    parts = operands(words)
    return len(parts) > 2 and parts[1][0].type == "AND"


def is_weighted_sum(words: Sequence[Word]) -> bool:
    """Whether three or more products are added: a score, which reads best one term a line."""
    first, *rest = operands(words)
    terms = [first, *(term[1:] for term in rest)]
    return len(terms) > 2 and rest[0][0].type in _SUM and all(operands(term)[1:] for term in terms)


def _write_chain(out: Writer, parts: Sequence[Sequence[Word]], tail: int, nested: bool) -> None:
    """Operands below each other; the operators end where the first operand starts, or nested begin behind that."""
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


def _write_bracket(out: Writer, words: Sequence[Word], opener: int, closer: int, tail: int) -> None:
    """What stands in one bracket, below each other from behind the bracket."""
    before, inside, after = words[: opener + 1], words[opener + 1 : closer], words[closer:]
    column = out.column + len(spaced(before))
    out.write(before, out.column)
    write_list(out, inside, column, tail=len(spaced(after)) + tail, spread=True)
    out.write(after, column, before=inside[-1])


def _widest_bracket(words: Sequence[Word]) -> tuple[int, int] | None:
    """Opener and closer of the widest bracket, or None where there is none that holds something."""
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

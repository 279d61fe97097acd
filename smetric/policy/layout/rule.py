"""Runs of filters or of outcomes: `when` and `as` each in one column, several guards one a line."""

from __future__ import annotations

from collections.abc import Sequence

from smetric.policy.layout.expression import are_guards, operands, write
from smetric.policy.layout.words import Word, outside_brackets, spaced, split_at
from smetric.policy.layout.writer import GAP, WIDTH, Line, Writer

#: Columns of what stands before `when`; where it is longer, `when` goes on the next line.
_WIDEST_HEAD = 40
_WHEN = "when "
_BELOW = 2


class _Rule:
    """One statement cut at `when` and `as`, and its lines so far."""

    def __init__(self, words: Sequence[Word]) -> None:
        places = [place for place, word in outside_brackets(words) if word.type in ("WHEN", "AS")]
        self.head, *parts = split_at(words, places)
        self.when = next((part for part in parts if part[0].type == "WHEN"), [])
        self.label = next((part for part in parts if part[0].type == "AS"), [])
        self.out = Writer()

    @property
    def tail(self) -> int:
        """The columns that the label needs."""
        return len(GAP + spaced(self.label)) if self.label else 0

    def write_head(self, keyword: int) -> None:
        """Write what stands before `when`, its keyword padded to a width."""
        self.out.put(self.head[0].text.ljust(keyword), 0)
        self.out.follow(self.head[0])
        self.out.put(" ", _BELOW)
        write(self.out, self.head[1:], tail=0 if self.when else self.tail)

    def fits(self, column: int) -> bool:
        """Whether `when` can stand behind the head, at *column*."""
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
        """Write the label at *column*, or as near behind it as can be."""
        self.out.put(" " * max(len(GAP), column - self.out.column), column)
        self.out.write(self.label, column)


def lay_rules(run: Sequence[Sequence[Word]]) -> list[list[Line]]:
    """The lines of each statement of a run: `keep` and `prefer`, or `route`, `reject` and `hold`."""
    rules = [_Rule(words) for words in run]
    # `keep` is padded beside `prefer`; outcomes differ too much below their keywords.
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

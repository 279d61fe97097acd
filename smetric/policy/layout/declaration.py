"""Runs of `use`, `param`, `let` or `def`: what stands before `=` is padded to one width."""

from __future__ import annotations

from collections.abc import Sequence

from smetric.policy.layout.expression import is_weighted_sum, write
from smetric.policy.layout.words import Word, commented, spaced
from smetric.policy.layout.writer import Line, Writer


def lay_declarations(run: Sequence[Sequence[Word]]) -> list[list[Line]]:
    """The lines of each statement of a run, all of one keyword."""
    heads = [_head(words) for words in run]
    width = max(len(spaced(head)) for head in heads)
    return [_declaration(words, head, width) for words, head in zip(run, heads, strict=True)]


def _head(words: Sequence[Word]) -> Sequence[Word]:
    """What stands before `=`; nothing where there is no `=`, or a comment on the way to the value."""
    equal = next((place for place, word in enumerate(words) if word.type == "EQUAL"), 0)
    return words[:equal] if equal and not commented(words[: equal + 2]) else []


def _declaration(words: Sequence[Word], head: Sequence[Word], width: int) -> list[Line]:
    out = Writer()
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

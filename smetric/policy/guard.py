"""Guards: the conjuncts of a `when`, and how traces and tests call each of them."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterator
from dataclasses import fields

from smetric.policy import tree
from smetric.policy.layout.words import spaced_text

#: The guard that fails when a held request has been held for as long as its rule says.
HELD = "held"
#: The guard that fails when a rule's pick is nobody.
NOBODY = "nobody"


def conjuncts(when: tree.Expr | None) -> list[tree.Expr]:
    """The guards of a condition, left to right; none without one."""
    found: list[tree.Expr] = []
    while isinstance(when, tree.Binary) and when.op == "and":  # of any length: nothing has counted it yet
        found = conjuncts(when.right) + found
        when = when.left
    return found if when is None else [when, *found]


def label_of(guard: tree.Expr, text: str, definitions: Container[str]) -> str:
    """How traces call *guard*: its source text on one line, where a call of a definition is its name alone."""
    pieces = []
    at = guard.span.start
    for call in sorted(_calls(guard, definitions), key=lambda call: call.span.start):
        pieces += [text[at : call.span.start], call.function]
        at = call.span.end
    pieces.append(text[at : guard.span.end])
    return one_line("".join(pieces))


@functools.lru_cache(maxsize=1024)
def one_line(source: str) -> str:
    """Source text on one line, spaced as `smetric fmt` spaces it, so that no layout changes what a guard is called."""
    return spaced_text(source) or " ".join(source.split())


def _calls(part: tree.Node, definitions: Container[str]) -> Iterator[tree.Call]:
    """Outermost calls of definitions in *part*."""
    if isinstance(part, tree.Call) and part.function in definitions:
        yield part
        return
    for field in fields(part):
        value = getattr(part, field.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, tree.Node):
                yield from _calls(inner, definitions)

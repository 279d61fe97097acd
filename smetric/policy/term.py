"""Expressions of a policy with names resolved, definitions expanded, parameters put in, and one shape each.

They are made by `resolver` and `fold`, and written as code by `emitter` and `picker`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from smetric.policy.builtin import BUILTINS, Family
from smetric.policy.span import Span


class Shape(enum.Enum):
    """How many values an expression has."""

    SCALAR = "one value"
    VECTOR = "one value per candidate"
    PICK = "a candidate"


@dataclass(slots=True, eq=False, kw_only=True)
class Term:
    """An expression of the plan; `span` is the place in the file that traces and tracebacks point to."""

    span: Span
    shape: Shape

    def parts(self) -> list[Term]:
        """The expressions this one is computed from."""
        found: list[Term] = []
        for name in self.__slots__:
            value = getattr(self, name)
            found += [part for part in (value if type(value) is tuple else (value,)) if isinstance(part, Term)]
        return found


@dataclass(slots=True, eq=False)
class Const(Term):
    """A literal or the value of a parameter: number, string, truth value or frozenset of strings."""

    value: Any  # of any kind of the language


@dataclass(slots=True, eq=False)
class Column(Term):
    """A feature."""

    feature: str


@dataclass(slots=True, eq=False)
class RequestValue(Term):
    """`req.NAME`."""

    name: str


@dataclass(slots=True, eq=False)
class Ref(Term):
    """The value of a binding."""

    binding: Binding

    def parts(self) -> list[Term]:
        """The binding's value."""
        return [self.binding.value]


@dataclass(slots=True, eq=False)
class Op(Term):
    """An element-wise operation.

    `op` is an operator of the language, `neg`, `if` (condition, then, otherwise), an element-wise built-in,
    `somebody` (whether a pick is somebody), `divides` (whether `ratio` divides by it), `set` (a set of the operands).
    """

    op: str
    operands: tuple[Term, ...]


@dataclass(slots=True, eq=False)
class Reduce(Term):
    """`mean`, `any`, `count`, … over the candidates of `level`, those of `where` only; `more` is what else it takes."""

    function: str
    value: Term
    more: tuple[Term, ...]
    where: Term | None
    default: Term | None
    level: int


@dataclass(slots=True, eq=False)
class At(Term):
    """`vector[pick]`."""

    vector: Term
    pick: Term


@dataclass(slots=True, eq=False)
class Scale(Term):
    """`norm(v)`, `share(v)`, `rank(v)` over the candidates of `level`."""

    function: str
    value: Term
    level: int


@dataclass(slots=True, eq=False)
class Draw(Term):
    """`draw(n)` of the candidates of `level`, or `chance(n)`; `site` is its index among the draws of the file."""

    function: str
    amount: Term
    level: int
    site: int


@dataclass(slots=True, eq=False)
class Top(Term):
    """`top(v, n, then: v…)` of the candidates of `level`; `site` as in `Draw`."""

    value: Term
    amount: Term
    thens: tuple[Term, ...]
    level: int
    site: int


@dataclass(slots=True, eq=False)
class Keyed(Term):
    """`hrw(key)` or `bucket(key)`."""

    function: str
    key: Term


@dataclass(slots=True, eq=False)
class Provenance(Term):
    """`known` or `age` of the features that an expression is computed from."""

    function: str
    value: Term


@dataclass(slots=True, eq=False)
class Pick(Term):
    """`argmin`, `rr_argmax`, `softmin`, `sample`, … over the candidates of `level`, those of `where` only.

    Args:
        function: as written.
        value: what is compared; one value for all makes all tie.
        thens: tie breakers in order, lowest first.
        named: `within:` of a rotation, `temperature:` of a lottery; None without.
        where: mask, or None. With one the pick may be nobody.
        level: how many filters stand above its line.
        site: its index among the picks of the file.
    """

    function: str
    value: Term
    thens: tuple[Term, ...]
    named: Term | None
    where: Term | None
    level: int
    site: int
    #: Whether ties are drawn (PICK) or rotate (ROTATION), or everybody may be drawn (LOTTERY).
    family: Family = field(init=False)
    #: Whether ties are taken in rotation.
    rotates: bool = field(init=False)
    #: `min` or `max`: whether a low or a high value wins.
    direction: str = field(init=False)

    def __post_init__(self) -> None:
        builtin = BUILTINS[self.function]
        self.family, self.direction = builtin.family, builtin.direction
        self.rotates = builtin.family is Family.ROTATION


@dataclass(slots=True, eq=False)
class Binding:
    """A value with a name, computed at most once: a `let`, an argument of a `def`, or a pick.

    `uses` counts the places that read it, among what a decision can reach.
    """

    name: str
    value: Term
    uses: int = 0


def walk(term: Term) -> Iterator[Term]:
    """*term* and everything it is computed from, each once."""
    seen: set[int] = set()
    pending = [term]
    while pending:
        current = pending.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            pending.extend(current.parts())


def columns_of(term: Term) -> list[Column]:
    """The features that *term* may read, where it does, in the order of the file."""
    return sorted((part for part in walk(term) if isinstance(part, Column)), key=lambda part: part.span.start)


def features_of(term: Term) -> frozenset[str]:
    """The features that *term* may read."""
    return frozenset(part.feature for part in walk(term) if isinstance(part, Column))


def fields_of(term: Term) -> frozenset[str]:
    """The request fields that *term* may read."""
    return frozenset(part.name for part in walk(term) if isinstance(part, RequestValue))


def count_uses(roots: list[Term]) -> None:
    """Set `uses` of every binding reachable from *roots*."""
    seen: set[int] = set()
    pending = list(roots)
    while pending:
        term = pending.pop()
        if isinstance(term, Ref):
            term.binding.uses += 1
            if id(term.binding) in seen:
                continue
            seen.add(id(term.binding))
        pending.extend(term.parts())

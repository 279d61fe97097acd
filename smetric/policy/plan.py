"""What a policy computes: names resolved, definitions expanded, parameters put in, one shape per expression.

No code is made here (`compiler.py`) and nothing is checked: a plan is made from a file that the checker accepted.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from smetric.policy.tree import Span


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

    def parts(self) -> tuple[Term, ...]:
        """The expressions this one is computed from."""
        return ()


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

    def parts(self) -> tuple[Term, ...]:
        """The binding's value."""
        return (self.binding.value,)


@dataclass(slots=True, eq=False)
class Op(Term):
    """An element-wise operation.

    `op` is an operator of the language, `neg`, `if` (condition, then, otherwise), `least`, `greatest`, `abs`,
    `somebody` (whether a pick is somebody), `set` (a set of the operands).
    """

    op: str
    operands: tuple[Term, ...]

    def parts(self) -> tuple[Term, ...]:
        """The operands."""
        return self.operands


@dataclass(slots=True, eq=False)
class Reduce(Term):
    """`mean`, `min`, `max`, `sum`, `any`, `all`, `count` over the candidates of `level`, those of `where` only."""

    function: str
    value: Term
    where: Term | None
    default: Term | None
    level: int

    def parts(self) -> tuple[Term, ...]:
        """Value, mask and default."""
        return tuple(part for part in (self.value, self.where, self.default) if part is not None)


@dataclass(slots=True, eq=False)
class At(Term):
    """`vector[pick]`."""

    vector: Term
    pick: Term

    def parts(self) -> tuple[Term, ...]:
        """Vector and pick."""
        return (self.vector, self.pick)


@dataclass(slots=True, eq=False)
class Norm(Term):
    """`norm(v)`: min-max over the candidates of `level`."""

    value: Term
    level: int

    def parts(self) -> tuple[Term, ...]:
        """The vector."""
        return (self.value,)


@dataclass(slots=True, eq=False)
class Provenance(Term):
    """`known` or `age` of the features that an expression is computed from."""

    function: str
    value: Term

    def parts(self) -> tuple[Term, ...]:
        """The expression."""
        return (self.value,)


@dataclass(slots=True, eq=False)
class Pick(Term):
    """`argmin`, `argmax`, `rr_argmin`, `rr_argmax` over the candidates of `level`, those of `where` only.

    Args:
        function: as written.
        value: what is compared; one value for all makes all tie.
        thens: tie breakers in order, lowest first.
        where: mask, or None. With one the pick may be nobody.
        level: how many filters stand above its line.
        site: its index among the picks of the file.
    """

    function: str
    value: Term
    thens: tuple[Term, ...]
    where: Term | None
    level: int
    site: int

    def parts(self) -> tuple[Term, ...]:
        """Value, tie breakers and mask."""
        return (self.value, *self.thens, *(() if self.where is None else (self.where,)))

    @property
    def rotates(self) -> bool:
        """Whether ties are taken in rotation; otherwise they are drawn."""
        return self.function.startswith("rr_")

    @property
    def direction(self) -> str:
        """`min` or `max`."""
        return self.function[-3:]


@dataclass(slots=True, eq=False)
class Binding:
    """A value with a name, computed at most once: a `let`, an argument of a `def`, or a pick.

    `uses` counts the places that read it, among what a decision can reach.
    """

    name: str
    value: Term
    uses: int = 0


@dataclass(slots=True)
class Guard:
    """One conjunct of a `when`: its label in traces, and what it computes."""

    label: str
    value: Term


class StatementKind(enum.Enum):
    """What a statement of the plan does."""

    KEEP = "keep"
    PREFER = "prefer"
    ROUTE = "route"
    REJECT = "reject"
    HOLD = "hold"

    @property
    def is_filter(self) -> bool:
        """Whether it narrows the candidates."""
        return self in (StatementKind.KEEP, StatementKind.PREFER)


@dataclass(slots=True)
class Step:
    """One filter or outcome, in the order of the file.

    Args:
        kind: keep, prefer, route, reject or hold.
        label: as written after `as`, else a stable one such as `route_1`.
        span: the statement's place.
        guards: conjuncts of its `when`.
        value: the mask, the pick, or the seconds after `retry` (None without) or `for`.
        status: HTTP status of a reject.
        message: text of a reject.
    """

    kind: StatementKind
    label: str
    span: Span
    guards: tuple[Guard, ...]
    value: Term | None
    status: int = 0
    message: str = ""


@dataclass(slots=True)
class Plan:
    """All steps of a policy in order, and its picks by site."""

    steps: tuple[Step, ...]
    picks: tuple[Binding, ...]
    #: The name of the cursor of each pick that rotates, and the seed of each that draws; by site.
    keys: tuple[str, ...] = field(default=())


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

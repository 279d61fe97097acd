"""Plan of a policy: filters and outcomes in order, over expressions with all names resolved."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from smetric.policy.builtin import Builtin, Family
from smetric.policy.diagnostic import Span

# ── expressions ──────────────────────────────────────────────────────────────


class Shape(enum.Enum):
    """Number of values of an expression."""

    SCALAR = "one value"
    VECTOR = "one value per candidate"
    PICK = "a candidate"


@dataclass(slots=True, eq=False, kw_only=True)
class Term:
    """An expression; `span` is its place in the file, for traces and tracebacks."""

    span: Span
    shape: Shape

    def parts(self) -> list[Term]:
        """The expressions that this one is computed from."""
        found: list[Term] = []
        for name in self.__slots__:
            value = getattr(self, name)
            found += [part for part in (value if type(value) is tuple else (value,)) if isinstance(part, Term)]
        return found


@dataclass(slots=True, eq=False)
class Const(Term):
    """A literal or the value of a parameter: number, string, truth value or frozenset of strings."""

    value: Any


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

    `op` is an operator of the language, `neg`, `if` (condition, then, otherwise), an element-wise built-in, `chosen`
    (whether a pick has a candidate), `divides` (whether `ratio` divides by it), or `set` (a set of the operands).
    """

    op: str
    operands: tuple[Term, ...]


@dataclass(slots=True, eq=False)
class At(Term):
    """`vector[pick]`."""

    vector: Term
    pick: Term


@dataclass(slots=True, eq=False)
class Call(Term):
    """A built-in that is neither element-wise nor a pick.

    Args:
        builtin: its row.
        plain: its positional arguments.
        level: number of filters above its line; it sees the candidates that they leave.
        where: mask of the candidates, or None.
        default: value if there is no candidate, or None.
        thens: tie breakers in order, lowest first.
        site: index among the draws of the file.
    """

    builtin: Builtin
    plain: tuple[Term, ...]
    level: int
    where: Term | None = None
    default: Term | None = None
    thens: tuple[Term, ...] = ()
    site: int = -1


@dataclass(slots=True, eq=False)
class Pick(Term):
    """`argmin`, `rr_argmax`, `softmin`, `sample`, …

    Args:
        builtin: its row.
        value: the score; a single value makes all candidates tie.
        level: number of filters above its line.
        where: mask of the candidates, or None. With a mask, there may be no candidate.
        named: `within:` of a rotation, `temperature:` of a lottery, or None.
        thens: tie breakers in order, lowest first.
        site: index among the picks of the file.
    """

    builtin: Builtin
    value: Term
    level: int
    where: Term | None
    named: Term | None
    thens: tuple[Term, ...]
    site: int

    #: PICK if ties are drawn, ROTATION if they rotate, LOTTERY if any candidate may be drawn.
    family: Family = field(init=False)
    #: Ties are taken in rotation.
    rotates: bool = field(init=False)
    #: `min` or `max`: whether a low or a high value wins.
    direction: str = field(init=False)

    def __post_init__(self) -> None:
        self.family, self.direction = self.builtin.family, self.builtin.direction
        self.rotates = self.family is Family.ROTATION


@dataclass(slots=True, eq=False)
class Binding:
    """A value with a name, computed at most once: a `let`, an argument of a `def`, or a pick.

    `uses` counts the reachable places that read it.
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
    """The places where *term* may read a feature, in the order of the file."""
    return sorted((part for part in walk(term) if isinstance(part, Column)), key=lambda part: part.span.start)


def features_of(term: Term) -> frozenset[str]:
    """The features that *term* may read."""
    return frozenset(part.feature for part in walk(term) if isinstance(part, Column))


def fields_of(term: Term) -> frozenset[str]:
    """The request fields that *term* may read."""
    return frozenset(part.name for part in walk(term) if isinstance(part, RequestValue))


# ── statements ───────────────────────────────────────────────────────────────


class Outcome(enum.Enum):
    """End of a decision."""

    ROUTE = "route"
    REJECT = "reject"
    #: The request waits for a change of load, and is decided again.
    HOLD = "hold"
    #: A `keep` left no candidate: 503, named after the filter.
    NO_CANDIDATE = "nobody"


@dataclass(slots=True)
class Guard:
    """One conjunct of a `when`, and its label in traces."""

    label: str
    value: Term


@dataclass(slots=True)
class Step:
    """One filter or outcome, in the order of the file.

    Args:
        word: its keyword: keep, prefer, route, reject or hold.
        outcome: the end of a decision by it; None for a `prefer`, which ends none.
        label: as written after `as`, else a stable one such as `route_1`.
        span: the statement's place.
        guards: conjuncts of its `when`.
        value: the mask, the pick, or the seconds after `for` or `retry` (None without).
        status: HTTP status of a reject.
        message: text of a reject.
    """

    word: str
    outcome: Outcome | None
    label: str
    span: Span
    guards: tuple[Guard, ...]
    value: Term | None
    status: int = 0
    message: str = ""

    @property
    def is_filter(self) -> bool:
        """Whether it narrows the candidates: a `keep` or a `prefer`."""
        return self.outcome in (Outcome.NO_CANDIDATE, None)

    @property
    def terms(self) -> list[Term]:
        """Its expressions in order: guards, then value."""
        return [*(guard.value for guard in self.guards), *(() if self.value is None else (self.value,))]


@dataclass(slots=True)
class Plan:
    """A policy, resolved.

    Args:
        steps: filters and outcomes.
        picks: the picks, by site.
        keys: for each pick, the name of its cursor if it rotates, else of its stream of draws.
        draws: for each `draw`, `top` and `chance`, the name of its stream.
    """

    steps: tuple[Step, ...]
    picks: tuple[Pick, ...]
    keys: tuple[str, ...]
    draws: tuple[str, ...]

    def __post_init__(self) -> None:
        """Count the uses of each binding."""
        seen: set[int] = set()
        pending = self.terms
        while pending:
            term = pending.pop()
            if isinstance(term, Ref):
                term.binding.uses += 1
                if id(term.binding) in seen:
                    continue
                seen.add(id(term.binding))
            pending.extend(term.parts())

    @property
    def terms(self) -> list[Term]:
        """The expressions of all steps, in order."""
        return [term for step in self.steps for term in step.terms]

    @property
    def families(self) -> set[Family]:
        """The families of the built-ins that it calls, picks and element-wise ones excepted."""
        return {part.builtin.family for term in self.terms for part in walk(term) if isinstance(part, Call)}

    @property
    def keyed(self) -> bool:
        """Whether it places by a key, and by the seed if the key is empty."""
        return not self.families.isdisjoint({Family.WEIGHT, Family.PLACE})

    @property
    def rotating(self) -> list[str]:
        """The names of the cursors."""
        return [key for key, pick in zip(self.keys, self.picks, strict=True) if pick.rotates]

    @property
    def random(self) -> bool:
        """Whether the decision may depend on the seed."""
        return bool(self.draws) or self.keyed or any(not pick.rotates for pick in self.picks)

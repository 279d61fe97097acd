"""Plan of a policy: filters and outcomes in order, over resolved expressions."""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from smetric.policy.builtin import BUILTINS, Family
from smetric.policy.diagnostic import Span
from smetric.policy.types import SMALLEST_DIVISOR

# Expressions of a policy with names resolved, definitions expanded, parameters put in, and one shape each.
#
# They are made by `resolver` and `fold`, and written as code by `emitter` and `picker`.


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


# Makes terms, and settles at once what constants and parameters settle.
#
# What a term stands for in the file is `resolver`'s business.

_FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}

#: Makes the term that a name stands for, at the place where it is read.
Reading = Callable[[Span], Term]


def bound(name: str, value: Term) -> Reading:
    """How *name* reads from now on: constants, features and references pass through, all else is computed once."""
    if isinstance(value, Const):
        return lambda span: Const(value.value, span=span, shape=value.shape)
    if isinstance(value, Column):
        return lambda span: Column(value.feature, span=span, shape=value.shape)
    if isinstance(value, RequestValue):
        return lambda span: RequestValue(value.name, span=span, shape=value.shape)
    binding = value.binding if isinstance(value, Ref) else Binding(name, value)
    return lambda span: Ref(binding, span=span, shape=value.shape)


def set_of(items: Sequence[Term], span: Span) -> Term:
    """`{a, b}`."""
    if all(isinstance(item, Const) for item in items):
        members = frozenset(item.value for item in items if isinstance(item, Const))
        return Const(members, span=span, shape=Shape.SCALAR)
    return Op("set", tuple(items), span=span, shape=_widest(items))


def op(name: str, span: Span, *operands: Term) -> Term:
    """An operation; one whose result is plain already, because a parameter settles it, becomes that result."""
    first = operands[0]
    if isinstance(first, Const):
        settled = _settled(name, first.value, operands)
        if settled is not None:
            return settled
        if name == "not":
            return Const(not first.value, span=span, shape=Shape.SCALAR)
        if name == "neg":
            return Const(-first.value, span=span, shape=Shape.SCALAR)
        if name == "divides":
            return Const(abs(first.value) >= SMALLEST_DIVISOR, span=span, shape=Shape.SCALAR)
        if name in _FOLD and isinstance(operands[1], Const) and (name != "/" or operands[1].value):
            return Const(_FOLD[name](first.value, operands[1].value), span=span, shape=Shape.SCALAR)
    if name == "if" and operands[1].shape is Shape.PICK:
        return Op(name, operands, span=span, shape=Shape.PICK)
    if name in ("and", "or") and first.shape is Shape.SCALAR and operands[1].shape is Shape.VECTOR:
        # One truth value on the left decides whether the other side is looked at.
        settled = Const(name == "or", span=span, shape=Shape.SCALAR)
        branches = (operands[1], settled) if name == "and" else (settled, operands[1])
        return Op("if", (first, *branches), span=span, shape=Shape.VECTOR)
    return Op(name, operands, span=span, shape=_widest(operands))


def _widest(terms: Sequence[Term]) -> Shape:
    return Shape.VECTOR if any(term.shape is Shape.VECTOR for term in terms) else Shape.SCALAR


def _settled(name: str, first: Any, operands: tuple[Term, ...]) -> Term | None:
    """What a constant first operand makes of `and`, `or` and `if`: one of the operands, or None."""
    match name:
        case "and":
            return operands[1] if first else operands[0]
        case "or":
            return operands[0] if first else operands[1]
        case "if":
            return operands[1] if first else operands[2]
    return None


# What a policy does: its filters and outcomes in order, with the expressions of `term` in them.
#
# No code is made here (`compiler`) and nothing is checked: a plan is made from a file that the checker accepted.


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

    @property
    def terms(self) -> list[Term]:
        """What it computes, in order: its guards, then its value."""
        return [*(guard.value for guard in self.guards), *(() if self.value is None else (self.value,))]


@dataclass(slots=True)
class Plan:
    """All steps of a policy in order, its picks and its other draws by site.

    Args:
        steps: filters and outcomes.
        picks: the picks.
        keys: for each pick, the name of its cursor if it rotates, of its stream if it draws.
        draws: for each `draw`, `top` and `chance`, the name of its stream.
    """

    steps: tuple[Step, ...]
    picks: tuple[Binding, ...]
    keys: tuple[str, ...]
    draws: tuple[str, ...]

    @property
    def terms(self) -> list[Term]:
        """What all steps compute, in order."""
        return [term for step in self.steps for term in step.terms]

    @property
    def keyed(self) -> bool:
        """Whether it places by a key, and so by the seed where the key is empty."""
        return any(isinstance(part, Keyed) for term in self.terms for part in walk(term))

    @property
    def rotating(self) -> list[str]:
        """The names of the cursors."""
        return [key for key, pick in zip(self.keys, self.picks, strict=True) if pick_of(pick).rotates]

    @property
    def random(self) -> bool:
        """Whether the seed may settle something."""
        return bool(self.draws) or self.keyed or any(not pick_of(pick).rotates for pick in self.picks)


def pick_of(binding: Binding) -> Pick:
    """What *binding*, one of `Plan.picks`, is bound to."""
    assert isinstance(binding.value, Pick)
    return binding.value


# How a decision ends, by the kind of the statement that fired.


class Outcome(enum.Enum):
    """How a decision ends."""

    ROUTE = "route"
    REJECT = "reject"
    #: Not now: the request waits for a change of load, and is decided again.
    HOLD = "hold"
    #: A `keep` left no candidate: 503, named after the filter.
    NOBODY = "nobody"


#: How a decision ends that a statement of this kind made; a `prefer` makes none.
OUTCOMES = {
    StatementKind.ROUTE: Outcome.ROUTE,
    StatementKind.REJECT: Outcome.REJECT,
    StatementKind.HOLD: Outcome.HOLD,
    StatementKind.KEEP: Outcome.NOBODY,
}

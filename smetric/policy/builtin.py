"""The built-in functions: one row each, with everything that checking a call needs to know.

How they are computed is in the compiler; how each family is typed, in `check_call`. A built-in of a family that
exists is one more row.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smetric.policy import interval
from smetric.policy.interval import Interval


class Family(enum.Enum):
    """Built-ins with the same rule for what they take and give."""

    #: One number per instance to a single number of its unit.
    REDUCTION = "reduction"
    #: Truth per instance to a single truth value.
    TEST = "test"
    #: Truth per instance, or nothing, to a plain number.
    COUNT = "count"
    #: One number per instance to a plain one per instance.
    SCALE = "scale"
    #: Numbers of one unit, single or per instance, to the same, element by element.
    ELEMENT = "element"
    #: Two numbers to their quotient, element by element.
    RATIO = "ratio"
    #: One number per instance to an instance.
    PICK = "pick"
    #: Instances to an instance.
    FIRST = "first"
    #: A value per instance, and what is known of it.
    KNOWN = "known"
    AGE = "age"
    FRESH = "fresh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """One function.

    Args:
        name: as policies write it.
        signature: as the manual prints it; *v* number per instance, *m* truth per instance, *x* number of any shape.
        doc: what it gives, one sentence.
        family: the rule of its types.
        least: fewest positional arguments.
        most: most positional arguments, or None for any number.
        named: its named arguments; `then` may be given several times.
        required: the named arguments that must be given always.
        where: whether the first argument may be followed by `where`.
        of_nobody: whether its value over nobody is one; if not, `where` requires `default:`.
        bounds: from the intervals of the positional arguments to that of the result.
    """

    name: str
    signature: str
    doc: str
    family: Family
    least: int = 1
    most: int | None = 1
    named: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    where: bool = False
    of_nobody: bool = True
    bounds: Callable[[Sequence[Interval]], Interval] = interval.hull


def _unit_interval(_: Sequence[Interval]) -> Interval:
    return interval.TRUTH


_ROWS = (
    Builtin(
        name="mean",
        signature="mean(v [where m, default: x])",
        doc="The mean over the candidates.",
        family=Family.REDUCTION,
        named=("default",),
        where=True,
        of_nobody=False,
    ),
    Builtin(
        name="min",
        signature="min(v [where m, default: x])",
        doc="The smallest over the candidates.",
        family=Family.REDUCTION,
        named=("default",),
        where=True,
        of_nobody=False,
    ),
    Builtin(
        name="max",
        signature="max(v [where m, default: x])",
        doc="The largest over the candidates.",
        family=Family.REDUCTION,
        named=("default",),
        where=True,
        of_nobody=False,
    ),
    Builtin(
        name="sum",
        signature="sum(v [where m])",
        doc="The sum over the candidates; 0 of nobody.",
        family=Family.REDUCTION,
        where=True,
        bounds=interval.total,
    ),
    Builtin(
        name="any",
        signature="any(m [where m])",
        doc="Whether it holds for some candidate; false of nobody.",
        family=Family.TEST,
        where=True,
    ),
    Builtin(
        name="all",
        signature="all(m [where m])",
        doc="Whether it holds for every candidate; true of nobody.",
        family=Family.TEST,
        where=True,
    ),
    Builtin(
        name="count",
        signature="count([m [where m]])",
        doc="For how many candidates it holds; without an argument, how many there are.",
        family=Family.COUNT,
        least=0,
        where=True,
    ),
    Builtin(
        name="norm",
        signature="norm(v)",
        doc="Min-max over the candidates, 0..1; 0 where all are equal.",
        family=Family.SCALE,
        bounds=_unit_interval,
    ),
    Builtin(
        name="least",
        signature="least(x, x…)",
        doc="The smallest of its arguments, element by element.",
        family=Family.ELEMENT,
        least=2,
        most=None,
        bounds=interval.least,
    ),
    Builtin(
        name="greatest",
        signature="greatest(x, x…)",
        doc="The largest of its arguments, element by element.",
        family=Family.ELEMENT,
        least=2,
        most=None,
        bounds=interval.greatest,
    ),
    Builtin(
        name="clamp",
        signature="clamp(x, lo, hi)",
        doc="x, but at least lo and at most hi.",
        family=Family.ELEMENT,
        least=3,
        most=3,
        bounds=interval.clamped,
    ),
    Builtin(
        name="abs",
        signature="abs(x)",
        doc="The distance from 0.",
        family=Family.ELEMENT,
        bounds=interval.absolute,
    ),
    Builtin(
        name="ratio",
        signature="ratio(x, y, default: z)",
        doc="x / y, and the default where y is 0 (nearer to 0 than 1e-9).",
        family=Family.RATIO,
        least=2,
        most=2,
        named=("default",),
        required=("default",),
    ),
    Builtin(
        name="argmin",
        signature="argmin(v [where m], then: v…)",
        doc="The instance with the lowest value; ties by `then:`, then one at random.",
        family=Family.PICK,
        named=("then",),
        where=True,
    ),
    Builtin(
        name="argmax",
        signature="argmax(v [where m], then: v…)",
        doc="The instance with the highest value; ties by `then:`, then one at random.",
        family=Family.PICK,
        named=("then",),
        where=True,
    ),
    Builtin(
        name="rr_argmin",
        signature="rr_argmin(v [where m], then: v…)",
        doc="The instance with the lowest value; ties by `then:`, then in rotation.",
        family=Family.PICK,
        named=("then",),
        where=True,
    ),
    Builtin(
        name="rr_argmax",
        signature="rr_argmax(v [where m], then: v…)",
        doc="The instance with the highest value; ties by `then:`, then in rotation.",
        family=Family.PICK,
        named=("then",),
        where=True,
    ),
    Builtin(
        name="first",
        signature="first(pick, pick…)",
        doc="The first that is somebody.",
        family=Family.FIRST,
        least=2,
        most=None,
    ),
    Builtin(
        name="known",
        signature="known(x)",
        doc="Whether every feature it is computed from is known there.",
        family=Family.KNOWN,
    ),
    Builtin(
        name="age",
        signature="age(x)",
        doc="The age of the oldest feature it is computed from; 1e9 seconds where unknown.",
        family=Family.AGE,
    ),
    Builtin(
        name="fresh",
        signature="fresh(x, limit)",
        doc="Short for known(x) and age(x) <= limit.",
        family=Family.FRESH,
        least=2,
        most=2,
    ),
)

#: Every built-in of this version, by name.
BUILTINS: Mapping[str, Builtin] = {row.name: row for row in _ROWS}

#: Built-ins and named arguments of the language that this version does not run; the names are taken.
UNAVAILABLE = frozenset(
    ("quantile", "std", "share", "rank", "softmin", "softmax", "sample", "draw", "top", "hrw", "bucket", "chance")
)
UNAVAILABLE_ARGUMENTS = frozenset(("within", "temperature"))

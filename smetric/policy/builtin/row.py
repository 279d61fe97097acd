"""One row of the table of built-in functions: everything that checking, compiling and printing one needs to know."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smetric.policy import interval
from smetric.policy.interval import Interval


class Family(enum.Enum):
    """Built-ins with the same rule for what they take and give; in brackets the arguments of a row's `function`."""

    #: One number per instance, and what is told besides, to a single number of its unit [values, *more].
    REDUCTION = "reduction"
    #: Truth per instance to a single truth value [values].
    TEST = "test"
    #: Truth per instance, or nothing, to a plain number [values].
    COUNT = "count"
    #: One number per instance to a plain one per instance [values, those of the candidates].
    SCALE = "scale"
    #: Numbers of one unit, single or per instance, to the same, element by element [one value of each, or written out].
    ELEMENT = "element"
    #: Two numbers to their quotient, element by element [written out].
    RATIO = "ratio"
    #: One number per instance to the best instance, ties drawn …
    PICK = "pick"
    #: … or in rotation [both written out].
    ROTATION = "rotation"
    #: One number per instance to an instance drawn by it [values, candidates, ids, seed, stream, *named].
    LOTTERY = "lottery"
    #: Instances to an instance [written out].
    FIRST = "first"
    #: A number to that many of the candidates [candidates, number, ids, seed, stream].
    DRAW = "draw"
    #: One number per instance, and a number, to that many of the best [written out].
    TOP = "top"
    #: A share to a truth value [share, seed, stream].
    CHANCE = "chance"
    #: A string to a plain number: per instance [string, ids, seed] …
    WEIGHT = "weight"
    #: … or single [string, seed].
    PLACE = "place"
    #: A value per instance, and what is known of it [snapshot, features].
    KNOWN = "known"
    AGE = "age"
    #: … and whether it is known and young enough [written out].
    FRESH = "fresh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """One function.

    Args:
        name: as policies write it.
        signature: as the manual prints it; *v* number per instance, *m* truth per instance, *x* number of any shape,
            *n* a single plain number.
        doc: what it gives, one sentence.
        family: the rule of its types.
        function: what compiled policies call; None for those that are written out.
        least: fewest positional arguments.
        most: most positional arguments, or None for any number.
        named: its named arguments; `then` may be given several times.
        required: the named arguments that must be given always.
        where: whether the first argument may be followed by `where`.
        of_nobody: whether its value over nobody is one; if not, `where` requires `default:`.
        never_negative: whether what it takes must not be below 0.
        ordered: whether its last two arguments are bounds, the lower one first.
        weighs: whether it takes shares by value, so that one above 0 is needed.
        direction: of a pick, `min` or `max`: whether a low or a high value wins.
        bounds: from the intervals of the positional arguments to that of the result.
    """

    name: str
    signature: str
    doc: str
    family: Family
    function: Callable[..., Any] | None = None
    least: int = 1
    most: int | None = 1
    named: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    where: bool = False
    of_nobody: bool = True
    never_negative: bool = False
    ordered: bool = False
    weighs: bool = False
    direction: str = ""
    bounds: Callable[[Sequence[Interval]], Interval] = interval.hull


def unit_interval(_: Sequence[Interval]) -> Interval:
    """0..1, whatever is put in."""
    return interval.TRUTH

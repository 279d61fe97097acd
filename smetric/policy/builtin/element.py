"""Built-ins that work element by element: numbers of one unit to a number, single or per instance."""

from __future__ import annotations

from smetric.policy import interval
from smetric.policy.builtin.row import Builtin, Family

ROWS = (
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
        ordered=True,
        bounds=interval.clamped,
    ),
    Builtin(
        name="abs",
        signature="abs(x)",
        doc="The distance from 0.",
        family=Family.ELEMENT,
        function=abs,
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
)

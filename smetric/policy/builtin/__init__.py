"""The built-in functions: one row each, its function beside it. A built-in of a family that exists is one more row.

How each family is typed is in `check_family`, how it is compiled in `emitter` and `picker`.
"""

from collections.abc import Mapping

from smetric.policy.builtin import element, knowledge, mask, pick, reduction, scale
from smetric.policy.builtin.row import Builtin, Family

__all__ = ["BUILTINS", "Builtin", "Family"]

#: Every built-in, by name.
BUILTINS: Mapping[str, Builtin] = {
    row.name: row for part in (reduction, scale, element, pick, mask, knowledge) for row in part.ROWS
}

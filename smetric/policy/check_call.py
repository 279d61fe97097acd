"""What a call of a built-in may contain, by its row in `builtin`: arguments, names, `where`.

What it gives, by its family, is in `check_family`.
"""

from __future__ import annotations

from collections.abc import Mapping

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS, Builtin
from smetric.policy.check_argument import Bad, Given
from smetric.policy.check_family import Families, Infers
from smetric.policy.findings import Findings
from smetric.policy.interval import TRUE
from smetric.policy.suggestion import comparison, did_you_mean
from smetric.policy.types import BROKEN, Sort, Type

#: Reductions that other languages call with several values, too.
_OF_SEVERAL = {
    "max": "of two values it is greatest(x, y); ",
    "min": "of two values it is least(x, y); ",
}


class Calls:
    """Types calls of built-ins and reports what is wrong with them."""

    def __init__(self, expressions: Infers, findings: Findings) -> None:
        self._expressions = expressions
        self._findings = findings
        self._families = Families(expressions)

    def infer(self, call: tree.Call, builtin: Builtin, arguments: Mapping[str, Type]) -> Type:
        """The type of *call*, a call of *builtin*."""
        typed = [(argument, self._expressions.infer(argument.value, arguments)) for argument in call.arguments]
        masks = [
            (argument.where, self._expressions.infer(argument.where, arguments))
            for argument in call.arguments
            if argument.where is not None
        ]
        try:
            self._check_shape(call, builtin)
            if any(found.broken for _, found in (*typed, *masks)):
                return BROKEN
            for where, mask in masks:
                if mask.sort is not Sort.BOOL or not mask.vector:
                    message = f"`where` needs a truth value per instance, found {mask}"
                    raise Bad("where", where.span, message, comparison(mask.sort))
                if mask.decided:
                    whom = "everybody" if mask.interval == TRUE else "nobody"
                    self._expressions.same(where.span, mask, f"this `where` takes {whom} in every decision")
            plain = [pair for pair in typed if not pair[0].name]
            named = [pair for pair in typed if pair[0].name]
            return self._families.typed(Given(call, builtin, plain, named, masks[0][1] if masks else None))
        except Bad as bad:
            self._findings.error(*bad.found)
            return BROKEN

    def _check_shape(self, call: tree.Call, builtin: Builtin) -> None:
        name = builtin.name
        given = [argument for argument in call.arguments if not argument.name]
        for place, argument in enumerate(call.arguments):
            if argument.where is not None and (place > 0 or not builtin.where):
                message = (
                    f"`{name}` does not take `where`" if not builtin.where else "`where` follows the first argument"
                )
                help_text = "restrict the pick or the reduction instead: argmin(norm(…) where …)"
                raise Bad("where", argument.span, message, "" if builtin.where else help_text)
        seen: set[str] = set()
        for argument in call.arguments:
            if not argument.name:
                continue
            span = argument.name_span or argument.span
            if argument.name not in builtin.named:
                help_text = did_you_mean(argument.name, builtin.named) or _whose(argument.name) + builtin.signature
                raise Bad("arguments", span, f"`{name}` has no `{argument.name}:`", help_text)
            if argument.name in seen and argument.name != "then":
                raise Bad("arguments", span, f"`{argument.name}:` is given twice")
            seen.add(argument.name)
        if len(given) < builtin.least or (builtin.most is not None and len(given) > builtin.most):
            message = f"`{name}` takes {_amount(builtin)}, not {len(given)}"
            of_several = _OF_SEVERAL.get(name, "") if given else ""
            raise Bad("arguments", call.span, message, of_several + builtin.signature)
        for required in builtin.required:
            if required not in seen:
                help_text = "say what it is where the divisor is 0: " if required == "default" else "write it as "
                message = f"`{name}` needs `{required}:`"
                raise Bad("arguments", call.span, message, help_text + builtin.signature)


def _whose(name: str) -> str:
    """Which picks an argument called *name* belongs to, before the signature of one that does not take it."""
    owners = [row.name for row in BUILTINS.values() if row.direction and name in row.named]
    return f"`{name}:` is of {', '.join(owners)}; " if owners else ""


def _amount(builtin: Builtin) -> str:
    """How many arguments a built-in takes, in words."""
    least, most = builtin.least, builtin.most
    if most is None:
        return f"at least {least} arguments"
    if least != most:
        return f"{least} or {most} arguments"
    return f"{least} argument" if least == 1 else f"{least} arguments"

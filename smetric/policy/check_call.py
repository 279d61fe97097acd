"""The type of a call of a built-in, by its row in `builtin`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from smetric.policy import tree
from smetric.policy.builtin import UNAVAILABLE_ARGUMENTS, Builtin, Family
from smetric.policy.check_unit import Units, describe
from smetric.policy.findings import Findings
from smetric.policy.interval import COUNT, COUNT_ALL, TRUTH, Interval, hull, ratio
from smetric.policy.suggestion import did_you_mean
from smetric.policy.types import BROKEN, Sort, Type
from smetric.policy.unit import PLAIN, SECONDS
from smetric.policy.vocabulary import NEVER


class Infers(Protocol):
    """What types the arguments: the rest of the checker."""

    units: Units

    def infer(self, expr: tree.Expr, arguments: Mapping[str, Type]) -> Type:
        """The type of an expression."""


class _Bad(Exception):
    """The call has no type."""


class Calls:
    """Types calls of built-ins and reports what is wrong with them."""

    def __init__(self, expressions: Infers, findings: Findings) -> None:
        self._expressions = expressions
        self._findings = findings

    def infer(self, call: tree.Call, builtin: Builtin, arguments: Mapping[str, Type]) -> Type:
        """The type of *call*, a call of *builtin*."""
        typed = [(argument, self._expressions.infer(argument.value, arguments)) for argument in call.arguments]
        masks = {
            id(argument): self._expressions.infer(argument.where, arguments)
            for argument in call.arguments
            if argument.where is not None
        }
        try:
            self._check_shape(call, builtin)
            if any(found.broken for _, found in typed) or any(mask.broken for mask in masks.values()):
                return BROKEN
            plain = [pair for pair in typed if not pair[0].name]
            named = [pair for pair in typed if pair[0].name]
            mask = self._mask(plain, masks)
            return self._typed(call, builtin, plain, named, mask)
        except _Bad:
            return BROKEN

    def _fail(self, code: str, span: tree.Span, message: str, help_text: str = "") -> _Bad:
        self._findings.error(code, span, message, help_text)
        return _Bad()

    # ── what a call may contain ──

    def _check_shape(self, call: tree.Call, builtin: Builtin) -> None:
        name = builtin.name
        given = [argument for argument in call.arguments if not argument.name]
        for place, argument in enumerate(call.arguments):
            if argument.where is not None and (place > 0 or not builtin.where):
                message = (
                    f"`{name}` does not take `where`" if not builtin.where else "`where` follows the first argument"
                )
                help_text = "restrict the pick or the reduction instead: argmin(norm(…) where …)"
                raise self._fail("where", argument.span, message, "" if builtin.where else help_text)
        seen: set[str] = set()
        for argument in call.arguments:
            if not argument.name:
                continue
            span = argument.name_span or argument.span
            if argument.name in UNAVAILABLE_ARGUMENTS and argument.name not in builtin.named:
                raise self._fail("unavailable", span, f"`{argument.name}:` is not available in this version")
            if argument.name not in builtin.named:
                help_text = did_you_mean(argument.name, builtin.named)
                raise self._fail("arguments", span, f"`{name}` has no `{argument.name}:`", help_text)
            if argument.name in seen and argument.name != "then":
                raise self._fail("arguments", span, f"`{argument.name}:` is given twice")
            seen.add(argument.name)
        if len(given) < builtin.least or (builtin.most is not None and len(given) > builtin.most):
            message = f"`{name}` takes {_amount(builtin)}, not {len(given)}"
            raise self._fail("arguments", call.span, message, builtin.signature)
        for required in builtin.required:
            if required not in seen:
                help_text = f"say what it is where the divisor is 0: {builtin.signature}"
                raise self._fail("arguments", call.span, f"`{name}` needs `{required}:`", help_text)

    def _mask(
        self, plain: Sequence[tuple[tree.Argument, Type]], masks: Mapping[int, Type]
    ) -> Type | None:  # fmt: skip
        for argument, _ in plain:
            if argument.where is None:
                continue
            mask = masks[id(argument)]
            if mask.sort is not Sort.BOOL or not mask.vector:
                message = f"`where` needs a truth value per instance, found {mask}"
                raise self._fail("where", argument.where.span, message)
            return mask
        return None

    # ── families ──

    def _typed(
        self,
        call: tree.Call,
        builtin: Builtin,
        plain: Sequence[tuple[tree.Argument, Type]],
        named: Sequence[tuple[tree.Argument, Type]],
        mask: Type | None,
    ) -> Type:
        types = [found for _, found in plain]
        read = types if mask is None else [*types, mask]
        match builtin.family:
            case Family.REDUCTION:
                return self._reduction(call, builtin, plain[0], named, mask)
            case Family.TEST | Family.COUNT:
                if plain:
                    self._need(builtin, plain[0], Sort.BOOL, vector=True)
                if builtin.family is Family.TEST:
                    return Type(Sort.BOOL).reading(*read)
                return Type(Sort.NUMBER, interval=COUNT if plain else COUNT_ALL).reading(*read)
            case Family.SCALE:
                self._need(builtin, plain[0], Sort.NUMBER, vector=True)
                return Type(Sort.NUMBER, True, PLAIN, builtin.bounds([types[0].interval])).reading(*read)
            case Family.ELEMENT:
                return self._element(call, builtin, plain)
            case Family.RATIO:
                return self._ratio(call, builtin, plain, named[0])
            case Family.PICK:
                for argument, found in (*plain, *named):
                    self._need(builtin, (argument, found), Sort.NUMBER)
                return Type(Sort.INSTANCE, maybe=mask is not None).reading(*read).perhaps(*(t for _, t in named))
            case Family.FIRST:
                for pair in plain:
                    self._need(builtin, pair, Sort.INSTANCE)
                made = Type(Sort.INSTANCE, maybe=all(found.maybe for found in types))
                return made.reading(types[0]).perhaps(*types)
            case Family.KNOWN | Family.AGE | Family.FRESH:
                return self._knowledge(builtin, plain)
        raise AssertionError(f"no such family: {builtin.family}")

    def _need(self, builtin: Builtin, pair: tuple[tree.Argument, Type], sort: Sort, *, vector: bool = False) -> None:
        argument, found = pair
        if found.sort is sort and (found.vector or not vector):
            return
        words = {Sort.NUMBER: "a number", Sort.BOOL: "a truth value", Sort.INSTANCE: "an instance"}
        wanted = f"{words[sort]} per instance" if vector else words[sort]
        help_text = ""
        if sort is Sort.INSTANCE:
            help_text = "e.g. first(argmin(x where m), argmin(x))"
        elif found.sort is sort:
            help_text = "it is one value already"
        raise self._fail("arguments", argument.value.span, f"`{builtin.name}` needs {wanted}, found {found}", help_text)

    def _reduction(
        self,
        call: tree.Call,
        builtin: Builtin,
        value: tuple[tree.Argument, Type],
        named: Sequence[tuple[tree.Argument, Type]],
        mask: Type | None,
    ) -> Type:
        self._need(builtin, value, Sort.NUMBER, vector=True)
        found = value[1]
        if mask is None:
            for argument, _ in named:
                message = "`default:` is for `where`: without it there is always somebody"
                raise self._fail("arguments", argument.span, message)
            return Type(Sort.NUMBER, unit=found.unit, interval=builtin.bounds([found.interval])).reading(found)
        if not named and not builtin.of_nobody:
            message = f"`where` may leave nobody, and `{builtin.name}` of nobody is not a number"
            help_text = f"say what it is then: {builtin.name}(… where …, default: 0)"
            raise self._fail("nobody", call.span, message, help_text)
        made = Type(Sort.NUMBER, unit=found.unit, interval=builtin.bounds([found.interval])).reading(found, mask)
        for argument, default in named:
            if default.vector:
                message = f"`default:` is one number, not {default}"
                raise self._fail("arguments", argument.value.span, message)
            made = self._with_default(made, argument, default)
        return made

    def _with_default(self, made: Type, argument: tree.Argument, default: Type) -> Type:
        if default.sort is not Sort.NUMBER:
            raise self._fail("arguments", argument.value.span, f"`default:` is a number, not {default}")
        if not self._expressions.units.agree(made, default):
            message = f"`default:` has the unit of the result, {describe(made)}, not {describe(default)}"
            raise self._fail("units", argument.value.span, message)
        unit = made.unit if made.unit is not None else default.unit
        wide = replace(made, unit=unit, vector=made.vector or default.vector)
        return replace(wide, interval=hull([made.interval, default.interval])).perhaps(default)

    def _element(self, call: tree.Call, builtin: Builtin, plain: Sequence[tuple[tree.Argument, Type]]) -> Type:
        for pair in plain:
            self._need(builtin, pair, Sort.NUMBER)
        types = [found for _, found in plain]
        if not self._expressions.units.agree(*types):
            units = list(dict.fromkeys(describe(found) for found in types if found.unit is not None))
            message = f"`{builtin.name}` takes values of one unit, not {' and '.join(units)}"
            raise self._fail("units", call.span, message)
        unit = next((found.unit for found in types if found.unit is not None), None)
        interval = builtin.bounds([found.interval for found in types])
        return Type(Sort.NUMBER, any(found.vector for found in types), unit, interval).reading(*types)

    def _ratio(
        self,
        call: tree.Call,
        builtin: Builtin,
        plain: Sequence[tuple[tree.Argument, Type]],
        default: tuple[tree.Argument, Type],
    ) -> Type:
        for pair in plain:
            self._need(builtin, pair, Sort.NUMBER)
        above, below = (found for _, found in plain)
        both = above.unit is None and below.unit is None
        unit = None if both else (above.unit or PLAIN) / (below.unit or PLAIN)
        interval = ratio(above.interval, below.interval)
        if not interval.bounded:
            raise self._fail("overflow", call.span, "this may grow past 1e300", "bound its parts with clamp(…)")
        made = Type(Sort.NUMBER, above.vector or below.vector, unit, interval).reading(above, below)
        return self._with_default(made, *default)

    def _knowledge(self, builtin: Builtin, plain: Sequence[tuple[tree.Argument, Type]]) -> Type:
        argument, found = plain[0]
        if not found.vector:
            message = f"`{builtin.name}` asks about a value per instance, found {found}"
            raise self._fail("arguments", argument.value.span, message)
        types = [each for _, each in plain]
        if builtin.family is Family.AGE:
            return Type(Sort.NUMBER, True, SECONDS, Interval(0.0, NEVER)).reading(*types)
        if builtin.family is Family.FRESH and self._expressions.units.duration(types[1], plain[1][0].value.span).broken:
            raise _Bad
        return Type(Sort.BOOL, True, interval=TRUTH).reading(*types)


def _amount(builtin: Builtin) -> str:
    """How many arguments a built-in takes, in words."""
    least, most = builtin.least, builtin.most
    if most is None:
        return f"at least {least} arguments"
    if least != most:
        return f"{least} or {most} arguments"
    return f"{least} argument" if least == 1 else f"{least} arguments"

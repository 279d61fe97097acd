"""Types of calls of built-ins: the shape of a call, its arguments, and its result by family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS, Builtin, Family
from smetric.policy.diagnostic import Span
from smetric.policy.scope import Findings, Units, describe
from smetric.policy.types import (
    BROKEN,
    COUNT,
    COUNT_ALL,
    FALSE,
    PLAIN,
    SECONDS,
    SMALLEST_DIVISOR,
    TRUE,
    TRUTH,
    ZERO,
    Interval,
    Sort,
    Type,
    absolute,
    comparison,
    did_you_mean,
    exact,
    hull,
    ratio,
)
from smetric.policy.vocabulary import NEVER

if TYPE_CHECKING:
    from smetric.policy.check_expression import Expressions

Pair = tuple[tree.Argument, Type]

_WORDS = {
    Sort.NUMBER: "a number",
    Sort.BOOL: "a truth value",
    Sort.STRING: "a string",
    Sort.INSTANCE: "an instance",
}


class Bad(Exception):
    """Error in a call; `found` holds the arguments of `Findings.error`."""

    def __init__(self, code: str, span: Span, message: str, help_text: str = "") -> None:
        super().__init__(message)
        self.found = code, span, message, help_text


@dataclass(frozen=True, slots=True)
class Given:
    """Call of the right shape: positional and named arguments with their types, and the type of `where`."""

    call: tree.CallExpr
    builtin: Builtin
    plain: Sequence[Pair]
    named: Sequence[Pair]
    mask: Type | None

    @property
    def types(self) -> list[Type]:
        """Types of the values that are always read."""
        return [*(found for _, found in self.plain), *(() if self.mask is None else (self.mask,))]

    def among(self, made: Type, values: Sequence[Type], options: Sequence[Type]) -> Type:
        """Return *made* as computed from *values*, and from *options* if `where` leaves a candidate."""
        if self.mask is None:
            return made.reading(*values, *options)
        return made.reading(*values, self.mask).perhaps(*options)

    def other(self, *names: str) -> list[Pair]:
        """Return the named arguments with one of *names*."""
        return [pair for pair in self.named if pair[0].name in names]


def need(given: Given, pair: Pair, sort: Sort, *, vector: bool | None = None) -> None:
    """Require an argument of *sort*; one per instance or a single one, unless *vector* is None."""
    argument, found = pair
    if found.sort is sort and vector in (None, found.vector):
        return
    wanted = _WORDS[sort] + {True: " per instance", False: "", None: ""}[vector]
    help_text = ""
    if sort is Sort.INSTANCE:
        help_text = "e.g. first(argmin(x where m), argmin(x))"
    elif sort is Sort.BOOL and found.sort is not sort:
        help_text = comparison(found.sort)
    elif sort is Sort.NUMBER and found.sort is Sort.BOOL:
        help_text = "count(…) gives the number of candidates for which it holds"
    elif found.sort is sort:
        reduced = "make one of it, e.g. mean(…), or look one up: v[s]" if sort is Sort.NUMBER else "look one up: v[s]"
        help_text = "it is one value already" if vector else reduced
    where = f"`{argument.name}:` of " if argument.name else ""
    message = f"{where}`{given.builtin.name}` needs {wanted}, found {found}"
    raise Bad("arguments", argument.value.span, message, help_text)


def need_plain(given: Given, pair: Pair) -> None:
    """Require one number without a unit."""
    need(given, pair, Sort.NUMBER, vector=False)
    argument, found = pair
    if found.unit is not None and not found.unit.plain:
        message = f"`{given.builtin.name}` needs a plain number, found {found}"
        help_text = f"remove its unit: … {(PLAIN / found.unit).as_literals}"
        raise Bad("units", argument.value.span, message, help_text)


def need_share(given: Given, pair: Pair) -> None:
    """Require one plain number in 0..1."""
    need_plain(given, pair)
    argument, found = pair
    if found.interval.low < 0 or found.interval.high > 1:
        message = f"`{given.builtin.name}` needs a share in 0..1, and this {found.interval.place}"
        help_text = "bound it with clamp(…, 0, 1), or a parameter with `in 0..1`"
        if found.interval.low == found.interval.high and 1 < found.interval.high <= 100:
            help_text = f"write {exact(found.interval.high / 100)} for {exact(found.interval.high)} %"
        raise Bad("range", argument.value.span, message, help_text)


def need_never_negative(pair: Pair, what: str) -> None:
    """Require a number that is never below 0; *what* names it."""
    argument, found = pair
    if found.interval.low < 0:
        raise Bad("range", argument.value.span, f"{what} may be below 0", "keep it at 0 or above: greatest(…, 0)")


def need_amount(given: Given, pair: Pair) -> None:
    """Require an amount of instances: it can be 1 or more, and is no constant with a fraction."""
    argument, found = pair
    low, high = found.interval.low, found.interval.high
    if high < 1 or (low == high and low % 1):
        message = f"`{given.builtin.name}` takes 1, 2, 3, … of the instances, and this {found.interval.place}"
        raise Bad("range", argument.value.span, message, "write a whole number, 1 at least")


def need_like_score(units: Units, given: Given, pair: Pair, what: str, help_text: str) -> None:
    """Require one number, never below 0, in the unit of the score."""
    need(given, pair, Sort.NUMBER, vector=False)
    argument, found = pair
    score = given.plain[0][1]
    if score.sort is Sort.NUMBER and not units.agree(score, found):
        message = f"{what} has the unit of the score, {describe(score)}, not {describe(found)}"
        named = units.unit_of_name(argument.value, found, score)
        raise Bad("units", argument.value.span, message, named or help_text)
    need_never_negative(pair, what)


#: Reductions that other languages also call with several values.
_OF_SEVERAL = {
    "max": "for two values write greatest(x, y); ",
    "min": "for two values write least(x, y); ",
}


class Calls:
    """Types of calls of built-ins, and the errors in them."""

    def __init__(self, expressions: Expressions, findings: Findings) -> None:
        self._expressions = expressions
        self._findings = findings

    def infer(self, call: tree.CallExpr, builtin: Builtin, arguments: Mapping[str, Type]) -> Type:
        """Return the type of *call*, a call of *builtin*."""
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
                    kept = "every" if mask.interval == TRUE else "no"
                    self._expressions.same(where.span, mask, f"this `where` keeps {kept} candidate in every decision")
            plain = [pair for pair in typed if not pair[0].name]
            named = [pair for pair in typed if pair[0].name]
            return self._typed(Given(call, builtin, plain, named, masks[0][1] if masks else None))
        except Bad as bad:
            return self._findings.error(*bad.found)

    def _check_shape(self, call: tree.CallExpr, builtin: Builtin) -> None:
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
        least, most = builtin.positional
        if len(given) < least or (most is not None and len(given) > most):
            message = f"`{name}` takes {_amount(builtin)}, not {len(given)}"
            of_several = _OF_SEVERAL.get(name, "") if given else ""
            raise Bad("arguments", call.span, message, of_several + builtin.signature)
        for required in builtin.required:
            if required not in seen:
                help_text = "give the value for a divisor of 0: " if required == "default" else "write it as "
                message = f"`{name}` needs `{required}:`"
                raise Bad("arguments", call.span, message, help_text + builtin.signature)

    # ── by family ──

    def _typed(self, given: Given) -> Type:
        """Return the type of a call.

        Raises:
            Bad: an argument does not fit.
        """
        plain = given.plain
        match given.builtin.family:
            case Family.REDUCTION:
                return self._reduction(given)
            case Family.TEST | Family.COUNT:
                if plain:
                    need(given, plain[0], Sort.BOOL, vector=True)
                if given.builtin.family is Family.TEST:
                    return Type(Sort.BOOL).reading(*given.types)
                return Type(Sort.NUMBER, interval=COUNT if plain else COUNT_ALL).reading(*given.types)
            case Family.SCALE:
                return self._scale(given)
            case Family.ELEMENT:
                return self._element(given)
            case Family.RATIO:
                return self._ratio(given)
            case Family.PICK | Family.ROTATION | Family.LOTTERY:
                return self._pick(given)
            case Family.FIRST:
                for pair in plain:
                    need(given, pair, Sort.INSTANCE)
                sure = next((pair for pair in plain[:-1] if not pair[1].maybe), None)
                if sure is not None:
                    self._expressions.same(sure[0].span, sure[1], "`first` always takes this, which is never absent")
                maybe = all(found.maybe for found in given.types)
                return Type(Sort.INSTANCE, maybe=maybe).reading(given.types[0]).perhaps(*given.types)
            case Family.DRAW | Family.TOP:
                return self._some(given)
            case Family.CHANCE:
                need_share(given, plain[0])
                likely = plain[0][1].interval
                verdict = FALSE if likely.high == 0 else TRUE if likely.low == 1 else TRUTH
                return Type(Sort.BOOL, interval=verdict).reading(*given.types)
            case Family.WEIGHT | Family.PLACE:
                need(given, plain[0], Sort.STRING, vector=False)
                key = plain[0][0].value
                if given.builtin.family is Family.PLACE and isinstance(key, tree.Text) and key.value:
                    self._expressions.same(key.span, plain[0][1], "this key is the same for every request")
                made = Type(Sort.NUMBER, given.builtin.family is Family.WEIGHT, PLAIN, TRUTH)
                return made.reading(*given.types)
            case Family.KNOWN | Family.AGE | Family.FRESH:
                return self._knowledge(given)

    def _reduction(self, given: Given) -> Type:
        builtin = given.builtin
        need(given, given.plain[0], Sort.NUMBER, vector=True)
        for pair in given.plain[1:]:
            need_share(given, pair)
        found = given.plain[0][1]
        made = Type(Sort.NUMBER, unit=found.unit, interval=builtin.bounds([found.interval]))
        made = given.among(made, [found], [more for _, more in given.plain[1:]])
        if given.mask is None:
            for argument, _ in given.named:
                message = "`default:` goes with `where`: without it there is always a candidate"
                raise Bad("arguments", argument.span, message)
            return made
        if not given.named and not builtin.total:
            message = f"`where` may leave no candidate, and `{builtin.name}` of none is not a number"
            help_text = f"give the value for that case: {builtin.name}(… where …, default: 0)"
            raise Bad("nobody", given.call.span, message, help_text)
        for argument, default in given.named:
            if default.vector:
                message = f"`default:` is one number, not {default}"
                raise Bad("arguments", argument.value.span, message)
            made = self._with_default(made, argument, default)
        return made

    def _with_default(self, made: Type, argument: tree.Argument, default: Type) -> Type:
        if default.sort is not Sort.NUMBER:
            raise Bad("arguments", argument.value.span, f"`default:` is a number, not {default}")
        if not self._expressions.units.agree(made, default):
            message = f"`default:` has the unit of the result, {describe(made)}, not {describe(default)}"
            help_text = self._expressions.units.unit_of_name(argument.value, default, made)
            raise Bad("units", argument.value.span, message, help_text)
        unit = made.unit if made.unit is not None else default.unit
        wide = replace(made, unit=unit, vector=made.vector or default.vector)
        return replace(wide, interval=hull([made.interval, default.interval])).perhaps(default)

    def _scale(self, given: Given) -> Type:
        need(given, given.plain[0], Sort.NUMBER, vector=True)
        if given.builtin.never_negative:
            need_never_negative(given.plain[0], f"the argument of `{given.builtin.name}`")
        bounds = given.builtin.bounds([given.plain[0][1].interval])
        return Type(Sort.NUMBER, True, PLAIN, bounds).reading(*given.types)

    def _element(self, given: Given) -> Type:
        builtin, types = given.builtin, given.types
        for pair in given.plain:
            need(given, pair, Sort.NUMBER)
        if not self._expressions.units.agree(*types):
            units = list(dict.fromkeys(describe(found) for found in types if found.unit is not None))
            message = f"`{builtin.name}` takes values of one unit, not {' and '.join(units)}"
            other = next(found for found in types if found.unit is not None and not found.unit.plain)
            names = (self._expressions.units.unit_of_name(each.value, found, other) for each, found in given.plain)
            raise Bad("units", given.call.span, message, next(filter(None, names), ""))
        unit = next((found.unit for found in types if found.unit is not None), None)
        intervals = [found.interval for found in types]
        if builtin.ordered and intervals[-2].low > intervals[-1].high:
            message = f"the lower bound of `{builtin.name}` is always above the upper one"
            raise Bad("range", given.call.span, message, f"write the smaller one first: {builtin.signature}")
        interval = builtin.bounds(intervals)
        return Type(Sort.NUMBER, any(found.vector for found in types), unit, interval).reading(*types)

    def _ratio(self, given: Given) -> Type:
        for pair in given.plain:
            need(given, pair, Sort.NUMBER)
        above, below = given.types
        both = above.unit is None and below.unit is None
        unit = None if both else (above.unit or PLAIN) / (below.unit or PLAIN)
        if below.interval == ZERO and not below.may:
            raise Bad("divisor", given.plain[1][0].value.span, "this divisor is always 0", "write only the default")
        interval = ratio(above.interval, below.interval)
        made = Type(Sort.NUMBER, above.vector or below.vector, unit, interval).reading(above, below)
        default = given.named[0][1]
        if not below.vector and absolute([below.interval]).low < SMALLEST_DIVISOR:
            # One divisor for all: if it counts as 0, the dividend is not read.
            made = replace(made, must=below.must | (above.must & default.must))
        return self._with_default(made, *given.named[0])

    def _pick(self, given: Given) -> Type:
        score = given.plain[0]
        if not (given.builtin.family is Family.LOTTERY and not given.named and score[1].sort is Sort.BOOL):
            need(given, score, Sort.NUMBER)
        if given.builtin.weighs and score[1].sort is Sort.NUMBER and score[1].vector and score[1].interval.high <= 0:
            self._expressions.same(
                score[0].value.span, score[1], "this is never above 0, so all candidates have the same odds"
            )
        for pair in given.other("then"):
            need(given, pair, Sort.NUMBER)
        for pair in given.other("temperature"):
            need_like_score(self._expressions.units, given, pair, "the temperature", "for a scale-free one use norm(v)")
        for pair in given.other("within"):
            need_like_score(self._expressions.units, given, pair, "`within:`", "")
        # A single number is a tie of all: neither it nor the options are read.
        pairs = [score, *given.other("temperature", "within")] if score[1].vector else []
        read = [found for _, found in pairs]
        made = given.among(Type(Sort.INSTANCE, maybe=given.mask is not None), read[:1], read[1:])
        return made.perhaps(*(found for _, found in given.other("then")))

    def _some(self, given: Given) -> Type:
        *scores, amount = given.plain
        for pair in scores:
            need(given, pair, Sort.NUMBER, vector=True)
        need_plain(given, amount)
        need_amount(given, amount)
        for pair in given.named:
            need(given, pair, Sort.NUMBER)
        return Type(Sort.BOOL, True).reading(*given.types).perhaps(*(found for _, found in given.named))

    def _knowledge(self, given: Given) -> Type:
        argument, found = given.plain[0]
        builtin = given.builtin
        if not found.vector:
            message = f"`{builtin.name}` asks about a value per instance, found {found}"
            help_text = "a guard that reads an unknown field of the request fails" if found.must else ""
            raise Bad("arguments", argument.value.span, message, help_text)
        if builtin.family is Family.AGE:
            return Type(Sort.NUMBER, True, SECONDS, Interval(0.0, NEVER)).reading(*given.types)
        if builtin.family is Family.FRESH:
            limit, young = given.plain[1]
            if self._expressions.units.duration(young, limit.value.span).broken:
                return BROKEN
        return Type(Sort.BOOL, True, interval=TRUTH).reading(*given.types)


def _whose(name: str) -> str:
    """Return the picks that have an argument *name*, as the start of a help text."""
    owners = [row.name for row in BUILTINS.values() if row.direction and name in row.named]
    return f"`{name}:` belongs to {', '.join(owners)}; " if owners else ""


def _amount(builtin: Builtin) -> str:
    """Return the number of arguments that a built-in takes, in words."""
    least, most = builtin.positional
    if most is None:
        return f"at least {least} arguments"
    if least != most:
        return f"{least} or {most} arguments"
    return f"{least} argument" if least == 1 else f"{least} arguments"

"""The type of a call of a built-in, by its family: what it takes, what it gives, its unit and its interval.

What one argument must be is in `check_argument`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from smetric.policy import tree
from smetric.policy.builtin import Family
from smetric.policy.check_argument import (
    Bad,
    Given,
    need,
    need_amount,
    need_like_score,
    need_never_negative,
    need_plain,
    need_share,
)
from smetric.policy.check_unit import Units, describe
from smetric.policy.interval import (
    COUNT,
    COUNT_ALL,
    FALSE,
    SMALLEST_DIVISOR,
    TRUE,
    TRUTH,
    ZERO,
    Interval,
    absolute,
    hull,
    ratio,
)
from smetric.policy.span import Span
from smetric.policy.types import BROKEN, Sort, Type
from smetric.policy.unit import PLAIN, SECONDS
from smetric.policy.vocabulary import NEVER


class Infers(Protocol):
    """What types the arguments: the rest of the checker."""

    units: Units

    def infer(self, expr: tree.Expr, arguments: Mapping[str, Type]) -> Type:
        """The type of an expression."""

    def same(self, span: Span, found: Type, message: str) -> None:
        """Keep in mind, for a warning, what is the same in every decision."""


class Families:
    """Types calls family by family."""

    def __init__(self, expressions: Infers) -> None:
        self._expressions = expressions

    def typed(self, given: Given) -> Type:
        """The type of a call.

        Raises:
            Bad: it has none.
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
                message = "`default:` is for `where`: without it there is always somebody"
                raise Bad("arguments", argument.span, message)
            return made
        if not given.named and not builtin.of_nobody:
            message = f"`where` may leave nobody, and `{builtin.name}` of nobody is not a number"
            help_text = f"say what it is then: {builtin.name}(… where …, default: 0)"
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
            need_never_negative(given.plain[0], f"what `{given.builtin.name}` divides")
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
            raise Bad("divisor", given.plain[1][0].value.span, "this divisor is always 0", "write the default alone")
        interval = ratio(above.interval, below.interval)
        made = Type(Sort.NUMBER, above.vector or below.vector, unit, interval).reading(above, below)
        default = given.named[0][1]
        if not below.vector and absolute([below.interval]).low < SMALLEST_DIVISOR:
            # One divisor for all: where it is taken for 0 the dividend is not looked at.
            made = replace(made, must=below.must | (above.must & default.must))
        return self._with_default(made, *given.named[0])

    def _pick(self, given: Given) -> Type:
        score = given.plain[0]
        if not (given.builtin.family is Family.LOTTERY and not given.named and score[1].sort is Sort.BOOL):
            need(given, score, Sort.NUMBER)
        if given.builtin.weighs and score[1].sort is Sort.NUMBER and score[1].vector and score[1].interval.high <= 0:
            self._expressions.same(score[0].value.span, score[1], "this is never above 0, so all are alike")
        for pair in given.other("then"):
            need(given, pair, Sort.NUMBER)
        for pair in given.other("temperature"):
            need_like_score(self._expressions.units, given, pair, "the temperature", "for a scale-free one use norm(v)")
        for pair in given.other("within"):
            need_like_score(self._expressions.units, given, pair, "`within:`", "")
        # Of one number all tie: neither it nor what is told besides is looked at.
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
            help_text = "a guard that reads an unknown number of the request fails" if found.must else ""
            raise Bad("arguments", argument.value.span, message, help_text)
        if builtin.family is Family.AGE:
            return Type(Sort.NUMBER, True, SECONDS, Interval(0.0, NEVER)).reading(*given.types)
        if builtin.family is Family.FRESH:
            limit, young = given.plain[1]
            if self._expressions.units.duration(young, limit.value.span).broken:
                return BROKEN
        return Type(Sort.BOOL, True, interval=TRUTH).reading(*given.types)

"""The type of a call of a built-in, by its family: what it takes, what it gives, its unit and its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from smetric.policy import tree
from smetric.policy.builtin import Builtin, Family
from smetric.policy.check_unit import Units, describe
from smetric.policy.findings import Findings
from smetric.policy.interval import COUNT, COUNT_ALL, FALSE, TRUE, TRUTH, ZERO, Interval, hull, ratio
from smetric.policy.span import Span
from smetric.policy.suggestion import comparison
from smetric.policy.types import Sort, Type
from smetric.policy.unit import PLAIN, SECONDS
from smetric.policy.vocabulary import NEVER

Pair = tuple[tree.Argument, Type]

_WORDS = {
    Sort.NUMBER: "a number",
    Sort.BOOL: "a truth value",
    Sort.STRING: "a string",
    Sort.INSTANCE: "an instance",
}


class Infers(Protocol):
    """What types the arguments: the rest of the checker."""

    units: Units

    def infer(self, expr: tree.Expr, arguments: Mapping[str, Type]) -> Type:
        """The type of an expression."""

    def same(self, span: Span, found: Type, message: str) -> None:
        """Keep in mind, for a warning, what is the same in every decision."""


class Bad(Exception):
    """The call has no type; why is reported."""


@dataclass(frozen=True, slots=True)
class Given:
    """A call whose shape is as its row says: positional and named arguments with their types, and that of `where`."""

    call: tree.Call
    builtin: Builtin
    plain: Sequence[Pair]
    named: Sequence[Pair]
    mask: Type | None

    @property
    def types(self) -> list[Type]:
        """The types of what is always read."""
        return [*(found for _, found in self.plain), *(() if self.mask is None else (self.mask,))]

    def other(self, *names: str) -> list[Pair]:
        """The named arguments called one of *names*."""
        return [pair for pair in self.named if pair[0].name in names]


class Families:
    """Types calls family by family."""

    def __init__(self, expressions: Infers, findings: Findings) -> None:
        self._expressions = expressions
        self._findings = findings

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
                    self._need(given, plain[0], Sort.BOOL, vector=True)
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
                    self._need(given, pair, Sort.INSTANCE)
                sure = next((pair for pair in plain[:-1] if not pair[1].maybe), None)
                if sure is not None:
                    self._expressions.same(sure[0].span, sure[1], "`first` always takes this, which is never absent")
                maybe = all(found.maybe for found in given.types)
                return Type(Sort.INSTANCE, maybe=maybe).reading(given.types[0]).perhaps(*given.types)
            case Family.DRAW | Family.TOP:
                return self._some(given)
            case Family.CHANCE:
                self._share(given, plain[0])
                likely = plain[0][1].interval
                verdict = FALSE if likely.high == 0 else TRUE if likely.low == 1 else TRUTH
                return Type(Sort.BOOL, interval=verdict).reading(*given.types)
            case Family.WEIGHT | Family.PLACE:
                self._need(given, plain[0], Sort.STRING, vector=False)
                key = plain[0][0].value
                if given.builtin.family is Family.PLACE and isinstance(key, tree.Text) and key.value:
                    self._expressions.same(key.span, plain[0][1], "this key is the same for every request")
                made = Type(Sort.NUMBER, given.builtin.family is Family.WEIGHT, PLAIN, TRUTH)
                return made.reading(*given.types)
            case Family.KNOWN | Family.AGE | Family.FRESH:
                return self._knowledge(given)

    def _fail(self, code: str, span: Span, message: str, help_text: str = "") -> Bad:
        self._findings.error(code, span, message, help_text)
        return Bad()

    # ── what an argument must be ──

    def _need(self, given: Given, pair: Pair, sort: Sort, *, vector: bool | None = None) -> None:
        """An argument must be of *sort*; per instance or single, if *vector* says."""
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
            help_text = "for how many it holds says count(…)"
        elif found.sort is sort:
            reduced = (
                "make one of it, e.g. mean(…), or look one up: v[s]" if sort is Sort.NUMBER else "look one up: v[s]"
            )
            help_text = "it is one value already" if vector else reduced
        where = f"`{argument.name}:` of " if argument.name else ""
        message = f"{where}`{given.builtin.name}` needs {wanted}, found {found}"
        raise self._fail("arguments", argument.value.span, message, help_text)

    def _plain(self, given: Given, pair: Pair) -> None:
        """An argument must be one number without a unit."""
        self._need(given, pair, Sort.NUMBER, vector=False)
        argument, found = pair
        if found.unit is not None and not found.unit.plain:
            message = f"`{given.builtin.name}` needs a plain number, found {found}"
            help_text = f"take its unit away: … {(PLAIN / found.unit).as_literals}"
            raise self._fail("units", argument.value.span, message, help_text)

    def _share(self, given: Given, pair: Pair) -> None:
        """An argument must be one plain number in 0..1."""
        self._plain(given, pair)
        argument, found = pair
        if found.interval.low < 0 or found.interval.high > 1:
            message = f"`{given.builtin.name}` needs a share in 0..1, and this {found.interval.place}"
            help_text = "keep it there: clamp(…, 0, 1); a parameter: `in 0..1`"
            if found.interval.low == found.interval.high and 1 < found.interval.high <= 100:
                help_text = f"write {found.interval.high / 100:g} for {found.interval.high:g} %"
            raise self._fail("range", argument.value.span, message, help_text)

    def _never_negative(self, pair: Pair, what: str) -> None:
        argument, found = pair
        if found.interval.low < 0:
            raise self._fail("range", argument.value.span, f"{what} may be below 0", "keep it above: greatest(…, 0)")

    def _amount(self, given: Given, pair: Pair) -> None:
        """An argument may be 1 or more, and is no single number with a fraction."""
        argument, found = pair
        low, high = found.interval.low, found.interval.high
        if high < 1 or (low == high and low % 1):
            message = f"`{given.builtin.name}` takes 1, 2, 3, … of the instances, and this {found.interval.place}"
            raise self._fail("range", argument.value.span, message, "write a whole number, 1 at least")

    def _like_score(self, given: Given, pair: Pair, what: str, help_text: str) -> None:
        """A named argument must be one number, never below 0, in the unit of what is compared."""
        self._need(given, pair, Sort.NUMBER, vector=False)
        argument, found = pair
        score = given.plain[0][1]
        if score.sort is Sort.NUMBER and not self._expressions.units.agree(score, found):
            message = f"{what} has the unit of the score, {describe(score)}, not {describe(found)}"
            named = self._expressions.units.unit_of_name(argument.value, found, score)
            raise self._fail("units", argument.value.span, message, named or help_text)
        self._never_negative(pair, what)

    # ── families ──

    def _reduction(self, given: Given) -> Type:
        builtin = given.builtin
        self._need(given, given.plain[0], Sort.NUMBER, vector=True)
        for pair in given.plain[1:]:
            self._share(given, pair)
        found = given.plain[0][1]
        made = Type(Sort.NUMBER, unit=found.unit, interval=builtin.bounds([found.interval])).reading(*given.types)
        if given.mask is None:
            for argument, _ in given.named:
                message = "`default:` is for `where`: without it there is always somebody"
                raise self._fail("arguments", argument.span, message)
            return made
        if not given.named and not builtin.of_nobody:
            message = f"`where` may leave nobody, and `{builtin.name}` of nobody is not a number"
            help_text = f"say what it is then: {builtin.name}(… where …, default: 0)"
            raise self._fail("nobody", given.call.span, message, help_text)
        for argument, default in given.named:
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
            help_text = self._expressions.units.unit_of_name(argument.value, default, made)
            raise self._fail("units", argument.value.span, message, help_text)
        unit = made.unit if made.unit is not None else default.unit
        wide = replace(made, unit=unit, vector=made.vector or default.vector)
        return replace(wide, interval=hull([made.interval, default.interval])).perhaps(default)

    def _scale(self, given: Given) -> Type:
        self._need(given, given.plain[0], Sort.NUMBER, vector=True)
        if given.builtin.never_negative:
            self._never_negative(given.plain[0], f"what `{given.builtin.name}` divides")
        bounds = given.builtin.bounds([given.plain[0][1].interval])
        return Type(Sort.NUMBER, True, PLAIN, bounds).reading(*given.types)

    def _element(self, given: Given) -> Type:
        builtin, types = given.builtin, given.types
        for pair in given.plain:
            self._need(given, pair, Sort.NUMBER)
        if not self._expressions.units.agree(*types):
            units = list(dict.fromkeys(describe(found) for found in types if found.unit is not None))
            message = f"`{builtin.name}` takes values of one unit, not {' and '.join(units)}"
            other = next(found for found in types if found.unit is not None and not found.unit.plain)
            names = (self._expressions.units.unit_of_name(each.value, found, other) for each, found in given.plain)
            raise self._fail("units", given.call.span, message, next(filter(None, names), ""))
        unit = next((found.unit for found in types if found.unit is not None), None)
        intervals = [found.interval for found in types]
        if builtin.ordered and intervals[-2].low > intervals[-1].high:
            message = f"the lower bound of `{builtin.name}` is always above the upper one"
            raise self._fail("range", given.call.span, message, f"write the smaller one first: {builtin.signature}")
        interval = builtin.bounds(intervals)
        return Type(Sort.NUMBER, any(found.vector for found in types), unit, interval).reading(*types)

    def _ratio(self, given: Given) -> Type:
        for pair in given.plain:
            self._need(given, pair, Sort.NUMBER)
        above, below = given.types
        both = above.unit is None and below.unit is None
        unit = None if both else (above.unit or PLAIN) / (below.unit or PLAIN)
        if below.interval == ZERO and not below.may:
            raise self._fail(
                "divisor", given.plain[1][0].value.span, "this divisor is always 0", "write the default alone"
            )
        interval = ratio(above.interval, below.interval)
        if not interval.bounded:
            raise self._fail("overflow", given.call.span, "this may grow past 1e300", "bound its parts with clamp(…)")
        made = Type(Sort.NUMBER, above.vector or below.vector, unit, interval).reading(above, below)
        default = given.named[0][1]
        if not below.vector and 0.0 in below.interval:
            # One divisor for all: where it is 0 the dividend is not looked at.
            made = replace(made, must=below.must | (above.must & default.must))
        return self._with_default(made, *given.named[0])

    def _pick(self, given: Given) -> Type:
        score = given.plain[0]
        if not (given.builtin.family is Family.LOTTERY and not given.named and score[1].sort is Sort.BOOL):
            self._need(given, score, Sort.NUMBER)
        if given.builtin.weighs and score[1].sort is Sort.NUMBER and score[1].vector and score[1].interval.high <= 0:
            self._expressions.same(score[0].value.span, score[1], "this is never above 0, so all are alike")
        for pair in given.other("then"):
            self._need(given, pair, Sort.NUMBER)
        for pair in given.other("temperature"):
            self._like_score(given, pair, "the temperature", "for a scale-free one use norm(v)")
        for pair in given.other("within"):
            self._like_score(given, pair, "`within:`", "")
        told = [found for _, found in given.other("temperature", "within")] if score[1].vector else []
        made = Type(Sort.INSTANCE, maybe=given.mask is not None).reading(*given.types, *told)
        return made.perhaps(*(found for _, found in given.other("then")))

    def _some(self, given: Given) -> Type:
        *scores, amount = given.plain
        for pair in scores:
            self._need(given, pair, Sort.NUMBER, vector=True)
        self._plain(given, amount)
        self._amount(given, amount)
        for pair in given.named:
            self._need(given, pair, Sort.NUMBER)
        return Type(Sort.BOOL, True).reading(*given.types).perhaps(*(found for _, found in given.named))

    def _knowledge(self, given: Given) -> Type:
        argument, found = given.plain[0]
        builtin = given.builtin
        if not found.vector:
            message = f"`{builtin.name}` asks about a value per instance, found {found}"
            help_text = "a guard that reads an unknown number of the request fails" if found.must else ""
            raise self._fail("arguments", argument.value.span, message, help_text)
        if builtin.family is Family.AGE:
            return Type(Sort.NUMBER, True, SECONDS, Interval(0.0, NEVER)).reading(*given.types)
        if builtin.family is Family.FRESH:
            limit, young = given.plain[1]
            if self._expressions.units.duration(young, limit.value.span).broken:
                raise Bad
        return Type(Sort.BOOL, True, interval=TRUTH).reading(*given.types)

"""Types of expressions: kinds, shapes, units and intervals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS, Builtin, Family
from smetric.policy.diagnostic import Span, quote
from smetric.policy.scope import Findings, Names, Stop, looked_up
from smetric.policy.types import (
    BASES,
    BEHIND_NUMBERS,
    BROKEN,
    COUNT,
    COUNT_ALL,
    FALSE,
    NUMBERS,
    PLAIN,
    PRODUCT,
    SECONDS,
    SMALLEST_DIVISOR,
    TRUE,
    TRUTH,
    ZERO,
    Interval,
    Sort,
    Type,
    Unit,
    absolute,
    base_unit,
    comparison,
    did_you_mean,
    exact,
    hull,
    of_word,
    parse_unit,
    ratio,
)
from smetric.policy.vocabulary import NEVER, Vocabulary

# Units of literals and of operands: what a unit's name means, which units agree, and what to say when they do not.

_SCALE = "put both on one scale first, e.g. norm(...) of each, or divide by a rate"
_TIMES = frozenset(["us", "ms", "s", "m", "h", "sec", "secs", "min", "mins", "hour", "hours", "minute", "minutes"])
#: Those that the language writes; right behind a number they are no unit only where that has an exponent.
_DURATIONS = frozenset(["us", "ms", "s", "m", "h"])
_THOUSANDS = frozenset(["k", "K", "M", "G"])


class Units:
    """Judges units.

    Args:
        names: names of the file, for the words of the help.
        vocabulary: features, for their units.
        findings: where errors go.
        features: the feature that each feature parameter stands for; its name is a unit too.
    """

    def __init__(self, names: Names, vocabulary: Vocabulary, findings: Findings, features: Mapping[str, str]) -> None:
        self._names = names
        self._vocabulary = vocabulary
        self.findings = findings
        self._features = features

    def within(self, findings: Findings) -> Units:
        """The same, for another text of the policy."""
        return Units(self._names, self._vocabulary, findings, self._features)

    def of_literal(self, literal: tree.Number) -> Unit | None:
        """The unit of a literal; None when it names none, or none that exists."""
        return self.of_words(literal.unit, literal.unit_span or literal.span) if literal.unit else None

    def of_words(self, words: str, span: Span) -> Unit | None:
        """The unit that *words*, `tokens per second`, mean; None, and an error at *span*, when one means nothing."""
        result = PLAIN
        for place, word in enumerate(words.split(" per ")):
            unit = base_unit(word)
            if unit is None and word in self._features and self._names.find(word) is not None:
                unit = parse_unit(self._vocabulary.features[self._features[word]].unit)
            if unit is None:
                named = self._names.own(word)
                if named is None or named.statement is not None:  # else it is said already what is wrong with it
                    self._unknown(word, span, last=place > 0)
                return None
            result = unit if place == 0 else result / unit
        return result

    def _unknown(self, word: str, span: Span, *, last: bool) -> None:
        source = self.findings.text[span.start : span.end]
        whole = [span.start + found.start() for found in re.finditer(rf"\b{word}\b", source)]
        place = Span(at := whole[-1 if last else 0], at + len(word)) if whole else span
        if word in _TIMES and last:
            help_text = "behind `per` time is in seconds: per second"
        elif word in _TIMES:
            help_text = "durations are written 500ms, 2s, 5m, 1h, without a space"
            if source.startswith(word) and self.findings.text[place.start - 1].isdigit() and word in _DURATIONS:
                help_text = "durations have no exponent: 500ms, 2s, 5m, 1h"
        elif word in ("percent", "pct"):
            help_text = "shares are plain numbers: write 0.5 for 50%"
        elif word.lstrip("_").isdigit() or word in _THOUSANDS:
            help_text = NUMBERS
        elif word in self._features:
            help_text = "define it above this line"
        elif word in self._vocabulary.features or self._names.own(word) is not None:
            help_text = f"{PRODUCT} … * {word}"
        else:
            help_text = did_you_mean(word, BASES.values()) or did_you_mean(word, self._features)
        help_text = help_text or did_you_mean(word, BEHIND_NUMBERS)
        self.findings.error("unit", place, f"unknown unit `{word}`", help_text)

    def agree(self, *types: Type) -> bool:
        """Whether all are of one unit; a literal without one fits any, and what is no number has none."""
        units = {each.unit for each in types if each.sort is Sort.NUMBER and each.unit is not None}
        return len(units) <= 1

    def duration(self, found: Type, span: Span) -> Type:
        """*found*, which must be a number of seconds; a bare literal is none."""
        if found.broken:
            return BROKEN
        if found.sort is not Sort.NUMBER:
            self.findings.error("duration", span, f"expected a duration, found {found}", "e.g. 500ms or 2s")
        elif found.unit != SECONDS:
            self.findings.error("duration", span, f"expected a duration, found {describe(found)}", "e.g. 500ms or 2s")
        elif found.interval.high < 0:
            self.findings.error("duration", span, "this duration is always below 0", "e.g. 500ms or 2s")
        else:
            return found
        return BROKEN

    def mismatch(self, expr: tree.Binary, left: Type, right: Type) -> None:
        """Report an addition, subtraction or comparison of different units."""
        a, b = describe(left), describe(right)
        message = {"+": f"cannot add {a} and {b}", "-": f"cannot subtract {b} from {a}"}.get(
            expr.op, f"cannot compare {a} with {b}"
        )
        help_text = self.unit_of_name(expr.left, left, right) or self.unit_of_name(expr.right, right, left)
        self.findings.error("units", expr.span, message, help_text or _SCALE)

    def unit_of_name(self, side: tree.Expr, found: Type, other: Type) -> str:
        """Help where *side* is a name whose number was defined without the unit of *other*; else empty."""
        if not isinstance(side, tree.Name) or found.unit is None or not found.unit.plain or other.unit is None:
            return ""
        named = self._names.own(side.name)
        statement = named and named.statement
        if not isinstance(statement, tree.Param | tree.Let) or not isinstance(statement.value, tree.Number):
            return ""
        if not other.unit.writable:  # in one literal; a product of literals has any unit
            return f"give `{side.name}` its unit where it is used: {side.name} {other.unit.as_literals}"
        word = "param" if isinstance(statement, tree.Param) else "let"
        return f"give `{side.name}` its unit where it is defined: `{word} {side.name} = … {other.unit}`"


def describe(found: Type) -> str:
    """The unit of a number, as messages name it."""
    return "a plain number" if found.unit is None or found.unit.plain else str(found.unit)


# The type of an operation from the types of its operands: kinds, shapes, units, intervals, and what it reads.
#
# How operands get their types is in `check_expression`.

_ORDER = frozenset({"<", "<=", ">", ">="})
_PLURALS = {Sort.SET: "sets", Sort.STRING: "strings", Sort.BOOL: "truth values"}


class Operators:
    """Types operations and reports operands that do not fit."""

    def __init__(self, units: Units, findings: Findings) -> None:
        self._units = units
        self._findings = findings

    def unary(self, expr: tree.Unary, found: Type) -> Type:
        """`-x` or `not x`."""
        wanted = Sort.BOOL if expr.op == "not" else Sort.NUMBER
        if found.broken:
            return BROKEN
        if found.sort is not wanted:
            word, help_text = ("a truth value", comparison(found.sort)) if wanted is Sort.BOOL else ("a number", "")
            self._findings.error("operand", expr.operand.span, f"`{expr.op}` takes {word}, found {found}", help_text)
            return BROKEN
        if wanted is Sort.BOOL:
            return replace(found, interval=TRUE - found.interval)
        return replace(found, interval=-found.interval)

    def binary(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        """Any operation with two operands."""
        if expr.op in ("and", "or"):
            return self._logic(expr, left, right)
        if left.broken or right.broken:
            return BROKEN
        if expr.op in ("in", "not in"):
            return self._member(expr, left, right)
        if expr.op in ("==", "!=") or expr.op in _ORDER:
            return self._compare(expr, left, right)
        return self._arithmetic(expr, left, right)

    def _logic(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        if left.sort is Sort.INSTANCE and right.sort is Sort.INSTANCE:
            message = f"`{expr.op}` takes truth values, found two instances"
            self._findings.error("operand", expr.span, message, "the first that is somebody: first(…, …)")
            return BROKEN
        for side, found in ((expr.left, left), (expr.right, right)):
            if not found.broken and found.sort is not Sort.BOOL:
                message = f"`{expr.op}` takes truth values, found {found}"
                self._findings.error("operand", side.span, message, comparison(found.sort))
        if left.sort is not Sort.BOOL or right.sort is not Sort.BOOL:
            return BROKEN
        pick = min if expr.op == "and" else max
        interval = Interval(
            pick(left.interval.low, right.interval.low), pick(left.interval.high, right.interval.high)
        )  # fmt: skip
        made = Type(Sort.BOOL, left.vector or right.vector, interval=interval)
        if left.vector:
            return made.reading(left, right)
        if left.decided:
            # The other side is looked at always, or never.
            looked_at = left.interval == (TRUE if expr.op == "and" else FALSE)
            return made.reading(left, right) if looked_at else made.reading(left)
        return made.reading(left).perhaps(right)

    def _member(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        if left.sort is not Sort.STRING:
            self._findings.error("operand", expr.left.span, f"`{expr.op}` looks for a string, not {left}")
            return BROKEN
        if right.sort is not Sort.SET:
            self._findings.error(
                "operand", expr.right.span, f"`{expr.op}` looks in a set, not in {right}", 'e.g. {"a", "b"}'
            )
            return BROKEN
        made = Type(Sort.BOOL, left.vector or right.vector).reading(left, right)
        if isinstance(expr.right, tree.SetOf) and not expr.right.items:
            return replace(made, interval=FALSE if expr.op == "in" else TRUE)
        return made

    def _compare(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        for found, other in ((left, right), (right, left)):
            if found.sort is Sort.INSTANCE:
                help_text = "compare its id: `id[s]`" if other.sort is Sort.STRING else "compare its values: `l[s]`"
                self._findings.error("operand", expr.span, f"`{expr.op}` does not compare instances", help_text)
                return BROKEN
            if found.sort is Sort.SET or (expr.op in _ORDER and found.sort is not Sort.NUMBER):
                message = f"`{expr.op}` does not compare {_PLURALS[found.sort]}"
                help_text = 'ask for a member: "a" in …' if found.sort is Sort.SET else ""
                self._findings.error("operand", expr.span, message, help_text)
                return BROKEN
        if left.sort is not right.sort:
            self._findings.error("operand", expr.span, f"cannot compare {left} with {right}")
            return BROKEN
        made = Type(Sort.BOOL, left.vector or right.vector).reading(left, right)
        if left.sort is not Sort.NUMBER:
            return made
        if not self._units.agree(left, right):
            self._units.mismatch(expr, left, right)
            return BROKEN
        return replace(made, interval=_decide(expr.op, left.interval, right.interval))

    def _arithmetic(self, expr: tree.Binary, left: Type, right: Type) -> Type:
        for side, found in ((expr.left, left), (expr.right, right)):
            if found.sort is not Sort.NUMBER:
                self._findings.error("operand", side.span, f"`{expr.op}` takes numbers, found {found}")
                return BROKEN
        made = Type(Sort.NUMBER, left.vector or right.vector).reading(left, right)
        a, b = left.interval, right.interval
        if expr.op in ("+", "-"):
            if not self._units.agree(left, right):
                self._units.mismatch(expr, left, right)
                return BROKEN
            unit = left.unit if left.unit is not None else right.unit
            return replace(made, unit=unit, interval=a + b if expr.op == "+" else a - b)
        both = left.unit is None and right.unit is None
        above, below = left.unit or PLAIN, right.unit or PLAIN
        if expr.op == "*":
            return replace(made, unit=None if both else above * below, interval=a * b)
        if 0.0 in b:
            self._divisor(expr.right, right)
            return BROKEN
        return replace(made, unit=None if both else above / below, interval=a / b)

    def _divisor(self, expr: tree.Expr, found: Type) -> None:
        if found.interval == ZERO and not found.may:
            self._findings.error("divisor", expr.span, "this divisor is always 0", "divide by something else")
            return
        shown = quote(self._findings.text, expr.span)
        floor = "0.01" if found.unit is None or found.unit.plain else "1"
        self._findings.error(
            "divisor",
            expr.span,
            "this divisor may be 0",
            f"keep it above 0: greatest({shown}, {floor}); or say what x / 0 is: ratio(x, {shown}, default: …)",
        )

    def if_else(self, expr: tree.IfElse, condition: Type, then: Type, otherwise: Type) -> Type:
        """`then if condition else otherwise`."""
        instance = Sort.INSTANCE in (then.sort, otherwise.sort)
        if not condition.broken and condition.sort is not Sort.BOOL:
            message = f"a condition is a truth value, but this is {condition}"
            self._findings.error("condition", expr.condition.span, message, comparison(condition.sort))
            return BROKEN
        if condition.vector and instance:
            message = "an instance is chosen by one truth value, but this is bool per instance"
            self._findings.error("condition", expr.condition.span, message, "wrap it in any(...) or all(...)")
            return BROKEN
        if condition.broken or then.broken or otherwise.broken:
            return BROKEN
        if then.sort is not otherwise.sort or not self._units.agree(then, otherwise):
            message = f"both sides of `if` are of one kind, not {then} and {otherwise}"
            help_text = self._units.unit_of_name(expr.then, then, otherwise)
            help_text = help_text or self._units.unit_of_name(expr.otherwise, otherwise, then)
            self._findings.error("branches", expr.span, message, help_text)
            return BROKEN
        made = replace(
            then,
            vector=condition.vector or then.vector or otherwise.vector,
            unit=then.unit if then.unit is not None else otherwise.unit,
            interval=hull([then.interval, otherwise.interval]),
            maybe=then.maybe or otherwise.maybe,
        )
        if condition.vector:
            return made.reading(condition, then, otherwise)
        if condition.decided:
            taken = then if condition.interval == TRUE else otherwise
            return made.reading(condition, taken)
        both = replace(made, must=condition.must | (then.must & otherwise.must), may=condition.may)
        return both.perhaps(then, otherwise)


def _decide(op: str, a: Interval, b: Interval) -> Interval:
    """What a comparison gives for all values of both intervals: 1..1, 0..0, or 0..1."""
    match op:
        case "<":
            return _verdict(a.high < b.low, a.low >= b.high)
        case "<=":
            return _verdict(a.high <= b.low, a.low > b.high)
        case ">":
            return _verdict(a.low > b.high, a.high <= b.low)
        case ">=":
            return _verdict(a.low >= b.high, a.high < b.low)
    apart = a.high < b.low or b.high < a.low
    same = a == b and a.low == a.high
    return _verdict(same, apart) if op == "==" else _verdict(apart, same)


def _verdict(always: bool, never: bool) -> Interval:
    if always:
        return TRUE
    return FALSE if never else TRUTH


# What an argument of a built-in must be: of which kind, in which unit, how large; `Bad` where it is not.
#
# What the call gives is in `check_family`.

Pair = tuple[tree.Argument, Type]

_WORDS = {
    Sort.NUMBER: "a number",
    Sort.BOOL: "a truth value",
    Sort.STRING: "a string",
    Sort.INSTANCE: "an instance",
}


class Bad(Exception):
    """A call has no type; `found` is why, as `Findings.error` takes it."""

    def __init__(self, code: str, span: Span, message: str, help_text: str = "") -> None:
        super().__init__(message)
        self.found = code, span, message, help_text


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

    def among(self, made: Type, values: Sequence[Type], told: Sequence[Type]) -> Type:
        """*made*, computed from *values*; and from what is *told* besides, where `where` leaves somebody."""
        if self.mask is None:
            return made.reading(*values, *told)
        return made.reading(*values, self.mask).perhaps(*told)

    def other(self, *names: str) -> list[Pair]:
        """The named arguments called one of *names*."""
        return [pair for pair in self.named if pair[0].name in names]


def need(given: Given, pair: Pair, sort: Sort, *, vector: bool | None = None) -> None:
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
        reduced = "make one of it, e.g. mean(…), or look one up: v[s]" if sort is Sort.NUMBER else "look one up: v[s]"
        help_text = "it is one value already" if vector else reduced
    where = f"`{argument.name}:` of " if argument.name else ""
    message = f"{where}`{given.builtin.name}` needs {wanted}, found {found}"
    raise Bad("arguments", argument.value.span, message, help_text)


def need_plain(given: Given, pair: Pair) -> None:
    """An argument must be one number without a unit."""
    need(given, pair, Sort.NUMBER, vector=False)
    argument, found = pair
    if found.unit is not None and not found.unit.plain:
        message = f"`{given.builtin.name}` needs a plain number, found {found}"
        help_text = f"take its unit away: … {(PLAIN / found.unit).as_literals}"
        raise Bad("units", argument.value.span, message, help_text)


def need_share(given: Given, pair: Pair) -> None:
    """An argument must be one plain number in 0..1."""
    need_plain(given, pair)
    argument, found = pair
    if found.interval.low < 0 or found.interval.high > 1:
        message = f"`{given.builtin.name}` needs a share in 0..1, and this {found.interval.place}"
        help_text = "keep it there: clamp(…, 0, 1); a parameter: `in 0..1`"
        if found.interval.low == found.interval.high and 1 < found.interval.high <= 100:
            help_text = f"write {exact(found.interval.high / 100)} for {exact(found.interval.high)} %"
        raise Bad("range", argument.value.span, message, help_text)


def need_never_negative(pair: Pair, what: str) -> None:
    """An argument, which *what* names, must be a number that is never below 0."""
    argument, found = pair
    if found.interval.low < 0:
        raise Bad("range", argument.value.span, f"{what} may be below 0", "keep it above: greatest(…, 0)")


def need_amount(given: Given, pair: Pair) -> None:
    """An argument may be 1 or more, and is no single number with a fraction."""
    argument, found = pair
    low, high = found.interval.low, found.interval.high
    if high < 1 or (low == high and low % 1):
        message = f"`{given.builtin.name}` takes 1, 2, 3, … of the instances, and this {found.interval.place}"
        raise Bad("range", argument.value.span, message, "write a whole number, 1 at least")


def need_like_score(units: Units, given: Given, pair: Pair, what: str, help_text: str) -> None:
    """A named argument must be one number, never below 0, in the unit of what is compared."""
    need(given, pair, Sort.NUMBER, vector=False)
    argument, found = pair
    score = given.plain[0][1]
    if score.sort is Sort.NUMBER and not units.agree(score, found):
        message = f"{what} has the unit of the score, {describe(score)}, not {describe(found)}"
        named = units.unit_of_name(argument.value, found, score)
        raise Bad("units", argument.value.span, message, named or help_text)
    need_never_negative(pair, what)


# The type of a call of a built-in, by its family: what it takes, what it gives, its unit and its interval.
#
# What one argument must be is in `check_argument`.


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


# What a call of a built-in may contain, by its row in `builtin`: arguments, names, `where`.
#
# What it gives, by its family, is in `check_family`.

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


# The type of every expression: kinds, shapes, units and intervals; a definition is typed anew at each call.
#
# Calls of built-ins are in `check_call`, statements in `check_statement`.

#: Nodes of a policy, definitions expanded, tests not counted.
MAX_NODES = 500
#: How deep expressions may nest, chains of operators and definitions included.
MAX_DEPTH = 100


@dataclass(slots=True)
class Budget:
    """How large a policy has become so far: nodes counted, and how deep the checker is in an expression."""

    nodes: int = 0
    depth: int = 0


Arguments = Mapping[str, Type]
_NONE: Arguments = {}


class Expressions:
    """Types expressions, one after the other, and reports what is wrong with them.

    Args:
        names: names of the file defined so far.
        vocabulary: features and request fields.
        findings: where errors go.
        features: the feature that each feature parameter stands for.
    """

    def __init__(self, names: Names, vocabulary: Vocabulary, findings: Findings, features: Mapping[str, str]) -> None:
        self._names = names
        self._vocabulary = vocabulary
        self._findings = findings
        self.units = Units(names, vocabulary, findings, features)
        self._operators = Operators(self.units, findings)
        self._calls = Calls(self, findings)
        self._budget = Budget()
        self._expanding: list[tree.Def] = []
        #: Those of the libraries that names are taken from, by name: they type the bodies of what is taken.
        self.libraries: dict[str, Expressions] = {}
        #: What is the same in every decision, outside definitions, which are for more than one call.
        self.constants: list[tuple[Span, Type, str]] = []

    def infer(self, expr: tree.Expr, arguments: Arguments = _NONE) -> Type:
        """The type of *expr*, where *arguments* are those of the definition it stands in.

        Raises:
            Stop: the policy is too large.
        """
        self.count(expr.span)
        self._budget.depth += 1
        if self._budget.depth > MAX_DEPTH:
            self._findings.error(
                "too-deep", expr.span, f"this nests deeper than {MAX_DEPTH} operators", "name its parts with `let`"
            )
            raise Stop
        result = self._infer(expr, arguments)
        self._budget.depth -= 1
        if result.sort is Sort.NUMBER and not result.interval.bounded:
            self._findings.error("overflow", expr.span, "this may grow past 1e300", "bound its parts with clamp(…)")
            return BROKEN
        return result

    def count(self, span: Span) -> None:
        """Count one more node of the policy.

        Raises:
            Stop: there are too many.
        """
        self._budget.nodes += 1
        if self._budget.nodes > MAX_NODES:
            message = f"this file has more than {MAX_NODES} parts, its definitions expanded"
            self._findings.error("too-large", span, message, "name what repeats with `let`; divide a library")
            raise Stop

    def same(self, span: Span, found: Type, message: str) -> None:
        """Keep in mind, for a warning, what is the same in every decision."""
        if not self._expanding:
            self.constants.append((span, found, message))

    def condition(self, expr: tree.Expr, arguments: Arguments = _NONE) -> Type:
        """The type of a condition, which must be one truth value."""
        found = self.infer(expr, arguments)
        if not found.broken and found.sort is not Sort.BOOL:
            message = f"a condition is a truth value, but this is {found}"
            self._findings.error("condition", expr.span, message, comparison(found.sort))
            return BROKEN
        if found.vector:
            message = "a condition is one truth value, but this is bool per instance"
            self._findings.error("condition", expr.span, message, "wrap it in any(...) or all(...)")
            return BROKEN
        return found

    def seconds(self, expr: tree.Expr) -> Type:
        """The type of a single number of seconds."""
        found = self.infer(expr)
        if found.vector and not found.broken:
            help_text = "make one of it: min(…), mean(…) or max(…)"
            self._findings.error("duration", expr.span, f"expected one duration, found {found}", help_text)
            return BROKEN
        return self.units.duration(found, expr.span)

    def _infer(self, expr: tree.Expr, arguments: Arguments) -> Type:
        match expr:
            case tree.Number():
                unit = self.units.of_literal(expr)
                if expr.unit and unit is None:
                    return BROKEN
                return Type(Sort.NUMBER, unit=unit, interval=Interval(expr.value, expr.value))
            case tree.Text():
                return Type(Sort.STRING)
            case tree.Truth(value=value):
                return Type(Sort.BOOL, interval=TRUE if value else FALSE)
            case tree.Name():
                return self._name(expr, arguments)
            case tree.Field():
                return self._field(expr)
            case tree.SetOf():
                return self._set(expr, arguments)
            case tree.Unary():
                return self._operators.unary(expr, self.infer(expr.operand, arguments))
            case tree.Binary():
                left, right = self.infer(expr.left, arguments), self.infer(expr.right, arguments)
                return self._operators.binary(expr, left, right)
            case tree.IfElse():
                parts = [self.infer(part, arguments) for part in (expr.condition, expr.then, expr.otherwise)]
                if parts[0].decided:
                    self.same(expr.condition.span, parts[0], "this condition is the same in every decision")
                return self._operators.if_else(expr, *parts)
            case tree.At():
                return self._at(expr, arguments)
            case tree.Call():
                return self._call(expr, arguments)
        raise AssertionError(f"no such expression: {type(expr).__name__}")

    # ── names ──

    def _name(self, expr: tree.Name, arguments: Arguments) -> Type:
        name = expr.name
        if name in arguments:
            return arguments[name]
        found = self._names.find(name, self._horizon)
        if found is not None:
            if isinstance(found.statement, tree.Def):
                self._findings.error("unknown-name", expr.span, f"`{name}` is a definition", f"call it: {name}(…)")
                return BROKEN
            return found.type
        if name in self._vocabulary.features:
            return self.feature(name)
        self._names.unknown(name, expr.span, arguments)
        return BROKEN

    def feature(self, name: str) -> Type:
        """The type of a feature."""
        word = self._vocabulary.features[name]
        made = of_word(word, parse_unit(word.unit))
        bound = self._vocabulary.request.get(word.at_most)
        if bound is not None:
            made = replace(made, interval=Interval(word.low, min(word.high, bound.high)))
        return replace(made, must=frozenset((name,)), may=frozenset((name,)))

    def _field(self, expr: tree.Field) -> Type:
        word = self._vocabulary.request.get(expr.name)
        place = Span(expr.span.end - len(expr.name), expr.span.end)
        if expr.base != "req":
            base = Span(expr.span.start, expr.span.start + len(expr.base))
            help_text = "only the request has fields: req.turn, req.prompt_len, …"
            if expr.name in self._vocabulary.features:
                help_text = f"a feature of one instance is looked up: `{expr.name}[{expr.base}]`"
            self._findings.error("unknown-name", base, f"`{expr.base}` has no fields", help_text)
            return BROKEN
        if word is None:
            if expr.name in self._vocabulary.features:
                help_text = f"`{expr.name}` belongs to the instances: write it without `req.`"
            else:
                help_text = did_you_mean(expr.name, self._vocabulary.request)
            self._findings.error("unknown-field", place, f"a request has no `{expr.name}`", help_text)
            return BROKEN
        read = frozenset((f"req.{expr.name}",))
        return replace(of_word(word, parse_unit(word.unit)), must=read, may=read)

    # ── sets and look-ups ──

    def _set(self, expr: tree.SetOf, arguments: Arguments) -> Type:
        items = [self.infer(item, arguments) for item in expr.items]
        for item, found in zip(expr.items, items, strict=True):
            if not found.broken and (found.sort is not Sort.STRING or found.vector):
                self._findings.error("set", item.span, f"a set holds strings, not {found}")
        return Type(Sort.SET).reading(*items)

    def _at(self, expr: tree.At, arguments: Arguments) -> Type:
        vector, pick = self.infer(expr.vector, arguments), self.infer(expr.pick, arguments)
        if vector.broken or pick.broken:
            return BROKEN
        if vector.sort is Sort.INSTANCE or not vector.vector:
            message = f"only a value per instance can be looked up, and this is {vector}"
            self._findings.error("lookup", expr.vector.span, message)
            return BROKEN
        if pick.sort is not Sort.INSTANCE:
            message = f"a value is looked up by an instance, not by {pick}"
            self._findings.error("lookup", expr.pick.span, message, "e.g. l[argmin(l)]")
            return BROKEN
        if pick.maybe:
            self._findings.error(
                "maybe", expr.pick.span, "this instance may be absent", "give it a second choice: first(…, …)"
            )
            return BROKEN
        return replace(vector, vector=False).reading(vector, pick)

    # ── calls ──

    @property
    def _horizon(self) -> int | None:
        """Where the definition being expanded starts: its body sees only names above it."""
        return self._expanding[-1].span.start if self._expanding else None

    def _call(self, call: tree.Call, arguments: Arguments) -> Type:
        found = self._names.find(call.function, self._horizon)
        if found is not None and isinstance(found.statement, tree.Def):
            home = self if found.origin is None else self.libraries[found.origin.library]
            return self._expand(call, found.statement, arguments, home)
        builtin = BUILTINS.get(call.function)
        if builtin is not None:
            return self._calls.infer(call, builtin, arguments)
        for argument in call.arguments:
            self.infer(argument.value, arguments)
        if found is None:
            inside = {definition.name for definition in self._expanding}
            self._names.unknown_function(call.function, call.name_span, inside)
        elif found.statement is not None:
            message = f"`{call.function}` is a value, not a function"
            self._findings.error("unknown-function", call.name_span, message, looked_up(call.function))
        return BROKEN

    def _expand(self, call: tree.Call, definition: tree.Def, arguments: Arguments, home: Expressions) -> Type:
        given = [self.infer(argument.value, arguments) for argument in call.arguments]
        for argument in call.arguments:
            if argument.name or argument.where is not None:
                message = f"`{call.function}` is a definition: its arguments have no names and no `where`"
                self._findings.error("arguments", argument.span, message)
                return BROKEN
        wanted = [argument.name for argument in definition.arguments]
        if len(given) != len(wanted):
            listed = f"{len(wanted)} argument(s) ({', '.join(wanted)})"
            message = f"`{call.function}` takes {listed}, not {len(given)}"
            self._findings.error("arguments", call.span, message)
            return BROKEN
        with self._findings.inside(call):
            return home.body(definition, dict(zip(wanted, given, strict=True)), self._budget)

    def body(self, definition: tree.Def, arguments: Arguments, budget: Budget | None = None) -> Type:
        """The type of the body of a definition of this file, counted into *budget* where another file calls it."""
        own = self._budget
        self._budget = budget or own
        self._expanding.append(definition)
        try:
            return self.infer(definition.body, arguments)
        finally:
            self._expanding.pop()
            self._budget = own

"""Units of literals and of operands: what a unit's name means, which units agree, and what to say when they do not."""

from __future__ import annotations

import re
from collections.abc import Mapping

from smetric.policy import tree
from smetric.policy.findings import Findings
from smetric.policy.names import Names
from smetric.policy.span import Span
from smetric.policy.suggestion import BEHIND_NUMBERS, NUMBERS, PRODUCT, did_you_mean
from smetric.policy.types import BROKEN, Sort, Type
from smetric.policy.unit import BASES, PLAIN, SECONDS, Unit, base_unit, parse_unit
from smetric.policy.vocabulary import Vocabulary

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

"""Names of a policy file in the order of their definition, the units among them, and the errors found so far."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, WAYS_OUT, Diagnostic, PolicyText, Severity, Span, position, quote
from smetric.policy.types import (
    BROKEN,
    PLAIN,
    PRODUCT,
    SECONDS,
    Sort,
    Type,
    Unit,
    base_unit,
    parse_unit,
)
from smetric.policy.vocabulary import Vocabulary


class CheckEnded(Exception):
    """The policy has too many errors or is too large to check any further."""


class Findings:
    """Errors and warnings of one policy text.

    Args:
        text: the text.
        source: the library it belongs to; None for the policy itself.
        calls: the calls of definitions being expanded, outermost first, each with the findings of the text it stands
            in; shared by all texts of a policy.
    """

    def __init__(
        self, text: str, source: PolicyText | None = None, calls: list[tuple[tree.CallExpr, Findings]] | None = None
    ) -> None:
        self.text = text
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []
        self.calls = [] if calls is None else calls
        self._source = source
        self._shown: set[tuple[int, str]] = set()

    def error(self, code: str, span: Span, message: str, help_text: str = "") -> Type:
        """Report an error at *span*, once for each place and message; in a definition, with the call that shows it.

        Returns:
            The type of an expression with an error.

        Raises:
            CheckEnded: the file has more errors than are reported.
        """
        if self.calls:
            call, caller = self.calls[0]
            if (span.start, message) in self._shown:
                return BROKEN
            file = f" of {caller._source.path}" if caller._source else " of the policy" if self._source else ""
            shown = f"called as `{quote(caller.text, call.span)}` on {caller.line(call.span)}{file}"
            help_text = f"{help_text or WAYS_OUT[code]}; {shown}"
        self._shown.add((span.start, message))
        self.errors.append(Diagnostic(code, message, span, help_text, source=self._source))
        if len(self.errors) > MAX_DIAGNOSTICS:
            raise CheckEnded
        return BROKEN

    def warn(self, code: str, span: Span, message: str, help_text: str = "") -> None:
        """Report a warning."""
        self.warnings.append(Diagnostic(code, message, span, help_text, Severity.WARNING, self._source))

    def line(self, span: Span) -> str:
        """Return the line of *span*, as messages name it."""
        return f"line {position(self.text, span.start)[0]}"

    @contextmanager
    def inside(self, call: tree.CallExpr) -> Iterator[None]:
        """Attribute the errors found meanwhile to the definition that *call* calls."""
        self.calls.append((call, self))
        try:
            yield
        finally:
            self.calls.pop()


# ── names ────────────────────────────────────────────────────────────────────

Declaration = tree.Param | tree.Let | tree.Def


@dataclass(slots=True)
class Named:
    """Name of the file: its place, its statement if that parses, and its type unless it is a `def`.

    `origin` is the name in the library that it is taken from. The file of the library types its body.
    """

    span: Span
    statement: Declaration | None
    type: Type = BROKEN
    used: bool = False
    origin: Imported | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """Origin of a name: the library, and the name there."""

    library: str
    named: Named

    @property
    def is_read(self) -> bool:
        """Whether it is a parameter that a definition of its library reads."""
        return isinstance(self.named.statement, tree.Param) and self.named.used


class Names:
    """Names defined so far.

    Args:
        file: the file, for names that are defined further below.
        vocabulary: features, which no name may hide.
        findings: receives errors.
    """

    def __init__(self, file: tree.File, vocabulary: Vocabulary, findings: Findings) -> None:
        self._vocabulary = vocabulary
        self._findings = findings
        self._defined: dict[str, Named] = {}
        self._ever: set[str] = set()
        for statement in file.statements:
            match statement:
                case tree.Param(name=name) | tree.Let(name=name) | tree.Def(name=name):
                    self._ever.add(name)
                case tree.Use(names=taken):
                    self._ever.update(name.name for name in taken)
                case tree.Broken(names=likely):
                    self._ever.update(likely)

    def define(
        self,
        name: str,
        span: Span,
        statement: Declaration | None,
        type_: Type = BROKEN,
        origin: Imported | None = None,
    ) -> None:
        """Add a name. A second definition is an error, and the first one stays."""
        if statement is not None and self._is_taken(name, span, "a name"):
            if name in BUILTINS:
                self._defined.setdefault(name, Named(span, None))  # so that its uses are not reported as well
            return
        earlier = self._defined.get(name)
        if earlier is None:
            self._defined[name] = Named(span, statement, type_, origin=origin)
        elif earlier.statement is not None or statement is not None:  # else both are reported already
            message = f"`{name}` is already defined on {self._findings.line(earlier.span)}"
            self._findings.error("redefined", span, message, "names are never redefined")

    def define_arguments(self, definition: tree.Def) -> None:
        """Check the arguments of a definition, which may hide names of the file, but no others."""
        seen: set[str] = set()
        for argument in definition.arguments:
            if argument.name in seen:
                self._findings.error("redefined", argument.span, f"`{argument.name}` is already an argument")
            seen.add(argument.name)
            self._is_taken(argument.name, argument.span, "an argument")

    def find(self, name: str, horizon: int | None = None) -> Named | None:
        """Return a name and count it as used; None unless it is defined above, and before *horizon*."""
        found = self._defined.get(name)
        if found is None or (horizon is not None and found.span.start >= horizon):
            return None
        found.used = True
        return found

    def own(self, name: str) -> Named | None:
        """Return a name without using it."""
        return self._defined.get(name)

    @property
    def defined(self) -> Mapping[str, Named]:
        """All names so far."""
        return self._defined

    def definitions(self) -> set[str]:
        """Return the names of all `def`s so far."""
        return {name for name, found in self._defined.items() if isinstance(found.statement, tree.Def)}

    def unused(self) -> list[tuple[str, Named]]:
        """Return the names without a use. A parameter of a library may be used there."""
        return [
            (name, found)
            for name, found in self._defined.items()
            if found.statement and not (found.used or (found.origin is not None and found.origin.is_read))
        ]

    def unknown(self, name: str, span: Span, arguments: Iterable[str]) -> Type:
        """Report an undefined name."""
        from smetric.policy.advice import help_for_name  # most names are known

        if name in BUILTINS:
            return self._findings.error("unknown-name", span, f"`{name}` is a function", f"call it: {name}(…)")
        help_text = help_for_name(name, {*arguments, *self._defined}, self._ever, self._vocabulary)
        return self._findings.error("unknown-name", span, f"unknown name `{name}`", help_text)

    def unknown_function(self, name: str, span: Span, inside: Iterable[str]) -> Type:
        """Report an undefined function; *inside* are the definitions being expanded."""
        from smetric.policy.advice import help_for_function  # most names are known

        help_text = "define it above this line; a definition cannot use itself"
        if name not in inside:
            help_text = help_for_function(name, self.definitions(), self._ever, self._vocabulary)
        return self._findings.error("unknown-function", span, f"unknown function `{name}`", help_text)

    def _is_taken(self, name: str, span: Span, what: str) -> bool:
        if name in self._vocabulary.features:
            owner = "a feature"
        elif name in BUILTINS:
            owner = "a built-in"
        elif name == "req":
            owner = "the request"
        else:
            return False
        self._findings.error("hidden", span, f"`{name}` is {owner}; {what} cannot hide it")
        return True


# ── units ────────────────────────────────────────────────────────────────────


class Units:
    """Units of literals and of types.

    Args:
        names: names of the file, for help texts.
        vocabulary: features, for their units.
        findings: receives errors.
        features: the feature chosen by each feature parameter; the parameter's name is a unit too.
    """

    def __init__(self, names: Names, vocabulary: Vocabulary, findings: Findings, features: Mapping[str, str]) -> None:
        self._names = names
        self._vocabulary = vocabulary
        self.findings = findings
        self._features = features

    def within(self, findings: Findings) -> Units:
        """Return the units for another text of the policy."""
        return Units(self._names, self._vocabulary, findings, self._features)

    def of_literal(self, literal: tree.Number) -> Unit | None:
        """Return the unit of a literal; None if it names none, or an unknown one."""
        return self.of_words(literal.unit, literal.unit_span or literal.span) if literal.unit else None

    def of_words(self, words: str, span: Span) -> Unit | None:
        """Return the unit written as *words*, such as `tokens per second`; None, and an error, if one is unknown."""
        result = PLAIN
        for place, word in enumerate(words.split(" per ")):
            unit = base_unit(word)
            if unit is None and word in self._features and self._names.find(word) is not None:
                unit = parse_unit(self._vocabulary.features[self._features[word]].unit)
            if unit is None:
                named = self._names.own(word)
                if named is None or named.statement is not None:  # else its definition is reported already
                    self._unknown(word, span, last=place > 0)
                return None
            result = unit if place == 0 else result / unit
        return result

    def _unknown(self, word: str, span: Span, *, last: bool) -> None:
        from smetric.policy.advice import help_for_unit  # most units are known

        source = self.findings.text[span.start : span.end]
        whole = [span.start + found.start() for found in re.finditer(rf"\b{word}\b", source)]
        place = Span(at := whole[-1 if last else 0], at + len(word)) if whole else span
        if word in self._features:
            help_text = "define it above this line"
        elif word in self._vocabulary.features or self._names.own(word) is not None:
            help_text = f"{PRODUCT} … * {word}"
        else:
            touches = source.startswith(word) and self.findings.text[place.start - 1].isdigit()
            help_text = help_for_unit(word, self._features, last=last, touches=touches)
        self.findings.error("unit", place, f"unknown unit `{word}`", help_text)

    def agree(self, *types: Type) -> bool:
        """Whether all numbers have one unit; a literal without a unit fits any."""
        units = {each.unit for each in types if each.sort is Sort.NUMBER and each.unit is not None}
        return len(units) <= 1

    def duration(self, found: Type, span: Span) -> Type:
        """Return *found* if it is a number of seconds, which a bare literal is not; else report it."""
        if found.broken:
            return BROKEN
        if found.sort is Sort.NUMBER and found.unit == SECONDS and found.interval.high >= 0:
            return found
        message = "this duration is always below 0"
        if found.sort is not Sort.NUMBER or found.unit != SECONDS:
            message = f"expected a duration, found {describe(found) if found.sort is Sort.NUMBER else found}"
        return self.findings.error("duration", span, message, "e.g. 500ms or 2s")

    def unit_of_name(self, side: tree.Expr, found: Type, other: Type) -> str:
        """Return the help for a name whose number was defined without the unit of *other*; else an empty text."""
        if not isinstance(side, tree.Name) or found.unit is None or not found.unit.plain or other.unit is None:
            return ""
        named = self._names.own(side.name)
        statement = named and named.statement
        if not isinstance(statement, tree.Param | tree.Let) or not isinstance(statement.value, tree.Number):
            return ""
        if not other.unit.writable:  # a product of literals can have any unit
            return f"give `{side.name}` its unit where it is used: {side.name} {other.unit.as_literals}"
        word = "param" if isinstance(statement, tree.Param) else "let"
        return f"give `{side.name}` its unit where it is defined: `{word} {side.name} = … {other.unit}`"


def describe(found: Type) -> str:
    """Return the unit of a number, as messages name it."""
    return "a plain number" if found.unit is None or found.unit.plain else str(found.unit)

"""Names of a policy file, in the order of their definition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from smetric.policy import tree
from smetric.policy.builtin import BUILTINS
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, Severity, Source, Span, position
from smetric.policy.types import BROKEN, Type, base_unit, did_you_mean
from smetric.policy.vocabulary import Vocabulary

# What the checker has found so far, and how an error inside a definition is shown at the call.
#
# The errors themselves are made where they are found.


class Stop(Exception):
    """Checking ends here: enough was found, or a bound was passed."""


#: The calls of definitions being looked into, outermost first: each call with the findings of the text it stands in.
Calls = list["tuple[tree.Call, Findings]"]


class Findings:
    """Errors and warnings of one policy text.

    Args:
        text: the text.
        source: the library it is; None for the policy itself.
        calls: shared by all texts of a policy.
    """

    def __init__(self, text: str, source: Source | None = None, calls: Calls | None = None) -> None:
        self.text = text
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []
        self._source = source
        self.calls: Calls = [] if calls is None else calls
        self._shown: set[tuple[int, str]] = set()

    def error(self, code: str, span: Span, message: str, help_text: str = "") -> None:
        """Report an error at *span*; inside a definition, at the outermost call, once for each place of its body.

        Raises:
            Stop: the file has more errors than are reported.
        """
        shown_in = self
        inside = (span.start, message)
        if self.calls:
            if inside in self._shown:
                return
            names = "".join(f"in `{call.function}`, " for call, _ in self.calls)
            line = f"line {position(self.text, span.start)[0]}"
            file = f" of {self._source.path}" if self._source else ""
            help_text = f"{names}{line}{file}" + (f": {help_text}" if help_text else "")
            outermost, shown_in = self.calls[0]
            span = outermost.span
        self._shown.add(inside)
        shown_in._add(Diagnostic(code, message, span, help_text, source=shown_in._source))

    def _add(self, error: Diagnostic) -> None:
        self.errors.append(error)
        if len(self.errors) > MAX_DIAGNOSTICS:
            raise Stop

    def warn(self, code: str, span: Span, message: str) -> None:
        """Report a warning."""
        self.warnings.append(Diagnostic(code, message, span, severity=Severity.WARNING, source=self._source))

    @contextmanager
    def inside(self, call: tree.Call) -> Iterator[None]:
        """Errors found meanwhile belong to the body of the definition that *call* calls."""
        self.calls.append((call, self))
        try:
            yield
        finally:
            self.calls.pop()


# The names of a policy file, in the order of their definition, and what to say of one that is not there.
#
# What a name stands for is a `Type` here; its value is the compiler's.

Declaration = tree.Param | tree.Let | tree.Def

#: What functions are called elsewhere, and what does the same here.
_ELSEWHERE = {
    "avg": "`mean(…)`",
    "average": "`mean(…)`",
    "len": "`count()`",
    "median": "`quantile(…, 0.5)`",
    "normalize": "`norm(…)`",
    "now": "`age(…)` of what is read: a policy has no clock",
    "random": "`sample(1)`",
    "round_robin": "`rr_argmin(0)`",
}


def looked_up(name: str) -> str:
    """Help where a value is called like a function."""
    return f"of one instance, picked as s, it is `{name}[s]`"


@dataclass(slots=True)
class Named:
    """A name of the file: where it was defined, its statement if that could be parsed, and its type unless a `def`.

    `origin` is the name in the library it was taken from, whose file types its body.
    """

    span: Span
    statement: Declaration | None
    type: Type = BROKEN
    used: bool = False
    origin: Imported | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """Where a name was taken from: the library, and the name there."""

    library: str
    named: Named

    @property
    def of_use(self) -> bool:
        """Whether it is a parameter that a definition of its library reads."""
        return isinstance(self.named.statement, tree.Param) and self.named.used


class Names:
    """Names defined so far.

    Args:
        file: for the names defined further below, which are no use yet.
        vocabulary: features, which no name may hide.
        findings: where errors go.
    """

    def __init__(self, file: tree.File, vocabulary: Vocabulary, findings: Findings) -> None:
        self._vocabulary = vocabulary
        self._findings = findings
        self._defined: dict[str, Named] = {}
        self._ever = {
            statement.name for statement in file.statements if isinstance(statement, tree.Param | tree.Let | tree.Def)
        }
        for statement in file.statements:
            if isinstance(statement, tree.Use):
                self._ever |= {name.name for name in statement.names}
            elif isinstance(statement, tree.Broken):
                self._ever |= set(statement.names)

    def define(
        self,
        name: str,
        span: Span,
        statement: Declaration | None,
        type_: Type = BROKEN,
        origin: Imported | None = None,
    ) -> None:
        """Add a name; an error when it is taken, and the first definition stays."""
        if statement is not None and self._is_taken(name, span, "name"):
            if name in BUILTINS:
                self._defined.setdefault(name, Named(span, None))  # its uses are no calls that lack their brackets
            return
        earlier = self._defined.get(name)
        if earlier is None:
            self._defined[name] = Named(span, statement, type_, origin=origin)
            return
        if earlier.statement is None and statement is None:
            return  # of both it is said already that they could not be read
        line = position(self._findings.text, earlier.span.start)[0]
        self._findings.error(
            "redefined", span, f"`{name}` is already defined on line {line}", "names are never redefined"
        )

    def define_arguments(self, definition: tree.Def) -> None:
        """Check the argument names of a definition; they may repeat names of the file, but no others."""
        seen: set[str] = set()
        for argument in definition.arguments:
            if argument.name in seen:
                self._findings.error("redefined", argument.span, f"`{argument.name}` is an argument already")
            seen.add(argument.name)
            self._is_taken(argument.name, argument.span, "argument")

    def find(self, name: str, horizon: int | None = None) -> Named | None:
        """The name, which counts as used from now on; None when it is not defined above, or not before *horizon*."""
        found = self._defined.get(name)
        if found is None or (horizon is not None and found.span.start >= horizon):
            return None
        found.used = True
        return found

    def own(self, name: str) -> Named | None:
        """The name, without using it."""
        return self._defined.get(name)

    def listed(self) -> list[str]:
        """All names so far."""
        return list(self._defined)

    def all(self) -> list[Named]:
        """What they stand for, in their order."""
        return list(self._defined.values())

    def definitions(self) -> set[str]:
        """The names of all `def`s so far."""
        return {name for name, found in self._defined.items() if isinstance(found.statement, tree.Def)}

    def unused(self) -> Iterable[tuple[str, Named]]:
        """Names that nothing has asked for; a parameter of a library may be of use there."""
        return [
            (name, found)
            for name, found in self._defined.items()
            if found.statement and not (found.used or (found.origin is not None and found.origin.of_use))
        ]

    def unknown(self, name: str, span: Span, arguments: Iterable[str]) -> None:
        """Report a name that is not there."""
        if name in BUILTINS:
            self._findings.error("unknown-name", span, f"`{name}` is a function", f"call it: {name}(…)")
            return
        if name == "req":
            help_text = "name one of its fields: req.turn, req.prompt_len, …"
        elif name in self._vocabulary.request:
            help_text = f"request fields are written `req.{name}`"
        elif name in self._ever:
            help_text = "define it above this line"
        elif base_unit(name) is not None:
            meant = did_you_mean(name, self._vocabulary.features)
            help_text = meant or "a unit stands right behind a number: 16 requests, 5 tokens per second"
        else:
            known = {*arguments, *self._defined, *self._vocabulary.features, "true", "false"}
            help_text = did_you_mean(name, known) or f'define it above, or quote it if it is a string: "{name}"'
        self._findings.error("unknown-name", span, f"unknown name `{name}`", help_text)

    def unknown_function(self, name: str, span: Span, inside: Iterable[str]) -> None:
        """Report a function that is not there; *inside* are the definitions being expanded."""
        if name in inside:
            help_text = "define it above this line; a definition cannot use itself"
        elif name in self._ever:
            help_text = "define it above this line"
        elif name in self._vocabulary.features:
            help_text = looked_up(name)
        elif name in _ELSEWHERE:
            help_text = f"write {_ELSEWHERE[name]}"
        else:
            help_text = did_you_mean(name, {*self.definitions(), *BUILTINS})
        self._findings.error("unknown-function", span, f"unknown function `{name}`", help_text)

    def _is_taken(self, name: str, span: Span, what: str) -> bool:
        if name in self._vocabulary.features:
            owner = "a feature"
        elif name in BUILTINS:
            owner = "a built-in"
        elif name == "req":
            owner = "the request"
        else:
            return False
        article = "an" if what == "argument" else "a"
        self._findings.error("hidden", span, f"`{name}` is {owner}; {article} {what} cannot hide it")
        return True

"""Checks of statements in order: names, filters before picks, outcomes that always decide, and what each step reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from smetric.policy import tree
from smetric.policy.check_expression import Expressions
from smetric.policy.diagnostic import Span, quote
from smetric.policy.guard import HELD, CheckedGuard, CheckedStep, conjuncts, label_of
from smetric.policy.parameter import Parameters, ParameterValues
from smetric.policy.scope import Findings, Imported, Named, Names
from smetric.policy.types import BROKEN, TRUE, Sort, Type, comparison, did_you_mean, exact
from smetric.policy.vocabulary import Vocabulary

_END = "end with an unconditional `route …` whose pick has no `where`"

_HELD_SO_FAR = frozenset(("req.held",))


@dataclass(slots=True)
class _Outcomes:
    """State of the outcomes so far."""

    last: tree.Rule | None = None
    settled: bool = False
    broken: bool = False
    guarded: bool = False


class Statements:
    """Check of the statements of a file, for one choice of features.

    Args:
        file: a policy or a library.
        vocabulary: features and request fields.
        settings: configured values of its parameters.
        features: the feature chosen by each feature parameter; those taken from libraries are added.
        findings: receives errors.
        library: returns the checked library of a `use`; None if that has an error.
    """

    def __init__(
        self,
        file: tree.File,
        vocabulary: Vocabulary,
        settings: ParameterValues,
        features: dict[str, str],
        findings: Findings,
        library: Callable[[tree.Use], Statements | None],
    ) -> None:
        self.file = file
        self.findings = findings
        self._features = features
        self._library = library
        self._names = Names(file, vocabulary, findings)
        self.expressions = Expressions(self._names, vocabulary, findings, features)
        self.units = self.expressions.units
        self.parameters = Parameters(vocabulary, settings, self.units, findings, features)
        self._labels: dict[str, Span] = {}
        self._ordinals: Counter[str] = Counter()
        self._picked = ""
        self._outcomes = _Outcomes()
        self.steps: list[CheckedStep] = []

    def run(self) -> None:
        """Check all statements but the tests.

        Raises:
            CheckEnded: the policy has too many errors or is too large.
        """
        is_library = self.file.kind == "library"
        for statement in self.file.statements:
            if is_library and not isinstance(statement, tree.Param | tree.Def | tree.Use | tree.Broken):
                message = "a library holds only `param`, `def` and `use`"
                self.findings.error("library", statement.span, message, "put the rules into a policy")
            elif not isinstance(statement, tree.Test):
                self.expressions.count(statement.span)
                self._statement(statement)
        if not is_library:
            self.parameters.undeclared(self.file.name_span)
            self._check_end()
        self._check_definitions()

    @property
    def complete(self) -> bool:
        """Whether every outcome parses, so that an unknown rule is an error."""
        return not self._outcomes.broken

    @property
    def labels(self) -> set[str]:
        """The labels of all filters and outcomes."""
        return set(self._labels)

    def warn(self) -> None:
        """Warn of unused names, and of conditions that are always the same."""
        for name, found in self._names.unused():
            word = {tree.Param: "parameter", tree.Let: "value", tree.Def: "definition"}[type(found.statement)]
            word = word if found.origin is None else "import"
            self.findings.warn("unused", found.span, f"{word} `{name}` is never used")
        for span, type_, message in self.expressions.constants:
            if not type_.may & self.parameters.declared.keys():  # it may be a switch
                self.findings.warn("constant", span, message, self.expressions.advice(span))

    # ── one statement ──

    def _statement(self, statement: tree.Statement) -> None:
        if self._outcomes.settled and not isinstance(statement, tree.Broken):
            message = "nothing can reach this: the rule above always applies"
            self.findings.error("unreachable", statement.span, message)
        match statement:
            case tree.Param():
                type_ = self.parameters.declare(statement)
                if type_ is BROKEN:
                    self.parameters.failed.add(statement.name)
                if statement.name in self._features and type_ is not BROKEN:
                    feature = self.expressions.feature(self._features[statement.name])
                    type_ = replace(feature, must=feature.must | {statement.name}, may=feature.may | {statement.name})
                self._names.define(statement.name, statement.name_span, statement, type_)
            case tree.Let():
                type_ = self.expressions.infer(statement.value).named
                if type_.sort is Sort.INSTANCE and not self._picked:
                    self._picked = statement.name
                self._names.define(statement.name, statement.name_span, statement, type_)
            case tree.Def():
                self._names.define_arguments(statement)
                self._names.define(statement.name, statement.name_span, statement)
            case tree.Rule(word="keep" | "prefer", value=tree.Expr() as mask):
                self._filter(statement, mask)
            case tree.Rule(word="route", value=tree.Expr() as pick):
                self._route(statement, pick)
            case tree.Rule(status=tree.Number() as status, message=tree.Text() as text):
                self._reject(statement, status, text)
            case tree.Rule(value=tree.Expr() as patience):
                self._hold(statement, patience)
            case tree.Use():
                self._use(statement)
            case tree.Broken():
                self._outcomes.broken |= statement.word in ("route", "reject", "hold", "policy", "library", "")
                if not statement.word:  # such as `else:`, a condition of the next rule
                    self._outcomes.settled, self._outcomes.guarded = False, True
                if statement.word in ("param", "use"):
                    self.parameters.failed |= set(statement.names)
                for name in statement.names:
                    self._names.define(name, statement.span, None)

    def _use(self, statement: tree.Use) -> None:
        library = self._library(statement)
        if library is not None:
            self.expressions.libraries[library.file.name] = library.expressions
        for name in statement.names:
            found = None if library is None else library.exported(name.name)
            if library is None or found is None:
                if library is not None:
                    self._not_exported(statement.library.name, library, name)
                self.parameters.failed.add(name.name)
                self._names.define(name.name, name.span, None)
                continue
            if name.name in library.parameters.declared:
                self.parameters.adopt(library.parameters, name.name)
                if name.name in library._features:
                    self._features[name.name] = library._features[name.name]
            self._names.define(name.name, name.span, found.statement, found.type, Imported(library.file.name, found))

    def exported(self, name: str) -> Named | None:
        """Return a name that this library defines itself, so that others can take it."""
        found = self._names.own(name)
        return found if found is not None and (found.origin is None or found.statement is None) else None

    def _not_exported(self, owner: str, library: Statements, name: tree.Name) -> None:
        elsewhere = library._names.own(name.name)
        if elsewhere is not None and elsewhere.origin is not None:
            help_text = f"take it from where it is defined: use {elsewhere.origin.library} ({name.name})"
        else:
            help_text = did_you_mean(name.name, library._names.defined)
        self.findings.error("use", name.span, f"library `{owner}` does not define `{name.name}`", help_text)

    def _filter(self, statement: tree.Rule, mask: tree.Expr) -> None:
        if self._picked:
            message = f"filters come before picks, and `{self._picked}` is already picked"
            self.findings.error("filter-order", statement.span, message, "move this line above it")
        guards = self._guards(statement.when)
        found = self.expressions.infer(mask)
        self._label(statement)
        if not found.broken and found.sort is not Sort.BOOL:
            message = f"`{statement.word}` needs a truth value, found {found}"
            self.findings.error("mask", mask.span, message, comparison(found.sort))
        elif not found.broken and not found.vector:
            message = f"`{statement.word}` needs a truth value per instance, found one for all"
            help_text = "a filter that applies sometimes has a `when`; to turn requests away use `reject`"
            self.findings.error("mask", mask.span, message, help_text)
        elif found.decided:
            kept = "every" if found.interval == TRUE else "no"
            message = f"this keeps {kept} candidate in every decision"
            is_outage = kept == "no" and statement.word == "keep" and statement.when is None
            if is_outage and not found.may & self.parameters.declared.keys():
                self.findings.error("outage", mask.span, message, self.expressions.advice(mask.span))
            else:
                self.expressions.same(mask.span, found, message)
        self._add(mask, guards, found, may_end=statement.word == "keep")

    def _route(self, statement: tree.Rule, pick: tree.Expr) -> None:
        guards = self._guards(statement.when)
        found = self.expressions.infer(pick)
        self._label(statement)
        if not found.broken and found.sort is not Sort.INSTANCE:
            message = f"`route` needs an instance, found {found}"
            self.findings.error("route", pick.span, message, "pick one: route argmin(…)")
            found = BROKEN
        self._add(pick, guards, found, may_end=True)
        self._outcome(statement, settled=statement.when is None and not found.maybe, broken=found.broken)

    def _reject(self, statement: tree.Rule, status: tree.Number, message: tree.Text) -> None:
        if not is_error_status(status.value):
            help_text = "use 429 to shed load, and 503 if no instance can serve"
            self.findings.error("status", status.span, f"{exact(status.value)} is not an error status", help_text)
        retry = Type(Sort.NUMBER) if statement.value is None else self.expressions.seconds(statement.value)
        guards = self._guards(statement.when)
        self._label(statement)
        self._add(statement.value or message, guards, retry, may_end=True)
        self._outcome(statement, settled=statement.when is None, broken=False)

    def _hold(self, statement: tree.Rule, patience: tree.Expr) -> None:
        found = self.expressions.seconds(patience)
        if not found.broken and found.interval.high == 0:
            self.expressions.same(patience.span, found, "this holds nothing: its time is up at once")
        if statement.when is None:
            message = "this holds every request until its time is up"
            self.findings.error("hold", statement.span, message, "give it a `when`")
        guards = self._guards(statement.when)
        self._label(statement)
        over = Type(Sort.BOOL).reading(found, Type(Sort.NUMBER, must=_HELD_SO_FAR, may=_HELD_SO_FAR))
        guards.append(CheckedGuard(HELD, patience.span, over, implied=True))
        self._add(patience, guards, Type(Sort.NUMBER), may_end=True)
        self._outcome(statement, settled=False, broken=False)

    def _outcome(self, statement: tree.Rule, *, settled: bool, broken: bool) -> None:
        self._outcomes.last = statement
        self._outcomes.settled |= settled and not broken and not self._outcomes.guarded
        self._outcomes.guarded = False
        self._outcomes.broken |= broken

    def _guards(self, when: tree.Expr | None) -> list[CheckedGuard]:
        definitions = self._names.definitions()
        guards = []
        for part in conjuncts(when):
            found = self.expressions.condition(part)  # refuses expressions too deep to look for calls
            if found.decided:
                self.expressions.same(part.span, found, "this condition is the same in every decision")
            guards.append(CheckedGuard(label_of(part, self.findings.text, definitions), part.span, found))
        return guards

    def _add(self, value: tree.Expr, guards: list[CheckedGuard], found: Type, *, may_end: bool) -> None:
        self.steps.append(CheckedStep(guards, found, quote(self.findings.text, value.span), may_end))

    def _label(self, statement: tree.Rule) -> None:
        """Keep the label of a rule. The default label is its ordinal, as in the plan."""
        word = statement.word
        self._ordinals[word] += 1
        label = statement.label or tree.Name(span=statement.span, name=f"{word}_{self._ordinals[word]}")
        earlier = self._labels.setdefault(label.name, label.span)
        if earlier is not label.span:
            message = f"`{label.name}` already labels {self.findings.line(earlier)}"
            self.findings.error("label", label.span, message)

    # ── the whole file ──

    def _check_end(self) -> None:
        if self._outcomes.settled or self._outcomes.broken:
            return
        if self._outcomes.last is None:
            self.findings.error("undecided", self.file.name_span, "this policy decides nothing", _END)
        else:
            self.findings.error(
                "undecided", self._outcomes.last.span, "the policy may end here without a decision", _END
            )

    def _check_definitions(self) -> None:
        """Check the definitions without a call, and all of a library, with arguments of unknown types."""
        unused = [found for _, found in self._names.unused()]
        for found in list(self._names.defined.values()) if self.file.kind == "library" else unused:
            if isinstance(found.statement, tree.Def) and found.origin is None:
                definition = found.statement
                self.expressions.body(definition, {argument.name: BROKEN for argument in definition.arguments})


def is_error_status(status: float) -> bool:
    """Whether a request can be rejected with *status*."""
    return 400 <= status <= 599 and status % 1 == 0

"""Checker: whether a policy is sound and always decides, and what it reads.

A policy with a parameter that chooses a feature is checked once for each choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from smetric.policy import tree
from smetric.policy.check_statement import Statements
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, PolicyError, PolicyText, Span, in_order
from smetric.policy.guard import reads, wasted_lookups
from smetric.policy.library import Linked, Reader, link, no_libraries, taken
from smetric.policy.parameter import CONFIGURATION, Parameter, ParameterValues, Value
from smetric.policy.parser import read
from smetric.policy.scope import CheckEnded, Findings
from smetric.policy.vocabulary import Kind, Vocabulary

#: Combinations of features that a policy is checked for.
MAX_COMBINATIONS = 16

#: The feature chosen by each feature parameter; the key of a library's parameter is `library.NAME`.
Choice = Mapping[str, str]


# ── one check for each choice of features ────────────────────────────────────


class Pass:
    """Check of a policy with its libraries, for one choice of features."""

    def __init__(
        self,
        file: tree.File,
        linked: Linked,
        vocabulary: Vocabulary,
        settings: ParameterValues,
        choice: Choice,
        beside: PolicyText | None,
        tests: Sequence[tree.Test],
    ) -> None:
        self.choice = choice
        self.libraries: dict[str, Statements] = {}
        self._tests = tests
        self._beside = Findings("" if beside is None else beside.text, beside)
        self._linked = linked
        self._vocabulary = vocabulary
        self._settings = settings
        self._taken = taken(file)
        own = {name: feature for name, feature in choice.items() if "." not in name}
        self.statements = Statements(file, vocabulary, settings, own, Findings(file.text), self._library)

    def run(self) -> None:
        """Check statements, then tests."""
        try:
            self.statements.run()
            self._run_tests(self.statements.file.tests, self.statements.findings)
            self._run_tests(self._tests, self._beside)
        except CheckEnded:
            return

    def _run_tests(self, tests: Sequence[tree.Test], findings: Findings) -> None:
        if tests:
            from smetric.policy.check_tests import Tests  # a router reads no tests

            Tests(self.statements, self._vocabulary, findings).run(tests)

    @property
    def errors(self) -> list[Diagnostic]:
        """The errors of all files."""
        files = [self.statements.findings, self._beside, *(each.findings for each in self.libraries.values())]
        return [error for findings in files for error in findings.errors]

    def conditional(self, error: Diagnostic, sound: Sequence[Pass]) -> Diagnostic:
        """Return an error of this choice with the part of the choice that makes it differ from the *sound* ones."""
        names = [name for name in self.choice if all(each.choice[name] != self.choice[name] for each in sound)]
        names = names or list(self.choice)
        condition = " and ".join(f"{name} = {self.choice[name]}" for name in names)
        help_text = error.help
        if error.code == "units":
            library, _, name = names[0].rpartition(".")
            help_text = f"a unit may be the parameter itself: `0 {name}`"
            if library and (library, name) not in self._taken:
                help_text += f", once it is taken: use {library} ({name})"
        return replace(error, message=f"{error.message}, if {condition}", help=help_text)

    def _library(self, use: tree.Use) -> Statements | None:
        """Return the library of a `use`, checked at its first use; None if it has none."""
        name = self._linked.targets.get(id(use))
        if name is None:
            return None
        if name not in self.libraries:
            file = self._linked.files[name]
            features = {key.partition(".")[2]: word for key, word in self.choice.items() if key.startswith(f"{name}.")}
            # Configuration reaches the parameters that the policy itself takes.
            settings = self._settings.only({own for library, own in self._taken if library == name})
            findings = Findings(file.text, PolicyText(file.text, file.path), self.statements.findings.calls)
            made = Statements(file, self._vocabulary, settings, features, findings, self._library)
            self.libraries[name] = made
            made.run()
        return self.libraries[name]


def merged(passes: Sequence[Pass]) -> list[Diagnostic]:
    """Return the errors of all passes, each once. An error of some choices only names the choice."""
    found: dict[tuple[str, Span, PolicyText | None], list[tuple[Pass, Diagnostic]]] = {}
    for each in passes:
        for error in each.errors:
            found.setdefault((error.code, error.span, error.source), []).append((each, error))
    errors = []
    for hits in found.values():
        first, error = hits[0]
        at_fault = [each for each, _ in hits]
        sound = [each for each in passes if each not in at_fault]
        if sound or len({each.message for _, each in hits}) > 1:
            error = first.conditional(error, sound)
        errors.append(error)
        if len(passes) == 1 or all(each is first for each in at_fault):
            errors += [other for _, other in hits[1:]]
    return errors


def feature_choices(
    file: tree.File, linked: Linked, vocabulary: Vocabulary, settings: ParameterValues
) -> dict[str, tuple[str, ...]]:
    """Return the features that each feature parameter can be, the configured one or else the default first.

    ParameterValues reach the parameters of a library that the policy itself takes.
    """
    found: dict[str, tuple[str, ...]] = {}
    own = taken(file)
    for library, each in (("", file), *linked.files.items()):
        for statement in each.statements:
            if not isinstance(statement, tree.Param) or not isinstance(statement.value, tree.Name):
                continue
            listed = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
            names = dict.fromkeys(item.name for item in (statement.value, *listed) if isinstance(item, tree.Name))
            numbers = (word.name for word in map(vocabulary.features.get, names) if word and word.kind is Kind.NUMBER)
            is_own = not library or (library, statement.name) in own
            chosen = settings.values.get(statement.name) if is_own else None
            features = tuple(sorted(numbers, key=lambda name: name != chosen))
            if features:
                found[f"{library}.{statement.name}" if library else statement.name] = features
    return found


# ── the whole ────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class CheckedLibrary:
    """A library that a policy uses, and its parameters with their values."""

    file: tree.File
    params: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Checked:
    """Facts about a sound policy.

    Args:
        warnings: in the order of the text.
        reads: each feature that a decision may read: `always`, or the guard that may spare it.
        params: each parameter with its value, those taken from libraries included.
        libraries: the libraries that it uses, by name.
        tests_beside: its tests in a file of their own.
    """

    warnings: tuple[Diagnostic, ...]
    reads: Mapping[str, str]
    params: Mapping[str, Parameter]
    libraries: Mapping[str, CheckedLibrary]
    tests_beside: tuple[tree.Test, ...]


def check_text(
    text: str,
    vocabulary: Vocabulary,
    settings: Mapping[str, Value] | None = None,
    path: str = "<policy>",
    libraries: Reader = no_libraries,
    beside: PolicyText | None = None,
    tests: bool = True,
    set_by: str = CONFIGURATION,
) -> tuple[tree.File, Checked]:
    """Parse and check a policy or a library, with syntax errors and others in one run.

    Args:
        text: its source.
        vocabulary: the features and request fields it may read.
        settings: configured values of its parameters.
        path: its name in reports.
        libraries: reads the libraries it uses.
        beside: a file with more tests of the policy, or None.
        tests: False skips the `test` blocks and their errors.
        set_by: the origin of *settings*, in messages.

    Raises:
        PolicyError: with every error of the file, its libraries and its tests.
    """
    file, errors = read(text, path, tests=tests)
    values = ParameterValues(settings or {}, set_by)
    if not file.tests and beside is None:
        return file, check_file(file, vocabulary, values, errors, libraries)
    from smetric.policy.check_tests import check_settings, tests_beside  # a router reads no tests

    more, further = ([], ()) if beside is None else tests_beside(file, beside)
    checked = check_file(file, vocabulary, values, [*errors, *more], libraries, beside, further)
    check_settings(file, [*file.tests, *further], lambda bare, set_: check_file(bare, vocabulary, set_, [], libraries))
    return file, checked


def check_file(
    file: tree.File,
    vocabulary: Vocabulary,
    settings: ParameterValues,
    errors: Sequence[Diagnostic],
    libraries: Reader,
    beside: PolicyText | None = None,
    tests: tuple[tree.Test, ...] = (),
) -> Checked:
    """Check a parsed file with its syntax *errors*; arguments as of `check_text`, and the *tests* that *beside* holds.

    Raises:
        PolicyError: with every error.
    """
    linked = link(file, libraries)
    choices = feature_choices(file, linked, vocabulary, settings)
    done: list[Pass] = []
    for features in itertools.islice(itertools.product(*choices.values()), MAX_COMBINATIONS):
        choice = dict(zip(choices, features, strict=True))
        one = Pass(file, linked, vocabulary, settings, choice, beside, tests)
        one.run()
        done.append(one)
        if len(one.errors) >= MAX_DIAGNOSTICS:
            break
    found = [*errors, *linked.errors, *merged(done)]
    if math.prod(len(features) for features in choices.values()) > MAX_COMBINATIONS:
        message = f"the parameters of this policy choose among more than {MAX_COMBINATIONS} combinations of features"
        found.append(Diagnostic("too-large", message, file.name_span, "let one parameter choose the load"))
    chosen = done[0]
    if any(error.code != "undecided" for error in found):
        raise PolicyError(found, file.text, file.path)
    steps = chosen.statements.steps
    warnings = list(file.stray)
    if file.kind == "policy":
        chosen.statements.warn()
        warnings += [*chosen.statements.findings.warnings, *wasted_lookups(steps, vocabulary)]
    if found:
        # The only error is the end of the policy, so the warnings are no consequences of it.
        raise PolicyError([*found, *warnings], file.text, file.path)
    return Checked(
        in_order(warnings),
        reads(steps, vocabulary),
        dict(chosen.statements.parameters.declared),
        {name: CheckedLibrary(each.file, each.parameters.declared) for name, each in chosen.libraries.items()},
        tests,
    )

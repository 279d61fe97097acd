"""The checker: whether a policy means something and always decides, and what it reads; all errors in one run.

A policy whose parameter may name one of several features is checked once for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from smetric.policy import tree
from smetric.policy.check_statement import Statements
from smetric.policy.check_tests import Tests
from smetric.policy.comment import stray_comments
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, PolicyError, Source, clip, in_order
from smetric.policy.findings import Findings, Stop
from smetric.policy.library import Linked, Reader, link, no_libraries
from smetric.policy.parameter import CONFIGURATION, Parameter, Settings, Value
from smetric.policy.parser import read
from smetric.policy.reads import reads, wasted_lookups
from smetric.policy.span import Span
from smetric.policy.vocabulary import Kind, Vocabulary

#: Combinations of features that a policy may be checked for.
MAX_COMBINATIONS = 16

#: The feature that each feature parameter stands for; one of a library is called `library.NAME`.
Choice = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CheckedLibrary:
    """A library that a policy uses, and its parameters with their values."""

    file: tree.File
    params: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a policy that may be used.

    Args:
        warnings: what does no harm, in the order of the text.
        reads: each feature that a decision may read: `always`, or the guard that may spare it.
        params: each parameter with its value, those taken from libraries included.
        libraries: what it uses, by name.
        tests_beside: those of its tests that stand in a file of their own.
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
    beside: Source | None = None,
    tests: bool = True,
    set_by: str = CONFIGURATION,
) -> tuple[tree.File, Checked]:
    """Parse and check a policy or a library, so that errors of both kinds come in one run.

    Args:
        text: its source.
        vocabulary: the features and request fields it may read.
        settings: configured values of its parameters.
        path: what reports call it.
        libraries: finds the libraries it uses.
        beside: a file with more tests of the policy, where there is one.
        tests: False skips the `test` blocks, and whatever is wrong in them.
        set_by: who gives *settings*, as messages call it.

    Raises:
        PolicyError: with every error of the file, its libraries and its tests.
    """
    file, errors = read(text, path, tests=tests)
    more, further = ([], ()) if beside is None else _tests_beside(file, beside)
    checked = _check(file, vocabulary, Settings(settings or {}, set_by), [*errors, *more], libraries, beside, further)
    _check_settings_of_tests(file, vocabulary, libraries, [*file.tests, *further])
    return file, checked


def _check_settings_of_tests(
    file: tree.File, vocabulary: Vocabulary, libraries: Reader, tests: Sequence[tree.Test]
) -> None:
    """Check a sound policy once more with what its tests set: a parameter without a range may be anything there.

    Raises:
        PolicyError: with what is wrong then, each once.
    """
    bare = replace(file, statements=tuple(each for each in file.statements if not isinstance(each, tree.Test)))
    found: dict[tuple[Source | None, Span], Diagnostic] = {}
    for test in tests:
        try:
            if test.settings:
                _check(bare, vocabulary, Settings(test.configured), [], libraries, None, ())
        except PolicyError as error:
            said = f'with what the test "{clip(test.sentence)}" sets'
            for each in error.diagnostics:
                found.setdefault((each.source, each.span), replace(each, message=f"{each.message}, {said}"))
    if found:
        raise PolicyError(list(found.values()), file.text, file.path)


def _tests_beside(policy: tree.File, beside: Source) -> tuple[list[Diagnostic], tuple[tree.Test, ...]]:
    """The tests in the file *beside*, and what is wrong with that file."""
    try:
        file, errors = read(beside.text, beside.path)
    except PolicyError as error:
        return [found.within(beside) for found in error.diagnostics], ()
    found = [each.within(beside) for each in errors]
    if file.name != policy.name and file.name and policy.name:
        message = f"this file is beside `policy {policy.name}`, and says that it is of `{file.name}`"
        found.append(
            Diagnostic("header", message, file.name_span, "it starts with the policy's own line", source=beside)
        )
    for statement in file.statements:
        if not isinstance(statement, tree.Test | tree.Broken):
            message = "a file of tests holds `test` blocks only"
            found.append(Diagnostic("test", message, statement.span, "put it into the policy", source=beside))
    return found, tuple(statement for statement in file.statements if isinstance(statement, tree.Test))


def check(
    file: tree.File,
    vocabulary: Vocabulary,
    settings: Mapping[str, Value] | None = None,
    libraries: Reader = no_libraries,
) -> Checked:
    """`check_text` of a file that is parsed already."""
    return _check(file, vocabulary, Settings(settings or {}), [], libraries, None, ())


def _check(
    file: tree.File,
    vocabulary: Vocabulary,
    settings: Settings,
    errors: Sequence[Diagnostic],
    libraries: Reader,
    beside: Source | None,
    tests: tuple[tree.Test, ...],
) -> Checked:
    linked = link(file, libraries)
    choices = _feature_choices(file, linked, vocabulary)
    combinations = _combinations(choices, settings)
    passes = [_Pass(file, linked, vocabulary, settings, combination, beside, tests) for combination in combinations]
    done: list[_Pass] = []
    for each in passes:
        each.run()
        done.append(each)
        if len(each.errors) >= MAX_DIAGNOSTICS:
            break
    found = [*errors, *linked.errors, *_merge(done)]
    if math.prod(len(features) for features in choices.values()) > MAX_COMBINATIONS:
        message = f"the parameters of this policy choose among more than {MAX_COMBINATIONS} combinations of features"
        found.append(Diagnostic("too-large", message, file.name_span, "let one parameter choose the load"))
    chosen = done[0]
    if any(error.code != "undecided" for error in found):
        raise PolicyError(found, file.text, file.path)
    steps = chosen.statements.steps
    header = file.text.rfind(file.kind, 0, file.name_span.start)
    starts = [header, *(statement.span.start for statement in file.statements), *file.skipped]
    warnings = stray_comments(file.text, starts)
    if file.kind == "policy":
        chosen.statements.warn()
        warnings += [*chosen.statements.findings.warnings, *wasted_lookups(steps, vocabulary)]
    if found:
        # What is written is sound and only goes on too little: what else there is to say of it is no echo.
        raise PolicyError([*found, *warnings], file.text, file.path)
    return Checked(
        in_order(warnings),
        reads(steps, vocabulary),
        dict(chosen.statements.parameters.declared),
        {name: CheckedLibrary(each.file, each.parameters.declared) for name, each in chosen.libraries.items()},
        tests,
    )


class _Pass:
    """One check of a policy with its libraries, for one choice of features."""

    def __init__(
        self,
        file: tree.File,
        linked: Linked,
        vocabulary: Vocabulary,
        settings: Settings,
        choice: Choice,
        beside: Source | None,
        tests: Sequence[tree.Test],
    ) -> None:
        self.choice = choice
        self._tests = tests
        self._beside = Findings("" if beside is None else beside.text, beside)
        self.libraries: dict[str, Statements] = {}
        self._linked = linked
        self._vocabulary = vocabulary
        self._settings = settings
        self._taken = {
            (use.library.name, name.name)
            for use in file.statements
            if isinstance(use, tree.Use)
            for name in use.names
        }  # fmt: skip
        findings = Findings(file.text)
        own = {name: feature for name, feature in choice.items() if "." not in name}
        self.statements = Statements(file, vocabulary, settings, own, findings, self._library)

    def run(self) -> None:
        """Check statements, then tests."""
        try:
            self.statements.run()
            own = [each for each in self.statements.file.statements if isinstance(each, tree.Test)]
            Tests(self.statements, self._vocabulary, self.statements.findings).run(own)
            Tests(self.statements, self._vocabulary, self._beside).run(self._tests)
        except Stop:
            return

    def takes(self, library: str, name: str) -> bool:
        """Whether the policy takes *name* from *library*."""
        return (library, name) in self._taken

    @property
    def errors(self) -> list[Diagnostic]:
        """The errors of all files."""
        files = [self.statements.findings, self._beside, *(each.findings for each in self.libraries.values())]
        return [error for findings in files for error in findings.errors]

    def _library(self, use: tree.Use) -> Statements | None:
        """The library that *use* means, checked when it is first asked for."""
        name = self._linked.targets.get(id(use))
        if name is None:
            return None
        if name not in self.libraries:
            file = self._linked.files[name]
            features = {key.partition(".")[2]: word for key, word in self.choice.items() if key.startswith(f"{name}.")}
            # Configuration reaches the parameters that the policy itself takes.
            settings = self._settings.only({taken for library, taken in self._taken if library == name})
            findings = Findings(file.text, Source(file.text, file.path), self.statements.findings.calls)
            made = Statements(file, self._vocabulary, settings, features, findings, self._library)
            self.libraries[name] = made
            made.run()
        return self.libraries[name]


def _feature_choices(file: tree.File, linked: Linked, vocabulary: Vocabulary) -> dict[str, tuple[str, ...]]:
    """The choices of each feature parameter, its default first; those that are no features left out."""
    found: dict[str, tuple[str, ...]] = {}
    for prefix, statement in _parameters(file, linked):
        if isinstance(statement.value, tree.Name):
            listed = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
            names = dict.fromkeys(item.name for item in (statement.value, *listed) if isinstance(item, tree.Name))
            features = tuple(
                name for name in names if name in vocabulary.features and vocabulary.features[name].kind is Kind.NUMBER
            )
            if features:
                found[prefix + statement.name] = features
    return found


def _parameters(file: tree.File, linked: Linked) -> Iterator[tuple[str, tree.Param]]:
    """The `param`s of a policy and its libraries, with what goes before their names in a `Choice`."""
    for prefix, each in (("", file), *((f"{name}.", library) for name, library in linked.files.items())):
        yield from ((prefix, statement) for statement in each.statements if isinstance(statement, tree.Param))


def _combinations(choices: Mapping[str, tuple[str, ...]], settings: Settings) -> list[Choice]:
    """All choices of features, the configured one first, cut at `MAX_COMBINATIONS`."""
    ordered = {
        name: sorted(features, key=lambda feature, name=name: feature != settings.values.get(name.rpartition(".")[2]))  # type: ignore[misc]
        for name, features in choices.items()
    }
    products = itertools.islice(itertools.product(*ordered.values()), MAX_COMBINATIONS)
    return [dict(zip(ordered, product, strict=True)) for product in products]


def _merge(passes: Sequence[_Pass]) -> list[Diagnostic]:
    """The errors of all passes, each once; one that only some choices bring says which."""
    found: dict[tuple[str, int, int, Source | None], list[tuple[_Pass, Diagnostic]]] = {}
    for each in passes:
        for error in each.errors:
            key = (error.code, error.span.start, error.span.end, error.source)
            found.setdefault(key, []).append((each, error))
    merged = []
    for hits in found.values():
        first, error = hits[0]
        if len({id(each) for each, _ in hits}) < len(passes) or len({e.message for _, e in hits}) > 1:
            error = _conditional(error, first, [each for each, _ in hits], passes)
        merged.append(error)
        if len(passes) == 1 or all(each is first for each, _ in hits):
            merged += [other for _, other in hits[1:]]
    return merged


def _conditional(error: Diagnostic, first: _Pass, hits: Sequence[_Pass], passes: Sequence[_Pass]) -> Diagnostic:
    """An error of some choices only, with the choice that brings it."""
    free = {id(each) for each in passes} - {id(each) for each in hits}
    sound = [each.choice for each in passes if id(each) in free]
    names = [name for name in first.choice if all(choice[name] != first.choice[name] for choice in sound)]
    named = names or list(first.choice)
    condition = " and ".join(f"{name} = {first.choice[name]}" for name in named)
    help_text = error.help
    if error.code == "units":
        library, _, name = named[0].rpartition(".")
        help_text = f"a unit may be the parameter itself: `0 {name}`"
        if library and not first.takes(library, name):
            help_text += f", once it is taken: use {library} ({name})"
    return replace(error, message=f"{error.message}, if {condition}", help=help_text)

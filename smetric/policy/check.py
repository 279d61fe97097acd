"""The checker: whether a policy means something and always decides, and what it reads; all errors in one run.

A policy whose parameter may name one of several features is checked once for each of them, by a `Pass` of `check_pass`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smetric.policy import tree
from smetric.policy.check_pass import Pass, merged
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, PolicyError, Source, clip, in_order
from smetric.policy.feature_choice import MAX_COMBINATIONS, combinations, feature_choices
from smetric.policy.library import Reader, link, no_libraries
from smetric.policy.parameter import CONFIGURATION, Parameter, Settings, Value
from smetric.policy.parser import read
from smetric.policy.reads import reads, wasted_lookups
from smetric.policy.span import Span
from smetric.policy.vocabulary import Vocabulary


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
    tried: list[dict[str, Any]] = [{}]
    for test in tests:
        if test.configured in tried:
            continue
        tried.append(test.configured)
        try:
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
    choices = feature_choices(file, linked, vocabulary, settings)
    done: list[Pass] = []
    for choice in combinations(choices):
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
        # What is written is sound and only goes on too little: what else there is to say of it is no echo.
        raise PolicyError([*found, *warnings], file.text, file.path)
    return Checked(
        in_order(warnings),
        reads(steps, vocabulary),
        dict(chosen.statements.parameters.declared),
        {name: CheckedLibrary(each.file, each.parameters.declared) for name, each in chosen.libraries.items()},
        tests,
    )

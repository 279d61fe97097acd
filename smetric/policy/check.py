"""The checker: whether a policy means something and always decides, and what it reads; all errors in one run.

A policy whose parameter may name one of several features is checked once for each of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from smetric.policy import tree
from smetric.policy.check_statement import Statements
from smetric.policy.check_tests import Tests
from smetric.policy.comment import stray_comments
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, PolicyError, in_order
from smetric.policy.findings import Findings, Stop
from smetric.policy.parameter import Parameter, Value
from smetric.policy.parser import read
from smetric.policy.reads import reads, wasted_lookups
from smetric.policy.vocabulary import Kind, Vocabulary

#: Combinations of features that a policy may be checked for.
MAX_COMBINATIONS = 16

Choice = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Checked:
    """What is known of a policy that may be used.

    Args:
        warnings: what does no harm, in the order of the text.
        reads: each feature that a decision may read: `always`, or the guard that may spare it.
        params: each parameter with its value.
    """

    warnings: tuple[Diagnostic, ...]
    reads: Mapping[str, str]
    params: Mapping[str, Parameter]


def check_text(
    text: str, vocabulary: Vocabulary, settings: Mapping[str, Value] | None = None, path: str = "<policy>"
) -> tuple[tree.File, Checked]:
    """Parse and check a policy, so that errors of both kinds come in one run.

    Raises:
        PolicyError: with every error of the file.
    """
    file, errors = read(text, path)
    return file, _check(file, vocabulary, settings or {}, errors)


def check(file: tree.File, vocabulary: Vocabulary, settings: Mapping[str, Value] | None = None) -> Checked:
    """Check a parsed policy.

    Args:
        file: the policy.
        vocabulary: the features and request fields it may read.
        settings: configured values of its parameters.

    Raises:
        PolicyError: with every error of the file.
    """
    return _check(file, vocabulary, settings or {}, [])


def _check(
    file: tree.File, vocabulary: Vocabulary, settings: Mapping[str, Value], errors: Sequence[Diagnostic]
) -> Checked:
    choices = _feature_choices(file, vocabulary)
    combinations = _combinations(choices, settings)
    passes = [_Pass(file, vocabulary, settings, combination) for combination in combinations]
    done: list[_Pass] = []
    for each in passes:
        each.run()
        done.append(each)
        if len(each.findings.errors) >= MAX_DIAGNOSTICS:
            break
    found = [*errors, *_merge(done)]
    if math.prod(len(features) for features in choices.values()) > MAX_COMBINATIONS:
        message = f"the parameters of this policy choose among more than {MAX_COMBINATIONS} combinations of features"
        found.append(Diagnostic("too-large", message, file.name_span, "let one parameter choose the load"))
    if found:
        raise PolicyError(found, file.text, file.path)
    chosen = done[0]
    chosen.statements.warn()
    header = file.text.rfind("policy", 0, file.name_span.start)
    stray = stray_comments(file.text, [header, *(statement.span.start for statement in file.statements)])
    wasted = wasted_lookups(chosen.statements.steps, vocabulary)
    warnings = [*chosen.findings.warnings, *stray, *wasted]
    return Checked(
        in_order(warnings), reads(chosen.statements.steps, vocabulary), dict(chosen.statements.parameters.declared)
    )


class _Pass:
    """One check of a file, for one choice of features."""

    def __init__(self, file: tree.File, vocabulary: Vocabulary, settings: Mapping[str, Value], choice: Choice) -> None:
        self.choice = choice
        self.findings = Findings(file.text)
        self.statements = Statements(file, vocabulary, settings, choice, self.findings)
        self._file = file
        self._vocabulary = vocabulary

    def run(self) -> None:
        """Check statements, then tests."""
        try:
            self.statements.run()
            tests = Tests(self.statements, self._vocabulary, self.findings)
            tests.run(statement for statement in self._file.statements if isinstance(statement, tree.Test))
        except Stop:
            return


def _feature_choices(file: tree.File, vocabulary: Vocabulary) -> dict[str, tuple[str, ...]]:
    """The choices of each feature parameter of a file, its default first; those that are no features left out."""
    found: dict[str, tuple[str, ...]] = {}
    for statement in file.statements:
        if isinstance(statement, tree.Param) and isinstance(statement.value, tree.Name):
            listed = statement.domain.items if isinstance(statement.domain, tree.Choices) else ()
            names = dict.fromkeys(item.name for item in (statement.value, *listed) if isinstance(item, tree.Name))
            features = tuple(
                name for name in names if name in vocabulary.features and vocabulary.features[name].kind is Kind.NUMBER
            )
            if features:
                found[statement.name] = features
    return found


def _combinations(choices: Mapping[str, tuple[str, ...]], settings: Mapping[str, Value]) -> list[Choice]:
    """All choices of features, the configured one first, cut at `MAX_COMBINATIONS`."""
    ordered = {
        name: sorted(features, key=lambda feature, name=name: feature != settings.get(name))  # type: ignore[misc]
        for name, features in choices.items()
    }
    products = itertools.islice(itertools.product(*ordered.values()), MAX_COMBINATIONS)
    return [dict(zip(ordered, product, strict=True)) for product in products]


def _merge(passes: Sequence[_Pass]) -> list[Diagnostic]:
    """The errors of all passes, each once; one that only some choices bring says which."""
    found: dict[tuple[str, int, int], list[tuple[_Pass, Diagnostic]]] = {}
    for each in passes:
        for error in each.findings.errors:
            key = (error.code, error.span.start, error.span.end)
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
    help_text = f"a unit may be the parameter itself: `0 {named[0]}`" if error.code == "units" else error.help
    return replace(error, message=f"{error.message}, if {condition}", help=help_text)

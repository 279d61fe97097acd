"""One check of a policy with its libraries, for one choice of features; and what all of them found, said once.

Which choices there are is `feature_choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smetric.policy import tree
from smetric.policy.check_statement import Statements
from smetric.policy.check_tests import Tests
from smetric.policy.diagnostic import Diagnostic, Source
from smetric.policy.feature_choice import Choice
from smetric.policy.findings import Findings, Stop
from smetric.policy.library import Linked, taken
from smetric.policy.parameter import Settings
from smetric.policy.vocabulary import Vocabulary


class Pass:
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
        self._taken = taken(file)
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
            settings = self._settings.only({own for library, own in self._taken if library == name})
            findings = Findings(file.text, Source(file.text, file.path), self.statements.findings.calls)
            made = Statements(file, self._vocabulary, settings, features, findings, self._library)
            self.libraries[name] = made
            made.run()
        return self.libraries[name]


def merged(passes: Sequence[Pass]) -> list[Diagnostic]:
    """The errors of all passes, each once; one that only some choices bring says which."""
    found: dict[tuple[str, int, int, Source | None], list[tuple[Pass, Diagnostic]]] = {}
    for each in passes:
        for error in each.errors:
            key = (error.code, error.span.start, error.span.end, error.source)
            found.setdefault(key, []).append((each, error))
    errors = []
    for hits in found.values():
        first, error = hits[0]
        if len({id(each) for each, _ in hits}) < len(passes) or len({e.message for _, e in hits}) > 1:
            error = _conditional(error, first, [each for each, _ in hits], passes)
        errors.append(error)
        if len(passes) == 1 or all(each is first for each, _ in hits):
            errors += [other for _, other in hits[1:]]
    return errors


def _conditional(error: Diagnostic, first: Pass, hits: Sequence[Pass], passes: Sequence[Pass]) -> Diagnostic:
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

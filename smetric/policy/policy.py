"""Loaded policy: parameters, reads, and its pure decision function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from smetric.policy import tree
from smetric.policy.check import Checked, check_text
from smetric.policy.code import TooLargeError
from smetric.policy.compiler import Compiler
from smetric.policy.decision import Decision, Need
from smetric.policy.diagnostic import Diagnostic, PolicyError, PolicyText, Severity
from smetric.policy.guard import ALWAYS
from smetric.policy.library import Reader, no_libraries
from smetric.policy.parameter import CONFIGURATION
from smetric.policy.plan import Plan, Term, columns_of, fields_of
from smetric.policy.resolver import Resolver
from smetric.policy.snapshot import Snapshot
from smetric.policy.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Lookup:
    """A look-up feature that a policy reads.

    Args:
        always: whether every decision asks for it.
        asked_by: labels of the guards, filters and rules that may be the first to ask for it.
    """

    always: bool
    asked_by: tuple[str, ...]


class Policy:
    """A policy file with values for its parameters, made by `load`.

    It holds no state: one object serves live traffic, replay, tests and simulation at once.
    """

    def __init__(self, file: tree.File, checked: Checked, vocabulary: Vocabulary) -> None:
        self.name = file.name
        self.path = file.path
        self.doc = file.doc
        #: The text of each library it uses, by name.
        self.libraries: Mapping[str, PolicyText] = {
            name: PolicyText(library.file.text, library.file.path)
            for name, library in sorted(checked.libraries.items())
        }
        self.digest = digest_of(file.text, self.libraries)
        self.source = file.text
        self.params = checked.params
        self.warnings = checked.warnings
        self.tests = file.tests
        #: Filters and outcomes, in the order of the file.
        self.plan: Plan = Resolver(file, vocabulary, checked).plan()
        self._vocabulary = vocabulary
        compiler = self._compiler()
        self._decide: Callable[..., Decision | Need] = compiler.compile()
        #: The features that a decision may read, in the order in which the policy reads them.
        self.asks: tuple[str, ...] = tuple(
            dict.fromkeys(part.feature for term in self.plan.terms for part in columns_of(term))
        )
        self.reads = frozenset(self.asks)
        #: The request fields that a decision may read.
        self.fields: frozenset[str] = frozenset(name for term in self.plan.terms for name in fields_of(term))
        self.lookups: Mapping[str, Lookup] = {
            name: Lookup(checked.reads.get(name) == ALWAYS, tuple(compiler.asked_by[name]))
            for name in sorted(self.reads)
            if vocabulary.features[name].lookup
        }
        #: The look-ups that every decision asks for.
        self.lookups_always = frozenset(name for name, lookup in self.lookups.items() if lookup.always)
        self._probes: dict[tuple[int, int], Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return f"<Policy {self.name} {self.digest}>"

    def decide(self, snapshot: Snapshot, request: Any, cursors: Mapping[str, str], seed: int) -> Decision | Need:
        """Decide, or return the look-ups that are needed first. Pure: the same arguments give the same answer.

        Args:
            snapshot: at least one candidate, and a column for every feature in `reads` that is no look-up.
            request: an object with the vocabulary's request fields as attributes; None if unknown.
            cursors: the id of the last winner of each pick that rotates (see `Decision.cursors`); may lack some.
            seed: any 64 bits, drawn once for each request and kept while it is evaluated again.
        """
        return self._decide(self, snapshot, request, cursors, seed)

    def unfilled(self, filled: Container[str]) -> tuple[Diagnostic, ...]:
        """A warning for each look-up and each measured feature that the configured sources have not *filled*."""
        found: dict[str, Diagnostic] = {}
        parts = [part for term in self.plan.terms for part in columns_of(term)]
        for name, span in sorted(((part.feature, part.span) for part in parts), key=lambda place: place[1].start):
            feature = self._vocabulary.features[name]
            if (feature.lookup or feature.measured) and name not in filled and name not in found:
                instead = f"`{feature.instead}`" if feature.instead else f"{feature.default:g}"
                help_text = f"it is unknown everywhere; arithmetic sees {instead} in its place"
                message = f"no configured source fills `{name}`"
                found[name] = Diagnostic("unfilled", message, span, help_text, Severity.WARNING)
        return tuple(found.values())

    def python(self) -> str:
        """The text of the Python function that decides."""
        return self._compiler().python()

    def probe(self, decision: Decision, before: int, term: Term) -> Any:
        """The value of *term* in *decision* as step number *before* saw it, or a list with one value per candidate.

        None if it reads a look-up that the decision did without. Compiled on first use.
        """
        key = (before, id(term))
        if key not in self._probes:
            self._probes[key] = self._compiler().probe(before, term)
        return self._probes[key](self, decision.snapshot, decision.request, decision.used, decision.seed)

    def _compiler(self) -> Compiler:
        return Compiler(self.plan, self._vocabulary, self.source, self.path)


def digest_of(text: str, libraries: Mapping[str, PolicyText]) -> str:
    """The first 12 hex digits of the SHA-256 of a policy's *text* and its *libraries*."""
    digest = hashlib.sha256(text.encode())
    for name, library in sorted(libraries.items()):
        digest.update(f"\0{name}\0{library.text}".encode())
    return digest.hexdigest()[:12]


def load(
    source: str,
    vocabulary: Vocabulary,
    *,
    path: str = "<policy>",
    settings: Mapping[str, float | str | bool] | None = None,
    libraries: Reader = no_libraries,
    set_by: str = CONFIGURATION,
) -> Policy:
    """Parse, check and compile a policy. Its tests are not checked: an error in a test does not stop a policy.

    Args:
        source: the text of the file.
        vocabulary: the features and request fields it may read.
        path: its name in errors and tracebacks.
        settings: configured values of its parameters.
        libraries: finds the libraries it uses.
        set_by: the origin of *settings* in messages.

    Raises:
        PolicyError: with all errors.
    """
    file, checked = check_text(source, vocabulary, settings, path, libraries, tests=False, set_by=set_by)
    return compiled(file, checked, vocabulary)


def compiled(file: tree.File, checked: Checked, vocabulary: Vocabulary) -> Policy:
    """Compile a checked policy.

    Raises:
        PolicyError: it is a library, or compiles to too much code.
    """
    if file.kind == "library":
        message = f"`{file.name}` is a library, which decides nothing"
        fault = Diagnostic("library", message, file.name_span, "name a policy that uses it")
        raise PolicyError([fault], file.text, file.path)
    try:
        return Policy(file, checked, vocabulary)
    except (TooLargeError, RecursionError) as error:
        message = "this policy branches and nests into too much code"
        help_text = "shorten chains of `let`s that build on each other, above all below `if`, `and` and `or`"
        found = Diagnostic("too-large", message, file.name_span, help_text)
        raise PolicyError([found], file.text, file.path) from error

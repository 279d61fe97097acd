"""Loaded policy: name, reads, and its pure decision function."""

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
from smetric.policy.diagnostic import Diagnostic, PolicyError, Severity, Source, Span
from smetric.policy.guard import ALWAYS
from smetric.policy.library import Reader, no_libraries
from smetric.policy.parameter import CONFIGURATION
from smetric.policy.plan import Pick, Plan, Term, columns_of, fields_of
from smetric.policy.resolver import Resolver
from smetric.policy.snapshot import Snapshot
from smetric.policy.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Lookup:
    """A look-up feature that a policy reads.

    Args:
        always: every decision asks for it.
        asked_by: labels of the guards, filters and rules that may be the first to ask; it is spared before them.
    """

    always: bool
    asked_by: tuple[str, ...]


class Policy:
    """One policy file with its parameters settled. Make one with `load`.

    It holds no state: the same object serves live traffic, replay, tests and simulation at once.
    """

    def __init__(
        self,
        file: tree.File,
        checked: Checked,
        vocabulary: Vocabulary,
    ) -> None:
        #: As the file says, the file's name, its documentation, and the first 12 hex digits of the SHA-256 of its text
        #: and its libraries.
        self.name = file.name
        self.path = file.path
        self.doc = file.doc
        #: The text of each library it uses, by name.
        self.libraries: Mapping[str, Source] = {
            name: Source(library.file.text, library.file.path) for name, library in sorted(checked.libraries.items())
        }
        self.digest = digest_of(file.text, self.libraries)
        self.source = file.text
        self.params = checked.params
        #: What the checker found that does no harm.
        self.warnings = checked.warnings
        #: Filters and outcomes, in the order of the file.
        self.plan: Plan = Resolver(file, vocabulary, checked).plan()
        #: The picks of the file, by site.
        self.picks: tuple[Pick, ...] = self.plan.picks
        self.tests = file.tests
        self._vocabulary = vocabulary
        plan = self.plan
        compiled = Compiler(plan, vocabulary, file.text, file.path).compile()
        terms = plan.terms
        #: Every feature that some decision may read, in the order in which the policy asks for them.
        self.asks: tuple[str, ...] = tuple(dict.fromkeys(part.feature for term in terms for part in columns_of(term)))
        self.reads = frozenset(self.asks)
        #: Every request field that some decision may read.
        self.fields: frozenset[str] = frozenset(name for term in terms for name in fields_of(term))
        #: The features that cost a look-up.
        self.lookups: Mapping[str, Lookup] = {
            name: Lookup(checked.reads.get(name) == ALWAYS, compiled.asked_by[name])
            for name in sorted(self.reads)
            if vocabulary.features[name].lookup
        }
        #: Those that every decision asks for.
        self.lookups_always = frozenset(name for name, lookup in self.lookups.items() if lookup.always)
        self._decide: Callable[..., Decision | Need] = compiled.decide
        self._probes: dict[tuple[int, int], Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return f"<Policy {self.name} {self.digest}>"

    def decide(self, snapshot: Snapshot, request: Any, cursors: Mapping[str, str], seed: int) -> Decision | Need:
        """Decide, or say which look-ups are needed first. Pure: the same arguments give the same answer.

        Args:
            snapshot: at least one candidate, and a column for every feature in `reads` that is no look-up.
            request: an object with the vocabulary's request fields as attributes; None where unknown.
            cursors: the id of the last winner of each pick that rotates (see `Decision.cursors`); may lack some.
            seed: any 64 bits, drawn anew for every request and kept while it is evaluated again.
        """
        return self._decide(self, snapshot, request, cursors, seed)

    def unfilled(self, filled: Container[str]) -> tuple[Diagnostic, ...]:
        """A warning for each look-up, and each measured feature, that the configured sources have not *filled*."""
        places: dict[str, Span] = {}
        for term in self.plan.terms:
            for part in columns_of(term):
                if self._needs_source(part.feature) and part.feature not in filled:
                    first = places.setdefault(part.feature, part.span)
                    places[part.feature] = min(first, part.span, key=lambda span: span.start)
        return tuple(
            Diagnostic(
                "unfilled",
                f"no configured source fills `{name}`",
                span,
                f"it is unknown everywhere; arithmetic sees {self._in_place_of(name)} in its place",
                Severity.WARNING,
            )
            for name, span in sorted(places.items(), key=lambda item: item[1].start)
        )

    def _needs_source(self, name: str) -> bool:
        feature = self._vocabulary.features[name]
        return feature.lookup or feature.measured

    def _in_place_of(self, name: str) -> str:
        feature = self._vocabulary.features[name]
        return f"`{feature.instead}`" if feature.instead else f"{feature.default:g}"

    def python(self) -> str:
        """The Python that decides, to read: the file is compiled into one function, and this is its text."""
        return Compiler(self.plan, self._vocabulary, self.source, self.path).python()

    def probe(self, decision: Decision, before: int, term: Term) -> Any:
        """What *term* was in *decision* as step number *before* saw it: a value, or a list with one per candidate.

        None where it reads a look-up that the decision did without. Compiled when first asked for.
        """
        key = (before, id(term))
        probe = self._probes.get(key)
        if probe is None:
            probe = Compiler(self.plan, self._vocabulary, self.source, self.path).probe(before, term)
            self._probes[key] = probe
        return probe(self, decision.snapshot, decision.request, decision.used, decision.seed)


def digest_of(text: str, libraries: Mapping[str, Source]) -> str:
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
    """Parse, check and compile a policy, all but its tests: they are for `testing`, and nothing in them stops a policy.

    Args:
        source: the text of the file.
        vocabulary: the features and request fields it may read.
        path: its name in errors and tracebacks.
        settings: configured values of its parameters.
        libraries: finds the libraries it uses.
        set_by: who gives *settings*, as messages call it.

    Raises:
        PolicyError: with everything that is wrong with it.
    """
    file, checked = check_text(source, vocabulary, settings, path, libraries, tests=False, set_by=set_by)
    return compiled(file, checked, vocabulary)


def compiled(file: tree.File, checked: Checked, vocabulary: Vocabulary) -> Policy:
    """Compile a policy that was checked.

    Raises:
        PolicyError: it is a library, or would become too much code.
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

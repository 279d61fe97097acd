"""A situation to decide in, written down: what is known of the candidates and of the request, cursors and seed.

Tests of policies, snapshot files, and the search for counterexamples all come to this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from smetric.policy.decision import Decision, Need
from smetric.policy.policy import Policy
from smetric.policy.snapshot import Snapshot
from smetric.policy.vocabulary import Feature, Kind, RequestField, Vocabulary


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision depends on besides the policy.

    Args:
        ids: the candidates.
        cells: per feature, what each candidate has, None where unknown; a feature left out is unknown everywhere.
        ages: per feature, the age of each cell in seconds, None for never; a feature left out is new.
        request: the fields that are given, None where unknown; the others have their defaults, and one that bounds
            others, as the prompt's length bounds a hit, is at least what these are.
        cursors: the id of the last winner of each pick that rotates; may lack some.
        seed: settles what is drawn.
    """

    ids: Sequence[str]
    cells: Mapping[str, Sequence[Any]]
    ages: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    cursors: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def decide(
        self, policy: Policy, vocabulary: Vocabulary, cursors: Mapping[str, str] | None = None, seed: int | None = None
    ) -> Decision:
        """What *policy* decides here, perhaps with other cursors and another seed.

        Look-ups that nothing is said about are asked for where they are needed, and come back unknown.
        """
        request = self.asking(vocabulary)
        columns: dict[str, list[Any]] = {}
        known: dict[str, list[bool] | None] = {}
        stamps = {name: [None if age is None else -age for age in ages] for name, ages in self.ages.items()}
        wanted = {name for name in policy.reads if name in self.cells or not vocabulary.features[name].lookup}
        while True:
            for name in wanted:
                columns[name], known[name] = self._column(vocabulary, name, request)
            decided = policy.decide(
                Snapshot(self.ids, columns, known, stamps),
                request,
                self.cursors if cursors is None else cursors,
                self.seed if seed is None else seed,
            )
            if not isinstance(decided, Need):
                return decided
            wanted = set(decided.features)  # each is asked for once

    def asking(self, vocabulary: Vocabulary) -> SimpleNamespace:
        """The whole request."""
        words = vocabulary.request
        fields = {name: clamped(self.request.get(name, word.default), word) for name, word in words.items()}
        bounded = [(vocabulary.features[name].at_most, values) for name, values in self.cells.items()]
        bounded += [(words[name].at_most, [value]) for name, value in self.request.items()]
        for bound, values in bounded:
            if bound and bound not in self.request:
                fields[bound] = max([fields[bound], *(value for value in values if value is not None)])
        for name, word in words.items():
            if word.at_most:
                fields[name] = clamped(fields[name], word, fields[word.at_most])
        return SimpleNamespace(**fields)

    def _column(
        self, vocabulary: Vocabulary, name: str, request: SimpleNamespace
    ) -> tuple[list[Any], list[bool] | None]:
        """A feature's values as policies see them, and which of them are known."""
        feature = vocabulary.features[name]
        cells = self.cells.get(name)
        if cells is None:
            cells = self.ids if name == "id" else [None] * len(self.ids)
        highest = getattr(request, feature.at_most) if feature.at_most else None
        instead = self._column(vocabulary, feature.instead, request)[0] if feature.instead else None
        return feature.fill([clamped(cell, feature, highest) for cell in cells], instead)


def clamped(value: Any, word: Feature | RequestField, highest: float | None = None) -> Any:
    """*value*, of a feature or field, within its range and at most *highest*; what is no number stays as it is."""
    if value is None or word.kind is not Kind.NUMBER:
        return value
    return max(word.low, min(value, word.high if highest is None else min(word.high, highest)))

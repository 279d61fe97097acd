"""Small fleets in which a policy may go wrong: situations made of the numbers and strings that it names.

They are the same each time, the smallest fleets first. What is looked for in them is `properties`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from smetric.policy.plan import Plan
from smetric.policy.policy import Policy
from smetric.policy.situation import Situation, clamped
from smetric.policy.term import Const, walk
from smetric.policy.testing import SEEDS
from smetric.policy.vocabulary import Feature, Kind, RequestField, Vocabulary

#: Candidates of the fleets, smallest first.
SIZES = (1, 2, 3, 4)
_NAMES = ("a", "b", "c", "d")
#: Numbers tried for what is not bounded by 1, and for what is; sums of them are exact.
_NUMBERS = (0.0, 1.0, 2.0, 3.0, 5.0, 20.0, 450.0, 900.0)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: How often a cell, or a field that may be, is unknown.
_UNKNOWN = 0.1


class SmallFleets:
    """Draws situations for one policy.

    Args:
        policy: whose numbers and strings are tried.
        vocabulary: features and request fields.
    """

    def __init__(self, policy: Policy, vocabulary: Vocabulary) -> None:
        self._policy = policy
        self._vocabulary = vocabulary
        self._chance = random.Random(0)
        constants = _constants(policy.plan)
        self._numbers = sorted({value for value in constants if isinstance(value, float)})
        self._strings = sorted({value for value in constants if isinstance(value, str)} | {"", "x"})

    def draw(self, count: int) -> Iterator[Situation]:
        """*count* situations, as many of each size."""
        for size in SIZES:
            for _ in range(count // len(SIZES)):
                yield self._situation(size)

    def _situation(self, size: int) -> Situation:
        chance = self._chance
        request = {
            word.name: self._request_value(word)
            for word in self._vocabulary.request.values()
            if word.name in self._policy.fields
        }
        bounds = {
            feature.at_most: chance.choice((100.0, 1000.0, 4000.0))
            for feature in self._vocabulary.features.values()
            if feature.at_most and feature.name in self._policy.reads
        }
        request |= {name: bound for name, bound in bounds.items() if name not in request or request[name] <= 1.0}
        cells = {
            name: [self._cell(self._vocabulary.features[name], request) for _ in range(size)]
            for name in sorted(self._policy.reads)
            if name != "id"
        }
        names = list(_NAMES[:size])
        chance.shuffle(names)
        rotating = self._policy.plan.rotating
        # One memory for all, as `given last` of the test that a counterexample is written as.
        cursors = dict.fromkeys(rotating, chance.choice(names)) if chance.random() < 0.5 and rotating else {}
        return Situation(names, cells, {}, request, cursors, chance.randrange(SEEDS))

    def _cell(self, feature: Feature, request: dict[str, Any]) -> Any:
        if self._chance.random() < _UNKNOWN:
            return None
        highest = request.get(feature.at_most)
        if highest is not None and self._chance.random() < 0.5:
            return self._chance.choice((0.0, highest / 2, highest))
        return self._value(feature, highest)

    def _request_value(self, word: RequestField) -> Any:
        if word.may_be_unknown and self._chance.random() < _UNKNOWN:
            return None
        return self._value(word)

    def _value(self, word: Feature | RequestField, highest: float | None = None) -> Any:
        chance = self._chance
        match word.kind:
            case Kind.BOOL:
                return chance.random() < 0.7
            case Kind.STRING:
                return chance.choice(self._strings)
            case Kind.SET:
                return frozenset(text for text in self._strings if text and chance.random() < 0.5)
        values: Sequence[float] = _SHARES if word.high <= 1 else _NUMBERS
        if self._numbers and chance.random() < 0.4:
            near = chance.choice(self._numbers)
            values = (near, near, near * 2) if word.high <= 1 else (near, near - 1, near + 1, near * 2)
        return clamped(chance.choice(values), word, highest)


def _constants(plan: Plan) -> set[Any]:
    """The numbers and strings of all expressions."""
    found: set[Any] = set()
    for root in plan.terms:
        for term in walk(root):
            if isinstance(term, Const):
                if isinstance(term.value, frozenset):
                    found |= term.value
                elif isinstance(term.value, str):
                    found.add(term.value)
                elif not isinstance(term.value, bool):
                    found.add(float(term.value))
    return found


def smaller(situation: Situation, vocabulary: Vocabulary) -> Iterator[Situation]:
    """Situations a little smaller or simpler than *situation*, the most telling first."""
    ids = situation.ids
    for i in range(len(ids) if len(ids) > 1 else 0):
        kept = [k for k in range(len(ids)) if k != i]
        cells = {name: [column[k] for k in kept] for name, column in situation.cells.items()}
        cursors = {} if ids[i] in situation.cursors.values() else situation.cursors
        yield replace(situation, ids=[ids[k] for k in kept], cells=cells, cursors=cursors)
    if list(ids) != sorted(ids):
        order = sorted(range(len(ids)), key=ids.__getitem__)
        cells = {name: [column[k] for k in order] for name, column in situation.cells.items()}
        yield replace(situation, ids=[ids[k] for k in order], cells=cells)
    for name in situation.cells:
        yield replace(situation, cells={key: column for key, column in situation.cells.items() if key != name})
    for name in situation.request:
        yield replace(situation, request={key: value for key, value in situation.request.items() if key != name})
    if situation.cursors:
        yield replace(situation, cursors={})
    if situation.seed:
        yield replace(situation, seed=0)
    for name, column in situation.cells.items():
        for i, cell in enumerate(column):
            for simpler in _simpler(cell, vocabulary.features[name]):
                changed = [*column[:i], simpler, *column[i + 1 :]]
                yield replace(situation, cells={**situation.cells, name: changed})
    for name, value in situation.request.items():
        for simpler in _simpler(value, vocabulary.request[name]):
            yield replace(situation, request={**situation.request, name: simpler})


def _simpler(value: Any, word: Feature | RequestField) -> Iterator[Any]:
    """Values of *word* that read more easily than *value*."""
    if value is None:
        yield word.default
    elif isinstance(value, float):
        yield from (
            each for each in (0.0, 1.0, float(round(value / 2)), value - 1) if max(0.0, word.low) <= each < value
        )

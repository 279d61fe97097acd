"""Search of small fleets for a counterexample to a property of a policy."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smetric.policy.decision import Decision
from smetric.policy.plan import Const, Outcome, walk
from smetric.policy.policy import Policy
from smetric.policy.testing import LAST, SEEDS, Situation, clamped
from smetric.policy.types import figure, written
from smetric.policy.vocabulary import Feature, Kind, RequestField, Vocabulary

#: A balanced policy never picks an instance with more than this many times the mean load.
TOO_MUCH = 2.0
#: The number of situations that are tried for each property.
SITUATIONS = 4000
#: Limit on the steps that make a counterexample smaller.
_STEPS = 200
_DECLARED = re.compile(r"(?:^|\.)\s*Holds:((?:[^.\n]|(?<=,)\n)*)", re.MULTILINE)


class UnknownProperty(Exception):
    """A policy declares a property that does not exist; the text is its name."""


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A situation in which a property does not hold, the reason, and the instances that would be right."""

    property: str
    situation: Situation
    why: str
    instead: tuple[str, ...]

    def as_test(self) -> str:
        """The situation as a `test` block, which fails until the policy is fixed."""
        return test_of(f"{self.property}: {self.why}", self.situation, self.instead)


@dataclass(frozen=True, slots=True)
class Property:
    """A property that a policy can have.

    Args:
        name: as policies declare it, in a sentence `Holds: balanced, monotone.` of the `##` lines at their top.
        doc: its meaning, one sentence.
        always: whether it holds for every policy by construction; it is searched for all the same.
        applies: whether it is meaningful for a policy.
        broken: the counterexample that a situation, or one much like it, is; None if the property holds there.
    """

    name: str
    doc: str
    always: bool
    applies: Callable[[Policy, Vocabulary], bool]
    broken: Callable[[Policy, Vocabulary, Situation], Counterexample | None]


def declared(policy: Policy) -> list[str]:
    """Return the property names that a policy's documentation declares, including unknown ones."""
    return [name for names in _DECLARED.findall(policy.doc) for name in re.findall(r"[A-Za-z_]\w*", names)]


def promised(policy: Policy, vocabulary: Vocabulary, names: Collection[str] = ()) -> list[Property]:
    """Return the properties to check: *names* or, without names, those of every policy and those it declares.

    Raises:
        UnknownProperty: the policy declares one that does not exist.
    """
    wanted = names or [*declared(policy), *(each.name for each in PROPERTIES.values() if each.always)]
    for name in wanted:
        if name not in PROPERTIES:
            raise UnknownProperty(name)
    return [each for each in PROPERTIES.values() if each.name in wanted and each.applies(policy, vocabulary)]


def counterexample(
    policy: Policy, vocabulary: Vocabulary, promise: Property, *, situations: int = SITUATIONS
) -> Counterexample | None:
    """Search for a situation that breaks *promise*, the smallest fleets first, and make it small.

    The search is the same each time. A property without a counterexample may still be broken elsewhere.
    """
    for situation in SmallFleets(policy, vocabulary).draw(situations):
        found = promise.broken(policy, vocabulary, situation)
        if found is not None:
            break
    else:
        return None
    for _ in range(_STEPS):
        candidates = (promise.broken(policy, vocabulary, each) for each in _smaller(found.situation, vocabulary))
        better = next((each for each in candidates if each and _size(each.situation) < _size(found.situation)), None)
        if better is None:
            break
        found = better
    return found


# ── the properties ───────────────────────────────────────────────────────────


def _not_balanced(policy: Policy, vocabulary: Vocabulary, situation: Situation) -> Counterexample | None:
    decision = situation.decide(policy, vocabulary)
    if decision.outcome is not Outcome.ROUTE:
        return None
    load = loads(policy, vocabulary)[0]
    values = decision.snapshot.columns[load]
    left = decision.survivors[-1] if decision.survivors else range(len(values))
    mean = sum(values[i] for i in left) / len(left)
    if values[decision.index] <= TOO_MUCH * mean:
        return None
    why = f"{decision.instance} has {figure(values[decision.index])} {load}, the mean is {figure(mean)}"
    instead = tuple(decision.snapshot.ids[i] for i in left if values[i] <= TOO_MUCH * mean)
    return Counterexample("balanced", situation, why, instead)


def _not_monotone(policy: Policy, vocabulary: Vocabulary, situation: Situation) -> Counterexample | None:
    before = situation.decide(policy, vocabulary)
    if before.instance is None:
        return None
    for load in loads(policy, vocabulary):
        high = vocabulary.features[load].high
        column = situation.cells.get(load, [None] * len(situation.ids))
        for i, cell in enumerate(column):
            for more in (0.25,) if high <= 1 else (1.0, 20.0):
                if cell is None or cell + more > high:
                    continue
                cells = {**situation.cells, load: [*column[:i], cell + more, *column[i + 1 :]]}
                raised = replace(situation, cells=cells)
                after = raised.decide(policy, vocabulary)
                if after.index == i != before.index:
                    picked = f"{after.instance} is picked, without them {before.instance} was"
                    why = f"with {figure(more)} more {load} {picked}"
                    return Counterexample("monotone", raised, why, (before.instance,))
    return None


def _not_symmetric(policy: Policy, vocabulary: Vocabulary, situation: Situation) -> Counterexample | None:
    first = situation.decide(policy, vocabulary)
    turned = _reordered(situation, range(len(situation.ids) - 1, -1, -1))
    second = turned.decide(policy, vocabulary)
    if (first.rule, first.instance) == (second.rule, second.instance):
        return None
    why = f"{_end_of(second)} if the instances stand in this order, {_end_of(first)} in the other"
    return Counterexample("symmetric", turned, why, (first.instance,) if first.instance else ())


def _end_of(decision: Decision) -> str:
    return f"{decision.instance or decision.outcome.value} by {decision.rule}"


def _not_kept(policy: Policy, vocabulary: Vocabulary, situation: Situation) -> Counterexample | None:
    decision = situation.decide(policy, vocabulary)
    if decision.outcome is not Outcome.ROUTE:
        return None
    for at, (step, stop) in enumerate(zip(policy.plan.steps, decision.stops, strict=False)):
        if step.outcome is Outcome.NO_CANDIDATE and stop == len(step.guards):
            assert step.value is not None
            mask = policy.probe(decision, at, step.value)
            if mask is not True and not mask[decision.index]:
                why = f"{decision.instance} is picked, which `{step.label}` removes"
                instead = tuple(decision.snapshot.ids[i] for i, kept in enumerate(mask) if kept)
                return Counterexample("kept", situation, why, instead)
    return None


def loads(policy: Policy, vocabulary: Vocabulary) -> list[str]:
    """The loads that a policy reads, in its order."""
    return [name for name in policy.asks if vocabulary.features[name].load]


def _reads_a_load(policy: Policy, vocabulary: Vocabulary) -> bool:
    return bool(loads(policy, vocabulary))


def _keeps(policy: Policy, _: Vocabulary) -> bool:
    return any(step.outcome is Outcome.NO_CANDIDATE for step in policy.plan.steps)


_ROWS = (
    Property(
        "balanced",
        "It never picks an instance with more than twice the mean of the load it reads first.",
        False,
        _reads_a_load,
        _not_balanced,
    ),
    Property(
        "monotone",
        "More load on an instance never makes it the one that is picked.",
        False,
        _reads_a_load,
        _not_monotone,
    ),
    Property("symmetric", "The order of the instances changes nothing.", True, lambda *_: True, _not_symmetric),
    Property("kept", "It never picks what a `keep` removed.", True, _keeps, _not_kept),
)
PROPERTIES: Mapping[str, Property] = {row.name: row for row in _ROWS}

# ── small fleets ─────────────────────────────────────────────────────────────

#: The sizes of the fleets, in candidates.
SIZES = (1, 2, 3, 4)
_NAMES = ("a", "b", "c", "d")
#: The numbers that are tried for values above 1, and for shares; sums of them are exact.
_NUMBERS = (0.0, 1.0, 2.0, 3.0, 5.0, 20.0, 450.0, 900.0)
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
#: The probability that a cell, or a field that may be unknown, is unknown.
_UNKNOWN = 0.1


class SmallFleets:
    """Draws situations from the numbers and strings that a policy names, the same each time."""

    def __init__(self, policy: Policy, vocabulary: Vocabulary) -> None:
        self._policy = policy
        self._vocabulary = vocabulary
        self._chance = random.Random(0)
        constants: set[Any] = set()
        for term in (part for root in policy.plan.terms for part in walk(root)):
            if isinstance(term, Const):
                constants |= term.value if isinstance(term.value, frozenset) else {term.value}
        self._strings = sorted({each for each in constants if isinstance(each, str)} | {"", "x"})
        self._numbers = sorted({float(each) for each in constants if not isinstance(each, str | bool)})

    def draw(self, count: int) -> Iterator[Situation]:
        """Draw *count* situations, as many of each size, the smallest first."""
        for size in SIZES:
            for _ in range(count // len(SIZES)):
                yield self._situation(size)

    def _situation(self, size: int) -> Situation:
        chance, policy, features = self._chance, self._policy, self._vocabulary.features
        request: dict[str, Any] = {
            word.name: None if word.may_be_unknown and chance.random() < _UNKNOWN else self._value(word)
            for word in self._vocabulary.request.values()
            if word.name in policy.fields
        }
        bounds = {
            feature.at_most: chance.choice((100.0, 1000.0, 4000.0))
            for feature in features.values()
            if feature.at_most and feature.name in policy.reads
        }
        request |= {name: bound for name, bound in bounds.items() if name not in request or request[name] <= 1.0}
        cells = {
            name: [self._cell(features[name], request) for _ in range(size)]
            for name in sorted(policy.reads)
            if name != "id"
        }
        names = list(_NAMES[:size])
        chance.shuffle(names)
        rotating = policy.plan.rotating
        # All rotations have one last winner, as `given last` of a test.
        cursors = dict.fromkeys(rotating, chance.choice(names)) if chance.random() < 0.5 and rotating else {}
        return Situation(names, cells, {}, request, cursors, chance.randrange(SEEDS))

    def _cell(self, feature: Feature, request: dict[str, Any]) -> Any:
        if self._chance.random() < _UNKNOWN:
            return None
        highest = request.get(feature.at_most)
        if highest is not None and self._chance.random() < 0.5:
            return self._chance.choice((0.0, highest / 2, highest))
        return self._value(feature, highest)

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


def _reordered(situation: Situation, order: Sequence[int]) -> Situation:
    """*situation* with the instances *order* only, in this order."""
    ids = [situation.ids[i] for i in order]
    cells = {name: [column[i] for i in order] for name, column in situation.cells.items()}
    lost = set(situation.cursors.values()) - set(ids)
    return replace(situation, ids=ids, cells=cells, cursors={} if lost else situation.cursors)


def _smaller(situation: Situation, vocabulary: Vocabulary) -> Iterator[Situation]:
    """Situations a little smaller or simpler than *situation*, the largest reductions first."""
    ids, cells, request = situation.ids, situation.cells, situation.request
    if len(ids) > 1:
        yield from (_reordered(situation, [k for k in range(len(ids)) if k != i]) for i in range(len(ids)))
    if list(ids) != sorted(ids):
        yield _reordered(situation, sorted(range(len(ids)), key=ids.__getitem__))
    yield from (replace(situation, cells={k: v for k, v in cells.items() if k != name}) for name in cells)
    yield from (replace(situation, request={k: v for k, v in request.items() if k != name}) for name in request)
    yield replace(situation, cursors={})
    yield replace(situation, seed=0)
    for name, column in cells.items():
        for i, cell in enumerate(column):
            for simpler in _simpler(cell, vocabulary.features[name]):
                yield replace(situation, cells={**cells, name: [*column[:i], simpler, *column[i + 1 :]]})
    for name, value in request.items():
        for simpler in _simpler(value, vocabulary.request[name]):
            yield replace(situation, request={**request, name: simpler})


def _simpler(value: Any, word: Feature | RequestField) -> Iterator[Any]:
    """Values of *word* that read more easily than *value*."""
    if value is None:
        yield word.default
    elif isinstance(value, float):
        tried = (0.0, 1.0, float(round(value / 2)), value - 1)
        yield from (each for each in tried if max(0.0, word.low) <= each < value)


def _size(situation: Situation) -> tuple[Any, ...]:
    """The measure by which one situation is smaller than another."""
    cells = [cell for column in situation.cells.values() for cell in column]
    values = [*cells, *situation.request.values()]
    return (
        len(situation.ids),
        len(situation.cells) + len(situation.request) + len(situation.cursors) + bool(situation.seed),
        sum(value is None for value in values),
        list(situation.ids) != sorted(situation.ids),
        sum(float(value) for value in values if isinstance(value, float)),
    )


def test_of(sentence: str, situation: Situation, instead: Sequence[str]) -> str:
    """A `test` block of *situation*, in which one of *instead* is expected."""
    lines = [f'test "{sentence}"']
    given = [f"{name} = {written(value)}" for name, value in situation.request.items()]
    given += [f"{LAST} = {last}" for last in set(situation.cursors.values())]
    if given:
        lines.append(f"  given {', '.join(given)}")
    cells = situation.cells or {"healthy": [None] * len(situation.ids)}  # a table has at least one column
    table = [["instance", *situation.ids]] + [[name, *map(written, column)] for name, column in cells.items()]
    widths = [max(map(len, column)) for column in table]
    for first, *others in zip(*table, strict=True):
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  " + " | ".join([first.ljust(widths[0]), *padded]))
    lines.append(f"  expect {' or '.join(instead)}" if instead else "  expect reject 503")
    return "\n".join(lines)


test_of.__test__ = False  # type: ignore[attr-defined]  # it is no test case of pytest

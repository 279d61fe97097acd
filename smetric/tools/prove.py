"""Search of small fleets for a counterexample to a property."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smetric.policy.decision import Decision
from smetric.policy.plan import Const, Outcome, Plan, StatementKind, walk
from smetric.policy.policy import Policy
from smetric.policy.testing import LAST, SEEDS, Situation, clamped
from smetric.policy.types import figure, written
from smetric.policy.vocabulary import Feature, Kind, RequestField, Vocabulary

# What a policy can promise beside what its tests show, and whether a situation breaks a promise.
#
# A policy declares its promises in its documentation: a sentence `Holds: balanced, monotone.` in the `##` lines above
# its first one, which goes on in the next line behind a comma. `symmetric` and `kept` hold of every policy; they are
# looked for all the same.

#: A balanced policy never picks an instance with more than this many times the mean load.
TOO_MUCH = 2.0
_DECLARED = re.compile(r"(?:^|\.)\s*Holds:((?:[^.\n]|(?<=,)\n)*)", re.MULTILINE)


class UnknownProperty(Exception):
    """A policy declares a property that there is not; the text is its name."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A situation in which a property does not hold: why, and the instances that would have done."""

    situation: Situation
    why: str
    instead: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Property:
    """One promise.

    Args:
        name: as policies declare it.
        doc: what it says, one sentence.
        always: it holds of every policy.
        applies: whether it says something of a policy.
        broken: how a situation breaks it, None where it does not; or how one much like it does.
    """

    name: str
    doc: str
    always: bool
    applies: Callable[[Policy, Vocabulary], bool]
    broken: Callable[[Policy, Vocabulary, Situation], Broken | None]


def declared(policy: Policy) -> list[str]:
    """The names that a policy's documentation declares, known or not."""
    return [name for names in _DECLARED.findall(policy.doc) for name in re.findall(r"[A-Za-z_]\w*", names)]


# ── balanced ─────────────────────────────────────────────────────────────────


def _not_balanced(policy: Policy, vocabulary: Vocabulary, situation: Situation) -> Broken | None:
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
    return Broken(situation, why, tuple(decision.snapshot.ids[i] for i in left if values[i] <= TOO_MUCH * mean))


# ── monotone ─────────────────────────────────────────────────────────────────


def _not_monotone(policy: Policy, vocabulary: Vocabulary, situation: Situation) -> Broken | None:
    before = situation.decide(policy, vocabulary)
    if before.outcome is not Outcome.ROUTE:
        return None
    assert before.instance is not None
    for load, i, more, raised in _raised(policy, vocabulary, situation):
        after = raised.decide(policy, vocabulary)
        if after.index == i != before.index:
            why = f"with {figure(more)} more {load} {after.instance} is picked, without them {before.instance} was"
            return Broken(raised, why, (before.instance,))
    return None


def _raised(
    policy: Policy, vocabulary: Vocabulary, situation: Situation
) -> Iterator[tuple[str, int, float, Situation]]:  # fmt: skip
    """The situation with more load on one instance: which load, whose, how much."""
    for load in loads(policy, vocabulary):
        column = situation.cells.get(load, [None] * len(situation.ids))
        for i, cell in enumerate(column):
            for more in (0.25,) if vocabulary.features[load].high <= 1 else (1.0, 20.0):
                if cell is not None and cell + more <= vocabulary.features[load].high:
                    cells = [*column[:i], cell + more, *column[i + 1 :]]
                    yield load, i, more, replace(situation, cells={**situation.cells, load: cells})


# ── what holds of every policy ───────────────────────────────────────────────


def _not_symmetric(policy: Policy, vocabulary: Vocabulary, situation: Situation) -> Broken | None:
    first = situation.decide(policy, vocabulary)
    order = range(len(situation.ids) - 1, -1, -1)
    turned = replace(
        situation,
        ids=[situation.ids[i] for i in order],
        cells={name: [column[i] for i in order] for name, column in situation.cells.items()},
    )
    second = turned.decide(policy, vocabulary)
    if (first.rule, first.instance) == (second.rule, second.instance):
        return None
    why = f"{_told(second)} when the instances stand in this order, {_told(first)} in the other"
    return Broken(turned, why, (first.instance,) if first.instance else ())


def _told(decision: Decision) -> str:
    return f"{decision.instance or decision.outcome.value} by {decision.rule}"


def _not_kept(policy: Policy, vocabulary: Vocabulary, situation: Situation) -> Broken | None:
    decision = situation.decide(policy, vocabulary)
    if decision.outcome is not Outcome.ROUTE:
        return None
    for at, (step, stop) in enumerate(zip(policy.plan.steps, decision.stops, strict=False)):
        if step.kind is StatementKind.KEEP and stop == len(step.guards):
            assert step.value is not None
            mask = policy.probe(decision, at, step.value)
            if mask is not True and not mask[decision.index]:
                why = f"{decision.instance} is picked, which `{step.label}` removes"
                return Broken(situation, why, tuple(decision.snapshot.ids[i] for i, kept in enumerate(mask) if kept))
    return None


def loads(policy: Policy, vocabulary: Vocabulary) -> list[str]:
    """The loads that a policy reads, in the order in which it asks for them."""
    return [name for name in policy.asks if vocabulary.features[name].load]


def _reads_a_load(policy: Policy, vocabulary: Vocabulary) -> bool:
    return bool(loads(policy, vocabulary))


def _any(policy: Policy, vocabulary: Vocabulary) -> bool:
    return True


def _keeps(policy: Policy, vocabulary: Vocabulary) -> bool:
    return any(step.kind is StatementKind.KEEP for step in policy.plan.steps)


PROPERTIES: Mapping[str, Property] = {
    each.name: each
    for each in (
        Property(
            name="balanced",
            doc="It never picks an instance with more than twice the mean of the load it reads first.",
            always=False,
            applies=_reads_a_load,
            broken=_not_balanced,
        ),
        Property(
            name="monotone",
            doc="More load on an instance never makes it the one that is picked.",
            always=False,
            applies=_reads_a_load,
            broken=_not_monotone,
        ),
        Property(
            name="symmetric",
            doc="The order of the instances changes nothing.",
            always=True,
            applies=_any,
            broken=_not_symmetric,
        ),
        Property(
            name="kept",
            doc="It never picks what a `keep` removed.",
            always=True,
            applies=_keeps,
            broken=_not_kept,
        ),
    )
}


def promised(policy: Policy, vocabulary: Vocabulary, names: Collection[str] = ()) -> list[Property]:
    """The properties to look for: those *names*, or else what the policy declares and what holds of all policies.

    Raises:
        UnknownProperty: the policy declares one that there is not.
    """
    wanted = names or [*declared(policy), *(each.name for each in PROPERTIES.values() if each.always)]
    for name in wanted:
        if name not in PROPERTIES:
            raise UnknownProperty(name)
    return [each for each in PROPERTIES.values() if each.name in wanted and each.applies(policy, vocabulary)]


# Small fleets in which a policy may go wrong: situations made of the numbers and strings that it names.
#
# They are the same each time, the smallest fleets first. What is looked for in them is `properties`.

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


# Searches small fleets for a counterexample to a property, and writes the smallest as a test.

#: Situations tried for each property.
SITUATIONS = 4000
#: Steps in which a counterexample is made smaller at most.
_STEPS = 200


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A property that does not hold, and the smallest situation found that shows it."""

    property: Property
    broken: Broken

    def as_test(self) -> str:
        """The situation as a `test` block, which fails until the policy is mended."""
        return test_of(f"{self.property.name}: {self.broken.why}", self.broken.situation, self.broken.instead)


def counterexample(
    policy: Policy, vocabulary: Vocabulary, promise: Property, *, situations: int = SITUATIONS
) -> Counterexample | None:
    """Search for a situation that breaks *promise*, the smallest fleets first; None where none is found.

    The search is the same each time. What it does not find may still be there.
    """
    for situation in SmallFleets(policy, vocabulary).draw(situations):
        broken = promise.broken(policy, vocabulary, situation)
        if broken is not None:
            return Counterexample(promise, _smallest(policy, vocabulary, promise, broken))
    return None


def _smallest(policy: Policy, vocabulary: Vocabulary, promise: Property, broken: Broken) -> Broken:
    """Make the situation smaller as long as it still breaks the promise."""
    for _ in range(_STEPS):
        found = None
        for candidate in smaller(broken.situation, vocabulary):
            found = promise.broken(policy, vocabulary, candidate)
            if found is not None and _size(found.situation) < _size(broken.situation):
                break
            found = None
        if found is None:
            break
        broken = found
    return broken


def _size(situation: Situation) -> tuple[Any, ...]:
    """What is compared to tell the smaller of two situations."""
    cells = [cell for column in situation.cells.values() for cell in column]
    values = [*cells, *situation.request.values()]
    return (
        len(situation.ids),
        len(situation.cells) + len(situation.request) + len(situation.cursors) + bool(situation.seed),
        sum(value is None for value in values),
        list(situation.ids) != sorted(situation.ids),
        sum(float(value) for value in values if isinstance(value, float)),
    )


# ── as a test ────────────────────────────────────────────────────────────────


def test_of(sentence: str, situation: Situation, instead: Sequence[str]) -> str:
    """A `test` block of *situation*, in which one of *instead* is expected."""
    lines = [f'test "{sentence}"']
    given = [f"{name} = {written(value)}" for name, value in situation.request.items()]
    given += [f"{LAST} = {last}" for last in set(situation.cursors.values())]
    if given:
        lines.append(f"  given {', '.join(given)}")
    columns = {name: [written(cell) for cell in column] for name, column in situation.cells.items()}
    head = ["instance", *columns]
    rows = [[str(ident), *(column[i] for column in columns.values())] for i, ident in enumerate(situation.ids)]
    if not columns:
        head, rows = ["instance", "healthy"], [[*row, "?"] for row in rows]
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
    for row in (head, *rows):
        first, *others = (f"{cell:{'<' if at == 0 else '>'}{widths[at]}}" for at, cell in enumerate(row))
        lines.append("  " + " | ".join([first, *others]).rstrip())
    lines.append(f"  expect {' or '.join(instead)}" if instead else "  expect reject 503")
    return "\n".join(lines)


test_of.__test__ = False  # type: ignore[attr-defined]  # this is no test case of pytest

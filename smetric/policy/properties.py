"""What a policy can promise beside what its tests show, and whether a situation breaks a promise.

A policy declares its promises in its documentation: a sentence `Holds: balanced, monotone.` in the `##` lines above its
first one, which goes on in the next line behind a comma.
`symmetric` and `kept` hold of every policy; they are looked for all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from smetric.policy.decision import Decision
from smetric.policy.figure import figure
from smetric.policy.outcome import Outcome
from smetric.policy.plan import StatementKind
from smetric.policy.policy import Policy
from smetric.policy.situation import Situation
from smetric.policy.vocabulary import Vocabulary

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

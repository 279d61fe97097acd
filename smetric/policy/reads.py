"""Which features a decision reads: always, or only behind a guard that may spare them.

What one expression reads is part of its `Type`; here it is put together along the paths of a policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from smetric.policy.diagnostic import Diagnostic, Severity
from smetric.policy.span import Span
from smetric.policy.types import NOTHING, Type
from smetric.policy.vocabulary import Vocabulary

#: The entry of a feature that every decision reads.
ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Guard:
    """One conjunct of a `when`: how traces call it, its place, and its type, which knows what it reads.

    `implied` is the end of a patience, which stands behind the guards that are written.
    """

    label: str
    span: Span
    type: Type
    implied: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A filter or an outcome: its guards, then the mask or pick `value` with its source text.

    `may_end` holds for outcomes, and for `keep`, which may leave nobody.
    """

    guards: Sequence[Guard]
    value: Type
    text: str
    may_end: bool


#: Of each step, what is read for certain from each of its guards on, then behind the last.
_Certain = list[list[frozenset[str]]]


def reads(steps: Sequence[Step], vocabulary: Vocabulary) -> Mapping[str, str]:
    """The features that *steps* may read: `always`, or the label of the first guard whose failing or holding spares it.

    A feature that only a tie, a default or one side of an expression asks for has that expression's label or text.
    """
    unknowable = frozenset(f"req.{name}" for name, word in vocabulary.request.items() if word.may_be_unknown)
    certain = _certain(steps, unknowable)
    always = certain[0][0] if steps else NOTHING
    may = NOTHING.union(*(_may(step) for step in steps))
    return {
        name: ALWAYS if name in always else _spared_by(name, steps, certain)
        for name in sorted(may & vocabulary.features.keys())
    }


def wasted_lookups(steps: Sequence[Step], vocabulary: Vocabulary) -> list[Diagnostic]:
    """A warning for each guard that reads the request only and could spare a look-up if it came first."""
    always = {name for name, when in reads(steps, vocabulary).items() if when == ALWAYS}
    lookups = {name for name in always if vocabulary.features[name].lookup}
    found = []
    for at, step in enumerate(steps):
        for place, guard in enumerate(step.guards):
            if place == 0 or guard.implied or guard.type.may & vocabulary.features.keys() or not lookups:
                continue
            first = replace(step, guards=[guard, *step.guards[:place], *step.guards[place + 1 :]])
            spared = reads([*steps[:at], first, *steps[at + 1 :]], vocabulary)
            names = sorted(name for name in lookups if spared[name] != ALWAYS)
            if names:
                message = f"every decision looks up {', '.join(names)} before it asks this, which could spare it"
                found.append(Diagnostic("late-guard", message, guard.span, severity=Severity.WARNING))
    return found


def _certain(steps: Sequence[Step], unknowable: frozenset[str]) -> _Certain:
    """What is read for certain; a guard that reads one of the *unknowable* may fail before it reads anything."""
    certain: _Certain = []
    after: frozenset[str] = NOTHING
    for step in reversed(steps):
        behind = [step.value.must if step.may_end else step.value.must | after]
        for guard in reversed(step.guards):
            asked = guard.type.must | (behind[0] & after)
            behind.insert(0, asked & after if guard.type.may & unknowable else asked)
        certain.insert(0, behind)
        after = behind[0]
    return certain


def _spared_by(name: str, steps: Sequence[Step], certain: _Certain) -> str:
    for at, step in enumerate(steps):
        failed = certain[at + 1][0] if at + 1 < len(steps) else NOTHING
        for place, guard in enumerate(step.guards):
            if name in guard.type.may or (name in certain[at][place + 1]) != (name in failed):
                return guard.label
        if name in step.value.may or (step.may_end and name in failed):
            return step.text
    raise AssertionError(f"nothing reads `{name}`")


def _may(step: Step) -> frozenset[str]:
    return step.value.may.union(*(guard.type.may for guard in step.guards))

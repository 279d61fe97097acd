"""Guards: the conjuncts of a `when`, their labels, and the look-ups that they spare."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from smetric.policy import tree
from smetric.policy.diagnostic import Diagnostic, Severity, Span
from smetric.policy.lexer import one_line
from smetric.policy.types import NOTHING, Type
from smetric.policy.vocabulary import Vocabulary

#: The guard that fails when a held request has been held for as long as its rule says.
HELD = "held"
#: The guard that fails when a rule's pick is empty.
NOBODY = "nobody"
#: The entry of a feature that every decision reads.
ALWAYS = "always"


def conjuncts(when: tree.Expr | None) -> list[tree.Expr]:
    """Return the guards of a condition, left to right; none without one."""
    found: list[tree.Expr] = []
    while isinstance(when, tree.Binary) and when.op == "and":  # a loop, as chains of any length reach this
        found = conjuncts(when.right) + found
        when = when.left
    return found if when is None else [when, *found]


def label_of(guard: tree.Expr, text: str, definitions: Container[str]) -> str:
    """Return the label of *guard* in traces: its source on one line, with calls of definitions cut to their names."""
    pieces = []
    at = guard.span.start
    for call in sorted(_calls(guard, definitions), key=lambda call: call.span.start):
        pieces += [text[at : call.span.start], call.function]
        at = call.span.end
    pieces.append(text[at : guard.span.end])
    return one_line("".join(pieces))


def _calls(part: tree.Node, definitions: Container[str]) -> Iterator[tree.CallExpr]:
    """Yield the outermost calls of definitions in *part*."""
    if isinstance(part, tree.CallExpr) and part.function in definitions:
        yield part
        return
    for each in fields(part):
        value = getattr(part, each.name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, tree.Node):
                yield from _calls(inner, definitions)


@dataclass(frozen=True, slots=True)
class CheckedGuard:
    """Conjunct of a `when`: its label, its place, and its type, which knows what it reads.

    `implied` holds for the end of a patience, which follows the guards that are written.
    """

    label: str
    span: Span
    type: Type
    implied: bool = False


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A filter or an outcome: its guards, then the type of its mask or pick with the source text.

    `may_end` holds for outcomes, and for `keep`, which may leave no candidate.
    """

    guards: Sequence[CheckedGuard]
    value: Type
    text: str
    may_end: bool

    @property
    def may(self) -> frozenset[str]:
        """The names that it may read."""
        return self.value.may.union(*(guard.type.may for guard in self.guards))


def reads(steps: Sequence[CheckedStep], vocabulary: Vocabulary) -> Mapping[str, str]:
    """Return the features that *steps* may read: `always`, or the label of the first guard that may spare it.

    A feature that only a tie, a default or one side of an expression reads has that expression's label or text.
    """
    certain = _certain(steps, vocabulary)
    always = certain[0][0] if steps else NOTHING
    may = NOTHING.union(*(step.may for step in steps))
    return {
        name: ALWAYS if name in always else _spared_by(name, steps, certain)
        for name in sorted(may & vocabulary.features.keys())
    }


def wasted_lookups(steps: Sequence[CheckedStep], vocabulary: Vocabulary) -> list[Diagnostic]:
    """Return a warning for each guard that reads the request only and could spare a look-up if it came first."""
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
                message = (
                    f"every decision looks up {', '.join(names)} before it checks this guard, which could avoid that"
                )
                found.append(Diagnostic("late-guard", message, guard.span, severity=Severity.WARNING))
    return found


def _certain(steps: Sequence[CheckedStep], vocabulary: Vocabulary) -> list[list[frozenset[str]]]:
    """Return for each step one set of names per guard, and one more for the end of its guards.

    A set holds the names that every decision reads once it has come that far. A guard on a request field that may be
    unknown can fail before it reads anything.
    """
    unknowable = frozenset(f"req.{name}" for name, word in vocabulary.request.items() if word.may_be_unknown)
    certain: list[list[frozenset[str]]] = []
    after: frozenset[str] = NOTHING
    for step in reversed(steps):
        behind = [step.value.must if step.may_end else step.value.must | after]
        for guard in reversed(step.guards):
            asked = guard.type.must | (behind[0] & after)
            behind.insert(0, asked & after if guard.type.may & unknowable else asked)
        certain.insert(0, behind)
        after = behind[0]
    return certain


def _spared_by(name: str, steps: Sequence[CheckedStep], certain: Sequence[Sequence[frozenset[str]]]) -> str:
    for at, step in enumerate(steps):
        failed = certain[at + 1][0] if at + 1 < len(steps) else NOTHING
        for place, guard in enumerate(step.guards):
            if name in guard.type.may or (name in certain[at][place + 1]) != (name in failed):
                return guard.label
        if name in step.value.may or (step.may_end and name in failed):
            return step.text
    raise AssertionError(f"nothing reads `{name}`")

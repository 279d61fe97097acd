"""Fit of a policy and a fleet: conditions on labels and counts that hold for none of its instances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smetric.policy.builtin import Family
from smetric.policy.diagnostic import Diagnostic, Severity, Span
from smetric.policy.plan import Call, Column, Const, Op, Plan, Ref, Shape, Step, Term, walk
from smetric.policy.resolver import compute
from smetric.policy.types import did_you_mean, written

#: By feature that no request changes, such as `pool`, its value for each instance. All columns are of one length.
Labels = Mapping[str, Sequence[str]]

_COMPARISONS = frozenset({"==", "!=", "in", "not in", "<", "<=", ">", ">="})
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def misfits(plan: Plan, labels: Labels) -> tuple[Diagnostic, ...]:
    """Return an error for each filter, `where` and guard of *plan* that never holds in a fleet with these *labels*.

    A comparison within one that never holds is a warning: the rest of it may hold. Nothing is known without labels.
    """
    if not labels:
        return ()
    fleet = _Fleet(labels)
    found: dict[Span, Diagnostic] = {}
    for step in plan.steps:
        for whole in _wholes(step):
            if fleet.never(whole):
                part = next((part for part in _comparisons(whole) if fleet.never(part)), whole)
                found[part.span] = fleet.fault(part)
    for part in (part for term in plan.terms for part in _comparisons(term)):
        if fleet.never(part):
            found.setdefault(part.span, fleet.fault(part, Severity.WARNING))
    return tuple(found.values())


def _wholes(step: Step) -> Iterator[Term]:
    """Yield the guards of *step*, the mask of a filter, and every `where`."""
    yield from (guard.value for guard in step.guards)
    if step.is_filter and step.value is not None:
        yield step.value
    for part in (part for term in step.terms for part in walk(term)):
        where = getattr(part, "where", None)
        if where is not None:
            yield where


def _comparisons(term: Term) -> Iterator[Op]:
    """Yield the comparisons of labels or counts that *term* is computed from."""
    for part in walk(term):
        if isinstance(part, Op) and part.op in _COMPARISONS:
            yield part


class _Fleet:
    """Values of terms in a fleet, as far as its labels determine them."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._size = len(next(iter(labels.values())))

    def never(self, term: Term) -> bool:
        """Whether a truth value is false for every instance, whatever the request and the load."""
        if term.shape is not Shape.VECTOR:
            return self._value(term, 0) is False
        return all(self._value(term, i) is False for i in range(self._size))

    def fault(self, term: Term, severity: Severity = Severity.ERROR) -> Diagnostic:
        """Return the diagnostic of a *term* that never holds."""
        columns = [part.feature for part in walk(term) if isinstance(part, Column) and part.feature in self._labels]
        known = sorted(set(self._labels[columns[0]])) if columns else []
        wanted = [part.value for part in walk(term) if isinstance(part, Const)]
        strings = [text for value in wanted for text in (value if isinstance(value, frozenset) else (value,))]
        message = f"this holds for none of the {self._size} instances"
        help_text = ""
        if known:
            near = (did_you_mean(text, known) for text in strings if isinstance(text, str) and text not in known)
            listed = f"`{columns[0]}` is {' or '.join(map(written, known))} in this fleet"
            help_text = next(filter(None, near), "") or listed
        if severity is Severity.ERROR:
            return Diagnostic("no-instance", message, term.span, help_text)
        return Diagnostic("no-label", message, term.span, help_text, severity)

    def _value(self, term: Term, i: int) -> Any:
        """Return the value of *term* for instance *i*; None if the labels do not determine it."""
        match term:
            case Const(value=value):
                return value
            case Column(feature=feature):
                column = self._labels.get(feature)
                return None if column is None else column[i]
            case Ref(binding=binding):
                return self._value(binding.value, i)
            case Op(op=op, operands=operands):
                return self._operation(op, operands, i)
            case Call(builtin=builtin, plain=(mask,)) if builtin.family is Family.TEST:
                values = [self._value(mask, each) for each in range(self._size)]
                # Filters may leave fewer instances, so only these are certain.
                return False if builtin.name == "any" and not any(value is not False for value in values) else None
        return None

    def _operation(self, op: str, operands: Sequence[Term], i: int) -> Any:
        values = [self._value(operand, i) for operand in operands]
        match op, values:
            case "and", _:
                return False if False in values else None if None in values else True
            case "or", _:
                return True if True in values else None if None in values else False
            case "if", [condition, then, otherwise]:
                if condition is None:
                    return then if then == otherwise else None
                return then if condition else otherwise
            case _ if op in _COMPARISONS and self._asks_too_many(op, operands, values):
                return False
        return None if None in values else compute(op, values)

    def _asks_too_many(self, op: str, operands: Sequence[Term], values: Sequence[Any]) -> bool:
        """Whether a comparison asks `count(…)` for more instances than there are."""
        for term, other, more in ((operands[0], values[1], op), (operands[1], values[0], _FLIPPED.get(op, op))):
            while isinstance(term, Ref):
                term = term.binding.value
            if isinstance(term, Call) and term.builtin.family is Family.COUNT and isinstance(other, int | float):
                most = sum(self._value(term.plain[0], i) is not False for i in range(self._size))
                return (more == ">" and other >= most) or (more in (">=", "==") and other > most)
        return False

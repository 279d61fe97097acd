"""Smallest change of one number that would have changed a decision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from smetric.policy.decision import Decision, Need
from smetric.policy.snapshot import Snapshot
from smetric.policy.types import BASES, clipped, figure
from smetric.policy.vocabulary import Feature, Kind, RequestField, Unknown, Vocabulary

#: Instances whose inputs are changed: the chosen one, the best by score, then those that could not be chosen.
_INSTANCES = 16
#: The smallest change of a number that has no upper end, and of one that lies on 0..1.
_STEP, _SHARE_STEP = 1.0, 0.01
#: Doublings of a change before a number is given up.
_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class Change:
    """One input that would have flipped the decision.

    Args:
        name: the feature, or the field as `req.NAME`.
        instance: whose; empty for a field of the request.
        before: its value.
        after: the nearest value found at which somebody else is picked.
        unit: of the number.
        becomes: what is decided then: an instance's id, or how it ends otherwise.
        span: how far the values of all candidates lie apart, to compare changes of different features.
    """

    name: str
    instance: str
    before: float
    after: float
    unit: str
    becomes: str
    span: float

    @property
    def relative(self) -> float:
        """The size of the change beside the values there are."""
        return abs(self.after - self.before) / max(self.span, abs(self.before), 1e-9)

    def __str__(self) -> str:
        amount = figure(abs(self.after - self.before))
        if not self.instance:
            return f"{self.name} {figure(self.after)} instead of {figure(self.before)} → {self.becomes}"
        counted = self.unit in BASES.values()
        word = "more" if self.after > self.before else "fewer" if counted else "less"
        name = self.name
        if self.unit in ("tokens", "blocks", "bytes"):
            name = f"{self.unit} of {name}"
        if amount == "1":
            name = name.replace(self.unit, self.unit.removesuffix("s")) if counted else name
        return f"{amount} {word} {name} on {clipped(self.instance)} → {self.becomes}"


def smallest_changes(decision: Decision, vocabulary: Vocabulary, most: int = 3) -> list[Change]:
    """The smallest changes that flip *decision*, at most one of each input, least first."""
    best: dict[tuple[str, str], Change] = {}
    for change in _changes(decision, vocabulary):
        known = best.get((change.name, change.instance))
        if known is None or change.relative < known.relative:
            best[change.name, change.instance] = change
    return sorted(best.values(), key=lambda change: change.relative)[:most]


def _changes(decision: Decision, vocabulary: Vocabulary) -> Iterator[Change]:
    told = _told(decision)
    near = list(decision.foremost(_INSTANCES))
    near += [i for i in range(len(decision.snapshot.ids)) if i not in near][: _INSTANCES - len(near)]
    for name in sorted(decision.reads):
        feature = vocabulary.features[name]
        column = decision.snapshot.columns[name]
        if feature.kind is not Kind.NUMBER:
            continue
        known = decision.snapshot.is_known(name)
        span = max(column) - min(column)
        ends = _ends(decision, vocabulary, feature)
        for i in near:
            if not known[i]:
                continue

            def ask(value: float, feature: Feature = feature, i: int = i) -> str:
                return _decided(decision, _columns(decision, vocabulary, feature, i, value), {})

            for after, becomes in _nearest(ask, column[i], feature, ends, told):
                ident = decision.snapshot.ids[i]
                yield Change(name, ident, column[i], after, feature.unit, becomes, span)
    for name in sorted(decision.policy.fields):
        field = vocabulary.request[name]
        value = getattr(decision.request, name)
        if field.kind is Kind.NUMBER and value is not None and name != "held":

            def ask_field(value: float, name: str = name) -> str:
                return _decided(decision, {}, {name: value})

            for after, becomes in _nearest(ask_field, value, field, _ends(decision, vocabulary, field), told):
                yield Change(f"req.{name}", "", value, after, field.unit, becomes, 0.0)


def _columns(
    decision: Decision, vocabulary: Vocabulary, feature: Feature, i: int, value: float
) -> dict[str, list[float]]:
    """The column of *feature* with *value* for instance *i*, and those in which it stands in for unknown cells."""
    changed = _changed(decision, feature, i, value)
    columns = {feature.name: changed}
    for name, known in decision.snapshot.known.items():
        if known is not None and vocabulary.features[name].instead == feature.name:
            cells = zip(decision.snapshot.columns[name], known, changed, strict=True)
            columns[name] = [cell if told else instead for cell, told, instead in cells]
    return columns


def _changed(decision: Decision, feature: Feature, i: int, value: float) -> list[float]:
    """The column of *feature* with *value* for candidate *i*; the mean that stands in for unknown cells follows."""
    column = decision.snapshot.columns[feature.name]
    cells = [*column[:i], value, *column[i + 1 :]]
    known = decision.snapshot.known.get(feature.name)
    if known is None or feature.unknown is not Unknown.MEAN:
        return cells
    mean = feature.fill([cell if told else None for cell, told in zip(column, known, strict=True)])[0]
    # What stands above the mean of the known is the router's own count, and remains.
    own = [cell if cell > usual else feature.low for cell, usual in zip(column, mean, strict=True)]
    return feature.fill([cell if told else None for cell, told in zip(cells, known, strict=True)], own)[0]


def _ends(decision: Decision, vocabulary: Vocabulary, word: Feature | RequestField) -> tuple[float, float]:
    """The lowest and the highest value that *word* can have, whatever else the decision read left as it was."""
    request, columns = decision.request, decision.snapshot.columns
    low, high = word.low, min(word.high, getattr(request, word.at_most)) if word.at_most else word.high
    for feature in vocabulary.features.values():
        if feature.at_most == word.name:
            low = max([low, *columns.get(feature.name, ())])
    for field in vocabulary.request.values():
        if field.at_most == word.name and field.name in decision.policy.fields:
            low = max(low, getattr(request, field.name) or low)
    return low, high


def _nearest(
    ask: Callable[[float], str], value: float, word: Feature | RequestField, ends: tuple[float, float], told: str
) -> Iterator[tuple[float, str]]:
    """The nearest value above and the nearest below *value* at which *ask* answers something else than *told*."""
    step = _SHARE_STEP if word.high <= 1 else _STEP
    for sign, end in ((1, ends[1]), (-1, ends[0])):
        last = math.ceil((end - value) * sign / step)  # that many steps reach the end

        def tried(steps: int, sign: int = sign, end: float = end, last: int = last) -> float:
            return end if steps == last else value + sign * steps * step

        same, steps = 0, 1
        for _ in range(_DOUBLINGS):
            steps = min(steps, last)
            if steps <= same:
                break
            becomes = ask(tried(steps))
            if becomes != told:
                while steps - same > 1:
                    middle = (same + steps) // 2
                    found = ask(tried(middle))
                    if found == told:
                        same = middle
                    else:
                        steps, becomes = middle, found
                yield tried(steps), becomes
                break
            same, steps = steps, steps * 2


def _decided(decision: Decision, columns: Mapping[str, list[Any]], fields: Mapping[str, Any]) -> str:
    """What the policy decides with some columns and fields replaced; as before where it lacks a look-up for that."""
    seen = decision.snapshot
    snapshot = Snapshot(seen.ids, {**seen.columns, **columns}, seen.known, seen.stamps, seen.origins, seen.now)
    request = decision.request
    if fields:
        read = {name: getattr(request, name) for name in decision.policy.fields}
        request = SimpleNamespace(**{"id": getattr(request, "id", ""), **read, **fields})
    again = decision.policy.decide(snapshot, request, decision.used, decision.seed)
    return _told(decision) if isinstance(again, Need) else _told(again)


def _told(decision: Decision) -> str:
    if decision.instance is not None:
        return decision.instance
    return f"{decision.outcome.value} by {decision.rule}"

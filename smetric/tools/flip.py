"""Smallest changes of one number that flip a decision."""

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

#: The number of instances whose inputs are changed: the chosen one, the best by score, then the removed ones.
_INSTANCES = 16
#: The smallest change of a number without an upper end, and of a share.
_STEP, _SHARE_STEP = 1.0, 0.01
#: Limit on the doublings of a change.
_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one input that flips the decision.

    Args:
        name: the feature, or the field as `req.NAME`.
        instance: the instance of the feature; empty for a field.
        before: the value.
        after: the nearest value found that flips the decision.
        unit: of the number.
        becomes: the new decision: an instance's id, or the outcome.
        span: the distance between the values of all candidates, to compare changes of different features.
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
        """The size of the change relative to the values of the candidates."""
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
    """The *most* smallest changes that flip *decision*, one of each input at most, least first."""
    best: dict[tuple[str, str], Change] = {}
    for change in _changes(decision, vocabulary):
        known = best.get((change.name, change.instance))
        if known is None or change.relative < known.relative:
            best[change.name, change.instance] = change
    return sorted(best.values(), key=lambda change: change.relative)[:most]


def _changes(decision: Decision, vocabulary: Vocabulary) -> Iterator[Change]:
    unchanged = _end_of(decision)
    near = list(decision.foremost(_INSTANCES))
    near += [i for i in range(len(decision.snapshot.ids)) if i not in near][: _INSTANCES - len(near)]
    for name in sorted(decision.reads):
        feature = vocabulary.features[name]
        if feature.kind is not Kind.NUMBER:
            continue
        column, known = decision.snapshot.columns[name], decision.snapshot.is_known(name)
        span = max(column) - min(column)
        for i in near:
            if known[i]:

                def ask(value: float, feature: Feature = feature, i: int = i) -> str:
                    return _decided(decision, _columns(decision, vocabulary, feature, i, value), {})

                for after, becomes in _nearest(
                    ask, column[i], feature, _ends(decision, vocabulary, feature), unchanged
                ):
                    yield Change(name, decision.snapshot.ids[i], column[i], after, feature.unit, becomes, span)
    for name in sorted(decision.policy.fields):
        field, value = vocabulary.request[name], getattr(decision.request, name)
        if field.kind is Kind.NUMBER and value is not None and name != "held":

            def ask_field(value: float, name: str = name) -> str:
                return _decided(decision, {}, {name: value})

            for after, becomes in _nearest(ask_field, value, field, _ends(decision, vocabulary, field), unchanged):
                yield Change(f"req.{name}", "", value, after, field.unit, becomes, 0.0)


def _columns(
    decision: Decision, vocabulary: Vocabulary, feature: Feature, i: int, value: float
) -> dict[str, list[float]]:
    """The column of *feature* with *value* for candidate *i*, and the columns in which it replaces unknown cells."""
    changed = _changed(decision, feature, i, value)
    columns = {feature.name: changed}
    for name, known in decision.snapshot.known.items():
        if known is not None and vocabulary.features[name].instead == feature.name:
            cells = zip(decision.snapshot.columns[name], known, changed, strict=True)
            columns[name] = [cell if is_known else instead for cell, is_known, instead in cells]
    return columns


def _changed(decision: Decision, feature: Feature, i: int, value: float) -> list[float]:
    """The column of *feature* with *value* for candidate *i*; the mean in place of unknown cells follows."""
    column = decision.snapshot.columns[feature.name]
    cells = [*column[:i], value, *column[i + 1 :]]
    known = decision.snapshot.known.get(feature.name)
    if known is None or feature.unknown is not Unknown.MEAN:
        return cells
    mean = feature.fill([cell if is_known else None for cell, is_known in zip(column, known, strict=True)])[0]
    # A cell above the mean of the known ones is the router's own count, which remains.
    own = [cell if cell > usual else feature.low for cell, usual in zip(column, mean, strict=True)]
    return feature.fill([cell if is_known else None for cell, is_known in zip(cells, known, strict=True)], own)[0]


def _ends(decision: Decision, vocabulary: Vocabulary, word: Feature | RequestField) -> tuple[float, float]:
    """The lowest and the highest value of *word* that are possible beside the other inputs."""
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
    ask: Callable[[float], str], value: float, word: Feature | RequestField, ends: tuple[float, float], unchanged: str
) -> Iterator[tuple[float, str]]:
    """The nearest values above and below *value* at which the answer of *ask* is not *unchanged*, and these answers."""
    step = _SHARE_STEP if word.high <= 1 else _STEP
    for sign, end in ((1, ends[1]), (-1, ends[0])):
        last = math.ceil((end - value) * sign / step)  # the number of steps to the end

        def tried(steps: int, sign: int = sign, end: float = end, last: int = last) -> float:
            return end if steps == last else value + sign * steps * step

        same, steps = 0, min(1, last)
        for _ in range(_DOUBLINGS):
            if steps <= same or (becomes := ask(tried(steps))) != unchanged:
                break
            same, steps = steps, min(steps * 2, last)
        else:
            continue
        if steps <= same:
            continue
        while steps - same > 1:  # bisect
            middle = (same + steps) // 2
            found = ask(tried(middle))
            if found == unchanged:
                same = middle
            else:
                steps, becomes = middle, found
        yield tried(steps), becomes


def _decided(decision: Decision, columns: Mapping[str, list[Any]], fields: Mapping[str, Any]) -> str:
    """The decision with some columns and fields replaced; the same if it needs a look-up for that."""
    seen = decision.snapshot
    snapshot = Snapshot(seen.ids, {**seen.columns, **columns}, seen.known, seen.stamps, seen.origins, seen.now)
    request = decision.request
    if fields:
        read = {name: getattr(request, name) for name in decision.policy.fields}
        request = SimpleNamespace(**{"id": getattr(request, "id", ""), **read, **fields})
    again = decision.policy.decide(snapshot, request, decision.used, decision.seed)
    return _end_of(decision if isinstance(again, Need) else again)


def _end_of(decision: Decision) -> str:
    return decision.instance or f"{decision.outcome.value} by {decision.rule}"

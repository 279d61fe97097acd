"""A recorded decision as the policy saw it: snapshot, request, cursors and seed, for any policy to decide on again.

What was not recorded is never made up: a policy that gets to read it learns that it is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET

from smetric import policy as language
from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.policy import Decision, Kind, Policy, Snapshot, Source
from smetric.policy.parameter import CONFIGURATION
from smetric.policy.pseudonym import pseudonym
from smetric.policy.snapshot import Origins
from smetric.records.fields import HIDDEN, ON_DEMAND, fields_read, strings_named
from smetric.records.line import DecisionLine, PolicyLine
from smetric.records.reader import Recorded

_SETS = frozenset(name for name, feature in VOCABULARY.features.items() if feature.kind is Kind.SET)


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """Why a decision cannot be made again: what a policy read that the record does not hold."""

    names: frozenset[str]

    def __str__(self) -> str:
        return f"not answerable: {', '.join(sorted(self.names))} not read"


class _Unread(Exception):
    """A policy got to a feature that was not recorded."""


class _Columns(dict[str, list[Any]]):
    """Features by name; asking for one that was not recorded ends the evaluation."""

    __slots__ = ()

    def __missing__(self, name: str) -> list[Any]:
        raise _Unread(name)


class Judge:
    """Decides recorded decisions by one policy.

    Args:
        policy: the policy.
        is_recorded: it is the one that made them, so it sees what it saw then and not what was looked up later.
    """

    def __init__(self, policy: Policy, *, is_recorded: bool = False) -> None:
        self.policy = policy
        self._is_recorded = is_recorded
        self._fields = frozenset(fields_read(policy))
        self._on_demand = self._fields & ON_DEMAND
        #: Strings that the policy names, by the stand-ins they would have in a record.
        self._named = {pseudonym(text): text for text in strings_named(policy)}
        #: The last winner of picks that the record says nothing of, as this policy decided them.
        self._cursors: dict[str, str] = {}
        self._last: PolicyLine | None = None
        self._absent: NotRecorded | None = None

    def decide(self, recorded: Recorded) -> Decision | NotRecorded:
        """What the policy decides on *recorded*, or what is missing for that.

        Picks that rotate go on from where the record says they stood, those that the recorded policy does not have
        from the last decision here. The recorded policy has all of its own, and one that it was not given had not
        turned yet: lines stand in the order in which requests ended, so such a decision need not come first.
        """
        if recorded.policy is not self._last:
            self._last = recorded.policy
            absent = self._fields.difference(recorded.policy.fields)
            self._absent = NotRecorded(frozenset(f"req.{name}" for name in absent)) if absent else None
        if self._absent is not None:
            return self._absent
        line = recorded.line
        request = line.request
        # Those of other routes, or of a time when nobody asked, were not filled.
        missing = {name for name in self._on_demand if getattr(request, name) is UNSET}
        if missing:
            return NotRecorded(frozenset(f"req.{name}" for name in missing))
        if self._named:
            self._unveil(request)
        own = self._is_recorded or self.policy.digest == recorded.policy.digest
        cursors = line.cursors if own or not self._cursors else {**self._cursors, **line.cursors}
        try:
            snapshot = _snapshot(line, is_recorded=self._is_recorded)
            decided = self.policy.decide(snapshot, request, cursors, line.seed)
        except _Unread as unread:
            return NotRecorded(frozenset(unread.args))
        except TypeError as error:
            raise ConfigError(
                f"decision {line.id}: a value in its record is not of its feature's kind ({error})"
            ) from error
        if not isinstance(decided, Decision):
            return NotRecorded(decided.features)
        if decided.index >= 0:
            self._cursors.update(decided.cursors)
        return decided

    def _unveil(self, request: Any) -> None:
        """Put the strings that the policy names in the place of their stand-ins."""
        for name in HIDDEN:
            text = getattr(request, name)
            if text and text in self._named:
                setattr(request, name, self._named[text])


def _snapshot(line: DecisionLine, *, is_recorded: bool) -> Snapshot:
    """The snapshot that *line* was decided on; with what was looked up later, unless *is_recorded*."""
    columns = _Columns(id=line.ids)
    known: dict[str, list[bool] | None] = {}
    stamps: dict[str, list[float | None]] = {}
    origins: dict[str, Origins] = {}
    count = len(line.ids)
    for name, column in line.columns.items():
        if is_recorded and column.lag is not None:
            continue
        columns[name] = [frozenset(cell) for cell in column.values] if name in _SETS else column.values
        if column.unknown:
            known[name] = cells = [True] * count
            for i in column.unknown:
                cells[i] = False
        if column.age is not None:
            # An age becomes a stamp before the moment 0, at which the snapshot was taken.
            stamps[name] = [None if age is None else -age for age in column.age]
        if column.origin:
            origins[name] = column.origin
    return Snapshot(line.ids, columns, known, stamps, origins)


def policy_of(recorded: PolicyLine, settings: Mapping[str, float | str | bool] | None = None) -> Policy:
    """The policy that made a decision, as the record has it, with *settings* instead of its own where they are given.

    Raises:
        PolicyError: this version cannot run it, or *settings* do not fit.
    """
    values = {**recorded.params, **(settings or {})}
    texts = recorded.libraries

    def library(name: str) -> Source | None:
        return Source(texts[name], f"{name}.policy") if name in texts else None

    by = "`--set`" if settings else CONFIGURATION
    return language.load(recorded.text, VOCABULARY, path=recorded.file, settings=values, libraries=library, set_by=by)


def lag_of(line: DecisionLine, *decisions: Decision) -> float | None:
    """How much later than the recorded one what *decisions* rest on was looked up, seconds; None where none was."""
    lags = {name: column.lag for name, column in line.columns.items() if column.lag is not None}
    if not lags:
        return None
    read = frozenset[str]().union(*(decision.reads for decision in decisions))
    return max((lag for name, lag in lags.items() if name in read), default=None)

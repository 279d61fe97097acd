"""Replay of recorded decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from smetric import names
from smetric import policy as language
from smetric.errors import ConfigError
from smetric.features import ON_DEMAND, VOCABULARY
from smetric.policy import Decision, Kind, Outcome, Policy, Snapshot, Source
from smetric.policy.parameter import CONFIGURATION
from smetric.policy.snapshot import Origins
from smetric.policy.vocabulary import pseudonym
from smetric.records.format import HIDDEN, DecisionLine, PolicyLine, fields_read, strings_named
from smetric.records.reader import Recorded

# A recorded decision as the policy saw it: snapshot, request, cursors and seed, for any policy to decide on again.
#
# What was not recorded is never made up: a policy that gets to read it learns that it is not there.

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


# What a replay finds: how often two sides agree, which rules requests moved between, and how load would be spread.
#
# Filled decision by decision (`replay.py`); printed by `report.py` and `html_report.py`.

#: Kinds of moves of which an example is kept; the rest are only counted.
MOST_EXAMPLES = 64


@dataclass(frozen=True, slots=True)
class Side:
    """One side's decision: the rule that fired, and what it came to: the id of an instance, or an outcome in words."""

    rule: str
    choice: str


@dataclass(slots=True)
class Spread:
    """How one side spreads requests over the instances.

    Args:
        requests: by instance.
        tokens: prompt tokens, by instance.
        hit_tokens: of those with a known hit, tokens found cached there; and their prompt tokens.
    """

    requests: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    hit_tokens: float = 0.0
    hit_prompt_tokens: float = 0.0

    def imbalance(self, instances: int) -> float | None:
        """Most requests of an instance over the mean of all *instances*; None without any."""
        total = self.requests.total()
        return max(self.requests.values()) * instances / total if total else None

    def token_imbalance(self, instances: int) -> float | None:
        """The same for prompt tokens."""
        total = self.tokens.total()
        return max(self.tokens.values()) * instances / total if total else None

    @property
    def hit_share(self) -> float | None:
        """Share of the prompt tokens found cached, over the decisions that say so of both sides' picks."""
        return self.hit_tokens / self.hit_prompt_tokens if self.hit_prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Move:
    """A kind of move: the rule that one side fired, and the one that the other did."""

    before: str
    after: str


@dataclass(slots=True)
class Example:
    """A request of one kind of move."""

    recorded: Recorded
    choice: str
    #: The one side's decision, None where it is what was recorded; and the new one.
    before: Decision | None
    after: Decision
    is_tie: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """The higher, the more it tells."""
        return not self.is_tie, self.recorded.line.request.prompt_len


@dataclass(slots=True)
class Comparison:
    """What was found so far.

    Args:
        before: what is compared with: `recorded`, or a policy's name.
        after: the policy that decides anew.
    """

    before: str
    after: str
    #: Decisions read, and those of them where no policy ran.
    read: int = 0
    without_policy: int = 0
    #: Decisions that both sides made, and how often they chose the same.
    compared: int = 0
    agreed: int = 0
    #: Of those that chose differently, where the other's choice was as good: a tie fell the other way.
    ties: int = 0
    #: Of those compared, decisions that rest on what was looked up later, and by how much in all.
    late: int = 0
    late_s: float = 0.0
    #: Why decisions could not be made again, and how often.
    unanswered: Counter[str] = field(default_factory=Counter)
    #: How often each pair of rules chose differently, and how often rules changed though the choice did not.
    moves: Counter[Move] = field(default_factory=Counter)
    renamed: Counter[Move] = field(default_factory=Counter)
    rules_before: Counter[str] = field(default_factory=Counter)
    rules_after: Counter[str] = field(default_factory=Counter)
    spread_before: Spread = field(default_factory=Spread)
    spread_after: Spread = field(default_factory=Spread)
    instances: set[str] = field(default_factory=set)
    examples: dict[Move, Example] = field(default_factory=dict)
    #: First and last decision, Unix nanoseconds.
    first_ns: int = 0
    last_ns: int = 0

    @property
    def agreement(self) -> float | None:
        """Share of the compared decisions in which both sides chose the same; None where none was compared."""
        return self.agreed / self.compared if self.compared else None

    def add(
        self, recorded: Recorded, was: Side, now: Side, decision: Decision, other: Decision | None, lag: float | None
    ) -> None:
        """Both sides have decided on *recorded*.

        Args:
            recorded: the decision.
            was: what it is compared with.
            now: what *decision* comes to.
            decision: the new one.
            other: what *was* comes from, None for the record itself.
            lag: seconds by which what they read was looked up later.
        """
        self.compared += 1
        self.instances.update(recorded.line.ids)
        self.rules_before[was.rule] += 1
        self.rules_after[now.rule] += 1
        if lag is not None:
            self.late += 1
            self.late_s += lag
        self._place(recorded, was.choice, now.choice)
        move = Move(was.rule, now.rule)
        if was.choice == now.choice:
            self.agreed += 1
            if was.rule != now.rule:
                self.renamed[move] += 1
            return
        self.moves[move] += 1
        is_tie = _is_tie(decision, was.choice)
        self.ties += is_tie
        self._keep(move, Example(recorded, was.choice, other, decision, is_tie))

    def _place(self, recorded: Recorded, before: str, after: str) -> None:
        line = recorded.line
        prompt = line.request.prompt_len
        column = line.columns.get("hit_len")
        hits: list[Any] = []
        for choice, spread in ((before, self.spread_before), (after, self.spread_after)):
            if choice in line.ids:
                spread.requests[choice] += 1
                spread.tokens[choice] += int(prompt)
                at = line.ids.index(choice)
                if column is not None and at not in column.unknown:
                    hits.append(column.values[at])
        if len(hits) == 2:
            for hit, spread in zip(hits, (self.spread_before, self.spread_after), strict=True):
                spread.hit_tokens += hit
                spread.hit_prompt_tokens += prompt

    def _keep(self, move: Move, example: Example) -> None:
        """Keep *example* if it is the most telling of its kind: no tie, and then the largest request."""
        kept = self.examples.get(move)
        if kept is None:
            if len(self.examples) < MOST_EXAMPLES:
                self.examples[move] = example
        elif kept.rank < example.rank:
            self.examples[move] = example


def _is_tie(decision: Decision, other: str) -> bool:
    """Whether *decision* might as well have chosen *other*."""
    score, ids = decision.score, decision.snapshot.ids
    if decision.index < 0 or other not in ids:
        return False
    at = ids.index(other)
    return at in decision.candidates and (score is None or score[at] == score[decision.index])


# Decides recorded decisions again by another policy, or by the very one that made them, and compares.
#
# Each decision is taken as it stood: loads and caches are those of the record, as they came about by what was really
# chosen. What would have come of it later is the simulator's question.

#: What the record calls outcomes at which nobody was chosen, in the words of decisions.
_OUTCOMES = {
    names.REJECTED: Outcome.REJECT.value,
    names.NO_CANDIDATE: Outcome.NOBODY.value,
    names.HELD: Outcome.HOLD.value,
}
RECORDED = "recorded"

Settings = Mapping[str, float | str | bool]


class Judges:
    """One judge for all decisions, or for each policy in the record one of its own.

    Args:
        policy: the policy; None for those of the record.
        settings: of parameters, over those of the record, for each of its policies that has them; those of *policy* are
            settled.
    """

    def __init__(self, policy: Policy | None, settings: Settings | None = None) -> None:
        self._only = Judge(policy) if policy is not None else None
        self._settings = settings or {}
        #: Names among them that no policy had so far.
        self._unused = set(self._settings)
        self._by_policy: dict[str, Judge] = {}
        self._last: tuple[PolicyLine, Judge] | None = None

    def of(self, policy: PolicyLine) -> Judge:
        """Who decides what *policy* decided.

        Raises:
            PolicyError: a policy of the record cannot be loaded, or a setting does not fit it.
        """
        if self._only is not None:
            return self._only
        if self._last is None or self._last[0] is not policy:
            key = repr((policy.text, policy.libraries, policy.params))
            judge = self._by_policy.get(key)
            if judge is None:
                settings = {name: value for name, value in self._settings.items() if name in policy.params}
                self._unused.difference_update(settings)
                judge = Judge(policy_of(policy, settings), is_recorded=not settings)
                self._by_policy[key] = judge
            self._last = policy, judge
        return self._last[1]

    def require_used(self) -> None:
        """Once all is decided: refuse a setting that no policy of the record has.

        Raises:
            PolicyError: by the last of them.
        """
        if self._unused and self._last is not None:
            policy_of(self._last[0], {name: self._settings[name] for name in self._unused})


def replay(decisions: Iterable[Recorded], after: Judges, before: Judges | None, found: Comparison) -> None:
    """Decide all *decisions* by *after* and add to *found* how that compares with *before*; None: with the record."""
    for recorded in decisions:
        line = recorded.line
        found.read += 1
        found.first_ns = min(found.first_ns or line.time_ns, line.time_ns)
        found.last_ns = max(found.last_ns, line.time_ns)
        if not line.ids:
            found.without_policy += 1
            continue
        decision = after.of(recorded.policy).decide(recorded)
        if isinstance(decision, NotRecorded):
            found.unanswered[str(decision)] += 1
            continue
        other = before.of(recorded.policy).decide(recorded) if before is not None else None
        if isinstance(other, NotRecorded):
            found.unanswered[str(other)] += 1
            continue
        was, decided = (side(other), (other, decision)) if other is not None else (recorded_side(line), (decision,))
        found.add(recorded, was, side(decision), decision, other, lag_of(line, *decided))


def side(decision: Decision) -> Side:
    """What *decision* comes to."""
    return Side(decision.rule, decision.choice)


def recorded_side(line: DecisionLine) -> Side:
    """What the recorded decision came to."""
    if line.instance is not None:
        return Side(line.rule, line.instance)
    outcome = _OUTCOMES.get(line.outcome, line.outcome)
    return Side(line.rule, f"{outcome} {line.reject or line.status}" if line.outcome == names.REJECTED else outcome)

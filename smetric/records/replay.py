"""Replay: recorded decisions made again by another policy, or by the one that made them, and compared.

Each decision is taken as it stood: loads and caches are those of the record, which the recorded choices have caused.
What another choice would have caused later is a question for the simulator. Nothing that was not recorded is made up: a
decision that needs it is not answerable.
"""

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
from smetric.policy import Decision, Kind, Outcome, Policy, PolicyText, Snapshot
from smetric.policy.parameter import CONFIGURATION
from smetric.policy.snapshot import Origins
from smetric.policy.vocabulary import pseudonym
from smetric.records.format import HIDDEN, DecisionLine, PolicyLine, fields_read, strings_named
from smetric.records.reader import Recorded

_SETS = frozenset(name for name, feature in VOCABULARY.features.items() if feature.kind is Kind.SET)


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """Features that a policy reads and that the record does not hold."""

    names: frozenset[str]

    def __str__(self) -> str:
        return f"not answerable: {', '.join(sorted(self.names))} not read"


class _Unread(Exception):
    """A policy reads a feature that was not recorded."""


class _Columns(dict[str, list[Any]]):
    """Features by name; reading one that was not recorded ends the evaluation."""

    __slots__ = ()

    def __missing__(self, name: str) -> list[Any]:
        raise _Unread(name)


class Judge:
    """A policy that decides recorded decisions again.

    Args:
        policy: the policy.
        is_recorded: whether it made them; it then sees only what it saw, without later look-ups.
    """

    def __init__(self, policy: Policy, *, is_recorded: bool = False) -> None:
        self.policy = policy
        self._is_recorded = is_recorded
        self._fields = frozenset(fields_read(policy))
        self._on_demand = self._fields & ON_DEMAND
        #: Strings that the policy names, by their pseudonyms.
        self._named = {pseudonym(text): text for text in strings_named(policy)}
        #: Last winners of picks that are not in the record, as this policy decided them.
        self._cursors: dict[str, str] = {}
        self._last: PolicyLine | None = None
        self._absent: NotRecorded | None = None

    def decide(self, recorded: Recorded) -> Decision | NotRecorded:
        """Return its decision on *recorded*, or the features that the record lacks for one.

        Rotating picks continue from the recorded cursors; picks that the recorded policy does not have continue from
        the last decision here. If a pick of the recorded policy has no cursor, it had not rotated before. Such a
        decision need not be the first line, because lines are in the order in which requests ended.
        """
        if recorded.policy is not self._last:
            self._last = recorded.policy
            absent = self._fields.difference(recorded.policy.fields)
            self._absent = NotRecorded(frozenset(f"req.{name}" for name in absent)) if absent else None
        if self._absent is not None:
            return self._absent
        line = recorded.line
        request = line.request
        # They were not filled for other routes, or while no policy read them.
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
        """Replace pseudonyms of strings that the policy names by these strings."""
        for name in HIDDEN:
            text = getattr(request, name)
            if text and text in self._named:
                setattr(request, name, self._named[text])


def _snapshot(line: DecisionLine, *, is_recorded: bool) -> Snapshot:
    """Return the snapshot of *line*, with later look-ups unless *is_recorded*."""
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
            # The snapshot was taken at time 0; an age becomes a stamp before it.
            stamps[name] = [None if age is None else -age for age in column.age]
        if column.origin:
            origins[name] = column.origin
    return Snapshot(line.ids, columns, known, stamps, origins)


def policy_of(recorded: PolicyLine, settings: Mapping[str, float | str | bool] | None = None) -> Policy:
    """Return the policy that made a decision, with *settings* over its own values.

    Raises:
        PolicyError: this version cannot run it, or *settings* do not fit.
    """
    values = {**recorded.params, **(settings or {})}
    texts = recorded.libraries

    def library(name: str) -> PolicyText | None:
        return PolicyText(texts[name], f"{name}.policy") if name in texts else None

    by = "`--set`" if settings else CONFIGURATION
    return language.load(recorded.text, VOCABULARY, path=recorded.file, settings=values, libraries=library, set_by=by)


def lag_of(line: DecisionLine, *decisions: Decision) -> float | None:
    """Return how many seconds after the recorded decision the look-ups of *decisions* came; None without look-ups."""
    lags = {name: column.lag for name, column in line.columns.items() if column.lag is not None}
    if not lags:
        return None
    read = frozenset[str]().union(*(decision.reads for decision in decisions))
    return max((lag for name, lag in lags.items() if name in read), default=None)


#: Kinds of moves with an example; the rest are only counted.
MOST_EXAMPLES = 64


@dataclass(frozen=True, slots=True)
class Side:
    """Decision of one side: the rule that fired, and its choice: an instance id, or an outcome in words."""

    rule: str
    choice: str


@dataclass(slots=True)
class LoadSpread:
    """Distribution of requests over instances by one side.

    Args:
        requests: by instance.
        tokens: prompt tokens, by instance.
        hit_tokens: cached tokens over the decisions with known hits.
        hit_prompt_tokens: their prompt tokens.
    """

    requests: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    hit_tokens: float = 0.0
    hit_prompt_tokens: float = 0.0

    def imbalance(self, instances: int) -> float | None:
        """Return most requests of an instance over the mean of all *instances*; None without requests."""
        total = self.requests.total()
        return max(self.requests.values()) * instances / total if total else None

    def token_imbalance(self, instances: int) -> float | None:
        """Return the same for prompt tokens."""
        total = self.tokens.total()
        return max(self.tokens.values()) * instances / total if total else None

    @property
    def hit_share(self) -> float | None:
        """Share of prompt tokens found cached, over the decisions with known hits of both picks."""
        return self.hit_tokens / self.hit_prompt_tokens if self.hit_prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Move:
    """A kind of difference: the rule that one side fired, and the rule of the other."""

    before: str
    after: str


@dataclass(slots=True)
class Example:
    """A request of one kind of move."""

    recorded: Recorded
    choice: str
    #: Decision of the one side, None for the recorded one; and the new one.
    before: Decision | None
    after: Decision
    is_tie: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """Order of examples; higher is more telling."""
        return not self.is_tie, self.recorded.line.request.prompt_len


@dataclass(slots=True)
class Comparison:
    """Result of a replay so far.

    Args:
        before: the one side: `recorded`, or a policy's name.
        after: the policy that decides again.
    """

    before: str
    after: str
    #: Decisions read, and those of them where no policy ran.
    read: int = 0
    without_policy: int = 0
    #: Decisions that both sides made, and those with equal choices.
    compared: int = 0
    agreed: int = 0
    #: Of those with different choices, the ties.
    ties: int = 0
    #: Of those compared, decisions with later look-ups, and their total lag.
    late: int = 0
    late_s: float = 0.0
    #: Why decisions could not be made again, and how often.
    unanswered: Counter[str] = field(default_factory=Counter)
    #: Pairs of rules with different choices, and with equal ones.
    moves: Counter[Move] = field(default_factory=Counter)
    renamed: Counter[Move] = field(default_factory=Counter)
    rules_before: Counter[str] = field(default_factory=Counter)
    rules_after: Counter[str] = field(default_factory=Counter)
    spread_before: LoadSpread = field(default_factory=LoadSpread)
    spread_after: LoadSpread = field(default_factory=LoadSpread)
    instances: set[str] = field(default_factory=set)
    examples: dict[Move, Example] = field(default_factory=dict)
    #: First and last decision, Unix nanoseconds.
    first_ns: int = 0
    last_ns: int = 0

    @property
    def agreement(self) -> float | None:
        """Share of the compared decisions with equal choices; None if none was compared."""
        return self.agreed / self.compared if self.compared else None

    def add(
        self, recorded: Recorded, was: Side, now: Side, decision: Decision, other: Decision | None, lag: float | None
    ) -> None:
        """Add a decision that both sides have made.

        Args:
            recorded: the decision.
            was: the one side.
            now: the result of *decision*.
            decision: the new decision.
            other: the decision of *was*; None for the record itself.
            lag: seconds by which their look-ups were later.
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
        """Keep *example* if it is the most telling of its kind: no tie, then the largest request."""
        kept = self.examples.get(move)
        if kept is None:
            if len(self.examples) < MOST_EXAMPLES:
                self.examples[move] = example
        elif kept.rank < example.rank:
            self.examples[move] = example


def _is_tie(decision: Decision, other: str) -> bool:
    """Return whether *decision* could equally have chosen *other*."""
    score, ids = decision.score, decision.snapshot.ids
    if decision.index < 0 or other not in ids:
        return False
    at = ids.index(other)
    return at in decision.candidates and (score is None or score[at] == score[decision.index])


#: Recorded outcomes without a choice, in the words of decisions.
_OUTCOMES = {
    names.REJECTED: Outcome.REJECT.value,
    names.NO_CANDIDATE: Outcome.NO_CANDIDATE.value,
    names.HELD: Outcome.HOLD.value,
}
RECORDED = "recorded"

Settings = Mapping[str, float | str | bool]


class Judges:
    """Judges of a replay: one policy for all decisions, or each recorded policy for its own.

    Args:
        policy: the policy; None for those of the record.
        settings: parameter values over those of the record, for each policy that has them. Those of *policy* are
            settled.
    """

    def __init__(self, policy: Policy | None, settings: Settings | None = None) -> None:
        self._only = Judge(policy) if policy is not None else None
        self._settings = settings or {}
        #: Settings that no policy had so far.
        self._unused = set(self._settings)
        self._by_policy: dict[str, Judge] = {}
        self._last: tuple[PolicyLine, Judge] | None = None

    def of(self, policy: PolicyLine) -> Judge:
        """Return the judge of decisions that *policy* made.

        Raises:
            PolicyError: a recorded policy cannot be loaded, or a setting does not fit it.
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
        """Refuse a setting that no recorded policy has; called at the end.

        Raises:
            PolicyError: from the last policy.
        """
        if self._unused and self._last is not None:
            policy_of(self._last[0], {name: self._settings[name] for name in self._unused})


def replay(decisions: Iterable[Recorded], after: Judges, before: Judges | None, found: Comparison) -> None:
    """Decide all *decisions* by *after*, and add to *found* how that compares with *before*; None: with the record."""
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
    """Return the side of *decision*."""
    return Side(decision.rule, decision.choice)


def recorded_side(line: DecisionLine) -> Side:
    """Return the side of the recorded decision."""
    if line.instance is not None:
        return Side(line.rule, line.instance)
    outcome = _OUTCOMES.get(line.outcome, line.outcome)
    return Side(line.rule, f"{outcome} {line.reject or line.status}" if line.outcome == names.REJECTED else outcome)

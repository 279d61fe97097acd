"""Decides recorded decisions again by another policy, or by the very one that made them, and compares.

Each decision is taken as it stood: loads and caches are those of the record, as they came about by what was really
chosen. What would have come of it later is the simulator's question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smetric.policy import Decision, Outcome, Policy
from smetric.records.comparison import Comparison, Side
from smetric.records.line import DecisionLine, PolicyLine
from smetric.records.reader import Recorded
from smetric.records.situation import Judge, NotRecorded, lag_of, policy_of
from smetric.telemetry import names

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

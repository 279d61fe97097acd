"""What a replay finds: how often two sides agree, which rules requests moved between, and how load would be spread.

Filled decision by decision (`replay.py`); printed by `report.py` and `html_report.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from smetric.policy import Decision
from smetric.records.reader import Recorded

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

"""The policies that a decision can be held against: those that ship and those that the settings name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cachetools import TTLCache

from smetric.features import VOCABULARY
from smetric.live.account import rules
from smetric.policy import Policy
from smetric.policy.explain import explain, summary
from smetric.policy_file import PolicyFile
from smetric.records.ring import recorded
from smetric.records.situation import Judge, NotRecorded, lag_of
from smetric.telemetry import names
from smetric.telemetry.record import DecisionRecord

#: Seconds for which a policy once loaded is used again, whatever its file says by then.
KEPT_S = 15.0
#: Stands before the name of the route whose policy, as it is in force now, is asked.
IN_FORCE = "in force: "


class Others:
    """Loads those that ship when they are asked for, off the event loop.

    Args:
        in_force: the policies that the settings name, by route.
        shipped: the files of those that ship, by name.
    """

    def __init__(self, in_force: Callable[[], Mapping[str, Policy]], shipped: Mapping[str, Path]) -> None:
        self._in_force = in_force
        self._shipped = shipped
        self._loaded: TTLCache[str, Policy] = TTLCache(64, KEPT_S)

    def names(self) -> list[str]:
        """What may be asked for."""
        return [*self._shipped, *(f"{IN_FORCE}{route}" for route in self._in_force())]

    async def judge(self, record: DecisionRecord, name: str) -> dict[str, Any]:
        """What the policy *name*, one of `names`, would have chosen where *record* was decided, as JSON.

        Raises:
            ConfigError: its file cannot be read.
            PolicyError: it does not check.
        """
        policy = await self._policy(name)
        result: dict[str, Any] = {"origin": names.REPLAY, "policy": f"{policy.name}@{policy.digest}", "asked": name}
        seen = next(recorded([record], [policy]), None)
        if seen is None or not seen.line.ids:
            return result | {"answerable": False, "why": "not answerable: no policy ran"}
        decision = Judge(policy).decide(seen)
        if isinstance(decision, NotRecorded):
            return result | {"answerable": False, "why": str(decision)}
        live, score = record.decision, decision.score
        assert live is not None
        return result | {
            "answerable": True,
            "outcome": decision.outcome.value,
            "instance": decision.instance,
            "rule": decision.rule,
            "agrees": decision.choice == live.choice,
            "sentence": summary(decision),
            "rules": rules(decision),
            "scores": {decision.snapshot.ids[i]: score[i] for i in decision.foremost(256)} if score is not None else {},
            "explanation": explain(decision),
            "lag_s": lag_of(seen.line, decision),
        }

    async def _policy(self, name: str) -> Policy:
        if name.startswith(IN_FORCE):
            return self._in_force()[name.removeprefix(IN_FORCE)]
        path = self._shipped[name]
        policy = self._loaded.get(name)
        if policy is None:
            policy = await asyncio.to_thread(lambda: PolicyFile(path, VOCABULARY).current.policy)
            self._loaded[name] = policy
        return policy

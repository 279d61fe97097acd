"""What a policy in shadow would have decided, as spans, metrics and `/admin/decisions` show it.

Evaluating it is `smetric.shadow`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smetric.policy import explain
from smetric.policy.figure import clipped, figure
from smetric.telemetry import candidates as candidate_rows
from smetric.telemetry import names

if TYPE_CHECKING:
    from smetric.policy.decision import Decision
    from smetric.policy.policy import Policy

#: Characters of the names and choices of several shadows in one attribute.
_TEXT_MAX = 256


@dataclass(slots=True)  # not frozen: that costs a microsecond, for each shadow of each request
class Shadowed:
    """One shadow's answer to one decision.

    Args:
        policy: the policy in shadow.
        generation: its reload counter.
        answer: one of `names.ANSWERS`.
        decision: what it decided; None where it could not.
        missing: what it would have had to read that was not there in time.
        regret: how much worse than its own choice it finds the acting one, 0..1; None where it cannot tell.
        is_new_session: it has seen no request of this conversation before.
        had_diverged: it chose otherwise for an earlier request of this conversation; None where that is not known.
        evaluate_s: seconds it took.
    """

    policy: Policy
    generation: int
    answer: str
    decision: Decision | None = None
    missing: tuple[str, ...] = ()
    regret: float | None = None
    is_new_session: bool = False
    had_diverged: bool | None = None
    evaluate_s: float = 0.0

    @property
    def choice(self) -> str:
        """The instance it would have chosen, or what else it would have done, or why that is not known."""
        if self.decision is not None:
            return self.decision.choice
        return f"not answerable: {', '.join(self.missing)} not read" if self.missing else "error"

    @property
    def agrees(self) -> bool | None:
        """Whether it would have chosen the same; None where it has no answer."""
        return {names.AGREES: True, names.DIFFERS: False}.get(self.answer)


def row(shadowed: Shadowed, *, top: int) -> dict[str, Any]:
    """It as JSON, with the table of at most *top* candidates."""
    decision, policy = shadowed.decision, shadowed.policy
    result: dict[str, Any] = {
        "origin": names.SHADOW,
        "policy": f"{policy.name}@{policy.digest}",
        "generation": shadowed.generation,
        "agrees": shadowed.agrees,
        "choice": shadowed.choice,
        "regret": shadowed.regret,
        "session_had_diverged": shadowed.had_diverged,
        "evaluate_s": shadowed.evaluate_s,
    }
    if decision is not None:
        result |= {
            "rule": decision.rule,
            "instance": decision.instance,
            "margin": decision.margin,
            "summary": candidate_rows.summary(decision),
            "candidates": candidate_rows.rows(decision, top),
            "explanation": explain.explain(decision),
        }
    return result


def note_of(shadowed: Shadowed) -> str:
    """What it would have chosen, in half a line."""
    name, choice = clipped(shadowed.policy.name), clipped(shadowed.choice)
    if shadowed.answer == names.AGREES:
        return f"{name} would choose {choice} too"
    if shadowed.answer != names.DIFFERS:
        return f"{name}: {choice}"
    regret = "" if shadowed.regret is None else f", regret {figure(shadowed.regret)}"
    return f"{name} would choose {choice}{regret}"


def attributes_of(all_shadowed: Sequence[Shadowed]) -> dict[str, Any]:
    """All of them in the attributes of the acting decision's span; several are separated by commas."""
    if not all_shadowed:
        return {}
    result: dict[str, Any] = {
        names.SHADOW_POLICY.name: ", ".join(one.policy.name for one in all_shadowed)[:_TEXT_MAX],
        names.SHADOW_INSTANCE.name: ", ".join(one.choice for one in all_shadowed)[:_TEXT_MAX],
    }
    answers = [one.agrees for one in all_shadowed]
    if None not in answers:
        result[names.SHADOW_AGREES.name] = all(answers)
    regrets = [one.regret for one in all_shadowed if one.regret is not None]
    if regrets:
        result[names.SHADOW_REGRET.name] = max(regrets)
    had_diverged = [one.had_diverged for one in all_shadowed if one.had_diverged is not None]
    if had_diverged:
        result[names.SHADOW_DIVERGED.name] = any(had_diverged)
    return result


def span_of(shadowed: Shadowed, *, top: int, limit: int, ui_hints: bool) -> dict[str, Any]:
    """The attributes of a shadow's own span."""
    policy, decision = shadowed.policy, shadowed.decision
    result: dict[str, Any] = {
        names.ORIGIN.name: names.SHADOW,
        names.POLICY_NAME.name: policy.name,
        names.POLICY_HASH.name: policy.digest,
        names.POLICY_GENERATION.name: shadowed.generation,
        names.DURATION.name: shadowed.evaluate_s,
    }
    if shadowed.agrees is not None:
        result[names.SHADOW_AGREES.name] = shadowed.agrees
    if decision is None:
        summary = f"{policy.name} (shadow): {shadowed.choice}"
    else:
        summary = f"{policy.name} (shadow): {candidate_rows.summary(decision)}"
        result[names.RULE.name] = decision.rule
        result[names.CANDIDATES_JSON.name] = candidate_rows.as_json(decision, top, limit)
        if decision.instance is not None:
            result[names.INSTANCE_ID.name] = decision.instance
        if decision.score is not None and decision.index >= 0:
            result[names.SCORE_CHOSEN.name] = float(decision.score[decision.index])
        if (margin := decision.margin) is not None:
            result[names.SCORE_MARGIN.name] = float(margin)
    result[names.SUMMARY.name] = summary
    if ui_hints:
        result[names.UI_KIND.name] = "CHAIN"
        result[names.UI_OUTPUT.name] = (
            summary if decision is None else candidate_rows.as_text(decision, summary, top, limit)
        )
        result[names.UI_OUTPUT_TYPE.name] = "text/plain"
    return result

"""Which decisions somebody wants to see of the stream: by outcome, rule, instance, migration, margin and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from smetric.policy.plan import StatementKind
from smetric.telemetry import names

if TYPE_CHECKING:
    from smetric.policy.decision import Decision
    from smetric.policy.plan import Step
    from smetric.telemetry.record import DecisionRecord

#: Characters of one value.
_LONGEST = 200
#: An outcome besides those of decisions: all but the ordinary ones.
ODD = "odd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for; what is not set asks for nothing.

    Args:
        outcome: one of `names.OUTCOMES`, or `odd` for whatever is neither routed nor pinned.
        rule: the label of the rule that fired.
        instance: the id of the chosen one.
        migrated: only later turns that went elsewhere.
        margin: only where the runner-up's score is within this share of the chosen one's.
        text: stands in the decision's id, trace id, rule, instance or model, or the label of a guard that failed.
    """

    outcome: str = ""
    rule: str = ""
    instance: str = ""
    migrated: bool = False
    margin: float | None = None
    text: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wish:
        """What a query string asks for.

        Raises:
            ValueError: with what is wrong with it.
        """
        for name in ("outcome", "rule", "instance", "text"):
            if len(query.get(name, "")) > _LONGEST:
                raise ValueError(f"{name}: longer than {_LONGEST} characters")
        outcome = query.get("outcome", "")
        if outcome not in ("", ODD, *names.OUTCOMES):
            raise ValueError(f"outcome={outcome!r}: one of {', '.join(names.OUTCOMES)}, or {ODD}")
        migrated = query.get("migrated", "")
        if migrated not in ("", "0", "1"):
            raise ValueError(f"migrated={migrated!r}: 0 or 1")
        margin: float | None = None
        if text := query.get("margin", ""):
            try:
                margin = float(text)
            except ValueError:
                margin = -1.0
            if not 0.0 <= margin <= 1.0:
                raise ValueError(f"margin={text!r}: a share between 0 and 1, such as 0.05")
        return cls(
            outcome=outcome,
            rule=query.get("rule", ""),
            instance=query.get("instance", ""),
            migrated=migrated == "1",
            margin=margin,
            text=query.get("text", "").lower(),
        )

    def fits(self, record: DecisionRecord) -> bool:
        """Whether *record* is one of them; what costs least is looked at first."""
        if self.outcome not in ("", record.outcome) and (self.outcome != ODD or record.outcome in names.ORDINARY):
            return False
        if self.rule and record.rule != self.rule:
            return False
        if self.instance and (record.instance is None or record.instance.id != self.instance):
            return False
        if self.text and not self._is_in(record):
            return False
        if self.migrated and record.migration is None:
            return False
        if self.margin is not None:
            margin = margin_of(record)
            return margin is not None and margin <= self.margin
        return True

    def _is_in(self, record: DecisionRecord) -> bool:
        text = self.text
        own = (record.id, record.trace_id, record.rule, record.outcome, record.request.model)
        if any(text in each.lower() for each in own):
            return True
        if record.instance is not None and text in record.instance.id.lower():
            return True
        return record.decision is not None and any(text in guard.lower() for guard in failed_guards(record.decision))


#: What may be asked for.
PARAMETERS = tuple(field.name for field in fields(Wish))


def failed_guards(decision: Decision) -> list[str]:
    """The guards that kept rules from sending the request where they would have, in order."""
    return [
        rule.failed
        for step, rule in zip(_outcomes(decision), decision.guards, strict=False)
        if step.kind is StatementKind.ROUTE and rule.failed is not None
    ]


def _outcomes(decision: Decision) -> Iterator[Step]:
    return (step for step in decision.policy.plan.steps if not step.kind.is_filter)


def margin_of(record: DecisionRecord) -> float | None:
    """How far the runner-up's score is from the chosen one's, as a share of the larger of both; None without one."""
    return record.decision.margin_share if record.decision is not None else None

"""One recorded decision for people: why it was made, by the policy in its record, and what became of it."""

from __future__ import annotations

from smetric.policy import PolicyError, explain
from smetric.records.line import DecisionLine
from smetric.records.reader import Recorded
from smetric.records.situation import Judge, NotRecorded, policy_of


def account(recorded: Recorded) -> str:
    """The explanation of *recorded*, and how its request ended."""
    return f"{why(recorded)}\n{ending(recorded.line)}"


def why(recorded: Recorded) -> str:
    """The explanation of *recorded*."""
    line = recorded.line
    if not line.ids:
        return f"{line.outcome}: no policy was asked ({line.reason})"
    try:
        decided = Judge(policy_of(recorded.policy), is_recorded=True).decide(recorded)
    except PolicyError:
        return "this version cannot load the policy that decided it"
    return str(decided) if isinstance(decided, NotRecorded) else explain.explain(decided)


def ending(line: DecisionLine, *, is_over: bool = True) -> str:
    """How the request of *line* ended; unless *is_over* it may be that it has not."""
    if line.status is None:
        followed = "another decision of the same request followed"
        return f"not answered: {followed}" if is_over else f"not answered yet, or {followed}"
    said = [f"answered {line.status}" + (f" after {line.duration_s:.3g} s" if line.duration_s is not None else "")]
    if line.ttft_s is not None:
        expected, forecast = "", line.forecast
        if forecast is not None and forecast.ttft_s is not None:
            expected = f" ({forecast.ttft_s:.3g} s expected"
            if forecast.other_ttft_s is not None:
                expected += f", {forecast.other_ttft_s:.3g} s on {forecast.other}"
            expected += ")"
        said.append(f"first byte after {line.ttft_s:.3g} s{expected}")
    usage = line.usage
    if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens is not None:
        believed = f", {line.hit.tokens:,} were believed to be" if line.hit is not None else ""
        said.append(f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens were cached{believed}")
    if line.migration is not None:
        left = line.migration.left_tokens
        kept = f", which keeps {left:,} tokens more" if left is not None else ""
        said.append(f"moved from {line.migration.source}{kept}: {line.migration.guard}")
    return "; ".join(said)

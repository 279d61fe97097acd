"""An examination as text for people, and as JSON for programs; the form of the JSON is in docs/guide/doctor.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from smetric.doctor.examination import Examination, Result
from smetric.doctor.finding import Severity

#: Raised when a field changes its meaning or goes away; new fields do not raise it.
SCHEMA = 1


def as_text(examination: Examination) -> str:
    """Findings, the worst first, then what was fine and what was skipped."""
    paragraphs = [
        f"{finding.severity.value}: {outcome.check.name}: {finding.where}: {finding.what}\n"
        f"    why     {finding.why}\n"
        f"    remedy  {finding.remedy}"
        for severity in Severity
        for outcome in examination.outcomes
        for finding in outcome.findings
        if finding.severity is severity
    ]
    fine = [outcome.check.name for outcome in examination.outcomes if outcome.result is Result.FINE]
    lines = [f"fine: {', '.join(fine) or 'nothing'}"]
    lines += [
        f"skipped: {outcome.check.name}: {outcome.reason}"
        for outcome in examination.outcomes
        if outcome.result is Result.SKIPPED
    ]
    counts = [_counted(examination.count(severity), severity.value) for severity in Severity]
    answer = "answers" if examination.instances == 1 else "answer"
    lines.append(
        f"{examination.reachable} of {_counted(examination.instances, 'instance')} {answer}; " + ", ".join(counts)
    )
    return "\n\n".join([*paragraphs, "\n".join(lines)])


def as_json(examination: Examination) -> dict[str, Any]:
    """The same for programs."""
    return {
        "schema": SCHEMA,
        "exit_code": examination.exit_code,
        "instances": {"configured": examination.instances, "reachable": examination.reachable},
        "counts": {severity.value: examination.count(severity) for severity in Severity},
        "checks": [
            {
                "name": outcome.check.name,
                "looks_at": outcome.check.looks_at,
                "result": outcome.result.value,
                "reason": outcome.reason,
                "findings": [{**asdict(finding), "severity": finding.severity.value} for finding in outcome.findings],
            }
            for outcome in examination.outcomes
        ],
    }


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 or what == "info" else f"{count} {what}s"

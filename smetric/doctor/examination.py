"""Examination of a live set-up: all checks at the same time, each under a deadline, and the reports."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from smetric.config.settings import Settings
from smetric.doctor.engines import caches, keep_alive, metrics, models, reachable, versions
from smetric.doctor.knowledge import hits, index, kv_events, tokens
from smetric.doctor.lmcache import lmcache
from smetric.doctor.routers import ports, refusals, replicas, start, traffic
from smetric.doctor.site import Finding, Findings, FindingSeverity, Site, Skipped, visit, warning
from smetric.doctor.start import Path

#: Version of the JSON report: raised when a field changes its meaning or is removed, not for a new field.
SCHEMA = 1

log = structlog.get_logger("smetric.doctor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Check of a site.

    Args:
        name: its name in reports.
        looks_at: its subject, in a few words.
        run: yields findings; raises Skipped if the check does not apply.
        deadline_s: timeout in seconds.
    """

    name: str
    looks_at: str
    run: Callable[[Site], Findings]
    deadline_s: float = 15.0


CHECKS = (
    Check(
        name="start",
        looks_at="whether `smetric serve` starts, and policies find what they read",
        run=start,
    ),
    Check(name="instances", looks_at="whether every instance answers, and is a different engine", run=reachable),
    Check(name="versions", looks_at="versions of vLLM, and clocks", run=versions),
    Check(name="models", looks_at="served names, the models they mean, and aliases", run=models),
    Check(name="metrics", looks_at="load on the instances' /metrics", run=metrics),
    Check(name="caches", looks_at="prefix caching, block size, block hashes and capacity", run=caches),
    Check(name="keep-alive", looks_at="how long instances keep idle connections", run=keep_alive),
    Check(name="ports", looks_at="this router's own ports", run=ports),
    Check(name="replicas", looks_at="whether routers share what they know", run=replicas),
    Check(name="index", looks_at="whether the prefix index survives a restart", run=index),
    Check(name="tokens", looks_at="token ids of a conversation with tools, here and in the engines", run=tokens),
    Check(name="kv-events", looks_at="whether KV events arrive without gaps", run=kv_events, deadline_s=60),
    Check(name="lmcache", looks_at="LMCache's lookup service: kind, instances, hits", run=lmcache, deadline_s=60),
    Check(name="hits", looks_at="predicted and reported cached tokens of a repeated prompt", run=hits, deadline_s=90),
    Check(name="refusals", looks_at="policies of a running router that refuse every request", run=refusals),
    Check(name="traffic", looks_at="wrong predictions and broken caches in a running router", run=traffic),
)


class CheckResult(enum.Enum):
    """Result of a check."""

    FINE = "fine"
    FOUND = "found"
    SKIPPED = "skipped"
    LATE = "late"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """Check with its result, the reason if it was skipped, and its findings."""

    check: Check
    result: CheckResult
    reason: str
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Examination:
    """Outcomes in the order of `CHECKS`, and the number of instances, all and reachable."""

    outcomes: Sequence[CheckOutcome]
    instances: int
    reachable: int

    def count(self, severity: FindingSeverity) -> int:
        """Return the number of findings of *severity*."""
        return sum(finding.severity is severity for outcome in self.outcomes for finding in outcome.findings)

    @property
    def exit_code(self) -> int:
        """0 fine, 1 errors or warnings, 3 no instance answers."""
        if not self.reachable:
            return 3
        return 1 if self.count(FindingSeverity.ERROR) or self.count(FindingSeverity.WARNING) else 0


async def examine(
    settings: Settings,
    place: Callable[[Path], str] = lambda _: "",
    *,
    may_probe: bool = True,
    may_wait: bool = False,
) -> Examination:
    """Run all checks at the same time.

    Args:
        settings: the settings of `smetric serve`.
        place: returns where a setting was set; empty for a default.
        may_probe: whether to send prompts, which engines compute.
        may_wait: whether to measure what takes many seconds.

    Raises:
        ConfigError: the settings cannot be used.
    """
    async with visit(settings, place, may_probe=may_probe, may_wait=may_wait) as site:
        outcomes = await asyncio.gather(*(_run(check, site) for check in CHECKS))
        return Examination(outcomes, len(site.engines), len(site.reachable))


async def _run(check: Check, site: Site) -> CheckOutcome:
    try:
        async with asyncio.timeout(check.deadline_s):
            findings = [finding async for finding in check.run(site)]
    except Skipped as reason:
        return CheckOutcome(check, CheckResult.SKIPPED, str(reason), ())
    except TimeoutError:
        finding = _unfinished(check, f"not done within {check.deadline_s:g} s")
        return CheckOutcome(check, CheckResult.LATE, "", (finding,))
    except Exception as fault:
        # A bug in one check must not hide the findings of the others.
        log.critical("smetric.doctor.failed", check=check.name, exc_info=True)
        finding = _unfinished(check, f"it failed ({type(fault).__name__})")
        return CheckOutcome(check, CheckResult.FAILED, "", (finding,))
    return CheckOutcome(check, CheckResult.FOUND if findings else CheckResult.FINE, "", findings)


def _unfinished(check: Check, what: str) -> Finding:
    return warning(
        f"check {check.name}",
        what,
        f"unknown: {check.looks_at}",
        "repair the other findings, and examine again; if it stays so, report it with the log",
    )


def as_text(examination: Examination) -> str:
    """Return a report for people: findings, the worst first, then the checks that were fine or skipped."""
    outcomes = examination.outcomes
    paragraphs = [
        f"{finding.severity.value}: {outcome.check.name}: {finding.where}: {finding.what}\n"
        f"    why     {finding.why}\n"
        f"    remedy  {finding.remedy}"
        for severity in FindingSeverity
        for outcome in outcomes
        for finding in outcome.findings
        if finding.severity is severity
    ]
    fine = [outcome.check.name for outcome in outcomes if outcome.result is CheckResult.FINE]
    skipped = [outcome for outcome in outcomes if outcome.result is CheckResult.SKIPPED]
    counts = [_counted(examination.count(severity), severity.value) for severity in FindingSeverity]
    answer = "answers" if examination.instances == 1 else "answer"
    lines = [
        f"fine: {', '.join(fine) or 'nothing'}",
        *(f"skipped: {outcome.check.name}: {outcome.reason}" for outcome in skipped),
        f"{examination.reachable} of {_counted(examination.instances, 'instance')} {answer}; {', '.join(counts)}",
    ]
    return "\n\n".join([*paragraphs, "\n".join(lines)])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 or noun == "info" else f"{count} {noun}s"


def as_json(examination: Examination) -> dict[str, Any]:
    """Return the report for programs; docs/guide/doctor.md describes it."""
    return {
        "schema": SCHEMA,
        "exit_code": examination.exit_code,
        "instances": {"configured": examination.instances, "reachable": examination.reachable},
        "counts": {severity.value: examination.count(severity) for severity in FindingSeverity},
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

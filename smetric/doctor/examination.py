"""Examination of a live set-up."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from smetric.config.settings import Settings
from smetric.doctor.engines import caches, keep_alive, metrics, models, reachable, versions
from smetric.doctor.knowledge import hits, index, kv_events, tokens
from smetric.doctor.lmcache import lmcache
from smetric.doctor.routers import lookups, ports, replicas, traffic
from smetric.doctor.site import Check, Finding, Severity, Site, Skipped, visit, warning

# All checks, and an examination: each one run under its deadline, together. How it is told is in `report.py`.

CHECKS = (
    Check(name="instances", looks_at="whether every instance answers, and is one of its own", run=reachable),
    Check(name="versions", looks_at="versions of vLLM, and clocks", run=versions),
    Check(name="models", looks_at="served names, what they stand for, and aliases", run=models),
    Check(name="metrics", looks_at="load on the instances' /metrics", run=metrics),
    Check(name="caches", looks_at="prefix caching, block size, block hashes and capacity", run=caches),
    Check(name="keep-alive", looks_at="how long instances keep idle connections", run=keep_alive),
    Check(name="ports", looks_at="this router's own ports", run=ports),
    Check(name="policy", looks_at="whether some source fills what the policy looks up", run=lookups),
    Check(name="replicas", looks_at="whether routers share what they know", run=replicas),
    Check(name="index", looks_at="whether the prefix index outlives a restart", run=index),
    Check(name="tokens", looks_at="token ids of a conversation with tools, here and in the engines", run=tokens),
    Check(
        name="kv-events", looks_at="whether the engines' KV events arrive, without gaps", run=kv_events, deadline_s=60
    ),
    Check(name="lmcache", looks_at="what LMCache's lookup service is, knows and finds", run=lmcache, deadline_s=60),
    Check(name="hits", looks_at="predicted against reported cached tokens, a prompt twice", run=hits, deadline_s=90),
    Check(name="traffic", looks_at="what a running router has seen: wrong predictions, cache breakers", run=traffic),
)

log = structlog.get_logger("smetric.doctor")


class Result(enum.Enum):
    """What came of a check."""

    FINE = "fine"
    FOUND = "found"
    SKIPPED = "skipped"
    LATE = "late"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check that was made: what came of it, why it was skipped, and what it found."""

    check: Check
    result: Result
    reason: str
    findings: Sequence[Finding]


@dataclass(frozen=True, slots=True)
class Examination:
    """All outcomes, in the order of `CHECKS`, and how many of the instances answered."""

    outcomes: Sequence[Outcome]
    instances: int
    reachable: int

    def count(self, severity: Severity) -> int:
        """How many findings are of *severity*."""
        return sum(finding.severity is severity for outcome in self.outcomes for finding in outcome.findings)

    @property
    def exit_code(self) -> int:
        """0 fine, 1 errors or warnings, 3 no instance answers."""
        if not self.reachable:
            return 3
        return 1 if self.count(Severity.ERROR) or self.count(Severity.WARNING) else 0


async def examine(settings: Settings, *, may_probe: bool = True, may_wait: bool = False) -> Examination:
    """Make every check, all at the same time.

    Args:
        settings: as `smetric serve` would use them.
        may_probe: whether requests may be sent that engines compute something for.
        may_wait: whether to measure what takes many seconds.

    Raises:
        ConfigError: the settings cannot be used.
    """
    async with visit(settings, may_probe=may_probe, may_wait=may_wait) as site:
        outcomes = await asyncio.gather(*(make(check, site) for check in CHECKS))
        return Examination(outcomes, len(site.engines), len(site.reachable))


async def make(check: Check, site: Site) -> Outcome:
    """Make one check; whatever happens to it is its outcome."""
    try:
        async with asyncio.timeout(check.deadline_s):
            findings = await check.run(site)
    except Skipped as reason:
        return Outcome(check, Result.SKIPPED, str(reason), ())
    except TimeoutError:
        return Outcome(check, Result.LATE, "", (_unfinished(check, f"not done within {check.deadline_s:g} s"),))
    except Exception as fault:
        # A fault of the doctor's in one check must not hide what the others find.
        log.critical("smetric.doctor.failed", check=check.name, exc_info=True)
        return Outcome(check, Result.FAILED, "", (_unfinished(check, f"it failed ({type(fault).__name__})"),))
    return Outcome(check, Result.FOUND if findings else Result.FINE, "", findings)


def _unfinished(check: Check, what: str) -> Finding:
    return warning(
        f"check {check.name}",
        what,
        f"it is not known whether all is well with {check.looks_at}",
        "mend what else is found, and examine again; if it stays so, report it with the log",
    )


# An examination as text for people, and as JSON for programs; the form of the JSON is in docs/guide/doctor.md.

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

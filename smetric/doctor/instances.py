"""Checks of the instances as such: do they answer, are they alike, are they who they seem to be."""

from __future__ import annotations

import asyncio

from smetric.doctor.address import is_here, resolve
from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, error, info, listed, shown, warning
from smetric.doctor.site import Site

#: Seconds by which a clock may differ from ours.
CLOCK_S = 30.0


async def reachable(site: Site) -> list[Finding]:
    """Every instance answers, no two are one, and none is this router itself."""
    found = [
        error(
            engine.where,
            f"{engine.settings.url} is not well: {engine.problem}",
            "no request can be sent there",
            "start the engine, or correct `url` under `instances`",
        )
        for engine in site.engines
        if engine.problem
    ]
    addresses = await asyncio.gather(*(resolve(engine.settings.url) for engine in site.engines))
    seen: dict[tuple[str, int], Engine] = {}
    for engine, at in zip(site.engines, addresses, strict=True):
        if at is None:
            continue
        twin = seen.setdefault(at, engine)
        if twin is not engine:
            found.append(
                error(
                    engine.where,
                    f"it is the same engine as {twin.where}: both are at {at[0]}:{at[1]}",
                    "its load counts twice, and half of what it holds is looked for in the wrong place",
                    f"take {engine.settings.id} out of `instances`",
                )
            )
        if at[1] == site.settings.listen.port and is_here(at[0]):
            found.append(
                error(
                    engine.where,
                    f"{engine.settings.url} is where this router itself listens",
                    "requests would go round in a circle",
                    "correct its `url`, or set `listen.port` to another port",
                )
            )
    return found


async def versions(site: Site) -> list[Finding]:
    """All instances run the same vLLM, and their clocks are right."""
    found: list[Finding] = []
    by_version: dict[str, list[str]] = {}
    for engine in site.reachable:
        by_version.setdefault(engine.version, []).append(engine.settings.id)
        if engine.ahead_s is not None and abs(engine.ahead_s) > CLOCK_S:
            found.append(
                warning(
                    engine.where,
                    f"its clock is {abs(engine.ahead_s):.0f} s {'ahead of' if engine.ahead_s > 0 else 'behind'} ours",
                    "spans of one request do not line up, and restarts may be dated wrongly",
                    "let NTP set the clocks of both machines",
                )
            )
    unknown = by_version.pop("", [])
    if unknown:
        found.append(
            info(
                f"instance {listed(unknown)}",
                "it does not tell a version at /version",
                "it may not be vLLM; whatever vLLM does besides is not certain here",
                "point `url` at the vLLM server itself, not at something in front of it",
            )
        )
    if len(by_version) > 1:
        told = "; ".join(f"{shown(version)} on {listed(ids)}" for version, ids in sorted(by_version.items()))
        found.append(
            warning(
                "instances",
                f"versions of vLLM differ: {told}",
                "chat templates, block hashes, names of metrics and the form of KV events change between versions",
                "run one version of vLLM everywhere",
            )
        )
    return found

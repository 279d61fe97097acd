"""Checks of the instances as such: do they answer, are they alike, are they who they seem to be."""

from __future__ import annotations

import asyncio

from smetric.config.address import odd_address
from smetric.doctor.address import is_own, resolve
from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, error, info, listed, shown, warning
from smetric.doctor.site import Site
from smetric.doctor.wire import NoAnswer
from smetric.fleet.instance import SAME_START_S
from smetric.sources.vllm import MAX_PAGE_BYTES
from smetric.sources.vllm_page import parse_page

#: Pages that are asked for to tell several engines at one address from one.
PAGES = 4
#: Seconds by which a clock may differ from ours.
CLOCK_S = 30.0


async def reachable(site: Site) -> list[Finding]:
    """Every instance answers, no two are one, none is several, and none is this router itself."""
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
    several = await asyncio.gather(*(_several(site, engine) for engine in site.reachable))
    found += [one for one in several if one is not None]
    addresses = await asyncio.gather(*(resolve(engine.settings.url) for engine in site.engines))
    seen: dict[tuple[str, int], Engine] = {}
    for engine, at in zip(site.engines, addresses, strict=True):
        if at is None:
            continue
        if odd := odd_address(at[0], site.settings.instance_networks):
            found.append(
                error(
                    engine.where,
                    f"its name leads to {at[0]}, {odd}",
                    "the router connects to no such address",
                    "correct `url` under `instances`; if it is meant, name its network in `instance_networks`",
                )
            )
        twin = seen.setdefault(at, engine)
        if twin is not engine and _may_be_one(twin, engine):
            found.append(
                error(
                    engine.where,
                    f"it is the same engine as {twin.where}: both are at {at[0]}:{at[1]}",
                    "its load counts twice, and half of what it holds is looked for in the wrong place",
                    f"take {engine.settings.id} out of `instances`",
                )
            )
        if await is_own(at, site.settings.listen.host, site.settings.listen.port):
            found.append(
                error(
                    engine.where,
                    f"{engine.settings.url} is where this router itself listens",
                    "requests would go round in a circle",
                    "correct its `url`, or set `listen.port` to another port",
                )
            )
    return found


def _may_be_one(one: Engine, other: Engine) -> bool:
    """Whether two at one address may be one process: a gateway tells those behind it apart by their names."""
    ours, theirs = one.page.started_at, other.page.started_at
    return ours is None or theirs is None or abs(ours - theirs) <= SAME_START_S


async def _several(site: Site, engine: Engine) -> Finding | None:
    """Ask for a few pages, each over a connection of its own: they are all of one process."""
    if engine.page.started_at is None:
        return None
    url, started = engine.settings.url, [engine.page.started_at]
    for _ in range(PAGES):
        try:
            answer = await site.wire.get(url + "/metrics", within_s=site.settings.scrape.timeout, most=MAX_PAGE_BYTES)
        except NoAnswer:
            break
        page = await asyncio.to_thread(parse_page, answer.body)
        started += [page.started_at] if page.started_at is not None else []
    if max(started) - min(started) <= SAME_START_S:
        return None
    return error(
        engine.where,
        f"several engines answer at {url}, or one that restarts again and again",
        "what one of them holds and has to do is taken for that of all, and each for a new process with an empty cache",
        "give each engine an entry of its own under `instances`, by an `url` that leads to it alone: in Kubernetes to "
        "a pod (of a StatefulSet), not to a service",
    )


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

"""Checks of the instances as such: do they answer, are they alike, are they who they seem to be."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from smetric.doctor.check import Skipped
from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, error, info, listed, shown, warning
from smetric.doctor.site import Site

#: Seconds by which a clock may differ from ours.
CLOCK_S = 30.0

_SCATTERED = "requests for it can only go there, whatever the policy says"


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
    addresses = await asyncio.gather(*(address(engine.settings.url) for engine in site.engines))
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


async def models(site: Site) -> list[Finding]:
    """Every name stands for one model, and every alias for one that is served."""
    found: list[Finding] = []
    by_name: dict[str, list[Engine]] = {}
    for engine in site.reachable:
        if engine.cards_problem:
            found.append(
                (info if engine.settings.models else error)(
                    engine.where,
                    f"its models are not known: {engine.cards_problem}",
                    "it is sent requests for any model",
                    "name its `models` under `instances`, or see why the engine does not list them",
                )
            )
        listed_names = {card.id for card in engine.cards}
        missing = set(engine.settings.models or ()) - listed_names if engine.cards else set()
        if missing:
            found.append(
                error(
                    engine.where,
                    f"it does not serve {listed(sorted(missing))}; it serves {listed(sorted(listed_names))}",
                    "requests for that model are answered 404 by the engine",
                    "correct `models` of this instance, or its `--served-model-name`",
                )
            )
        for name in listed_names:
            by_name.setdefault(name, []).append(engine)
    if not by_name and not site.settings.models:
        return found
    found += _differing(by_name)
    total = len(site.reachable)
    alone = [name for name, engines in by_name.items() if len(engines) == 1 and total > 1]
    for name in sorted(alone):
        found.append(
            warning(
                by_name[name][0].where,
                f"only it serves {shown(name)}; {total} instances answer",
                _SCATTERED,
                "give all engines of a model the same `--served-model-name`, or take this as meant",
            )
        )
    if not any(engine.cards_problem for engine in site.reachable):
        served = listed(sorted(by_name))
        found += [
            error(
                f"models.{shown(alias)}",
                f"it stands for {shown(model)}, which no instance serves; served are {served}",
                "requests for it are answered 404",
                f"set `models.{shown(alias)}` to a name that is served",
            )
            for alias, model in site.settings.models.items()
            if model not in by_name
        ]
    return found


def _differing(by_name: dict[str, list[Engine]]) -> Iterable[Finding]:
    for name, engines in sorted(by_name.items()):
        cards = [(engine, card) for engine in engines if (card := engine.card(name)) is not None]
        for what, values, flag in (
            ("loaded from", {card.root for _, card in cards}, "--model"),
            ("cut off at", {card.max_model_len for _, card in cards}, "--max-model-len"),
        ):
            if len(values) > 1:
                yield warning(
                    f"model {shown(name)}",
                    f"it is {what} {listed(sorted(values, key=str))}, depending on the instance",
                    "an answer depends on where the request went, and KV blocks of one are worth nothing to another",
                    f"start all engines of {shown(name)} with the same `{flag}`",
                )


async def metrics(site: Site) -> list[Finding]:
    """Load is on every instance's page, under names that are known."""
    if not site.reachable:
        raise Skipped("no instance answers")
    found: list[Finding] = []
    for engine in site.reachable:
        page, where = engine.page, engine.where
        blind = "its load is only what this router itself sent there"
        if engine.page_problem:
            found.append(
                error(
                    where,
                    f"its /metrics cannot be read: {engine.page_problem}",
                    blind,
                    "start it without `--disable-log-stats`; if the page is only slow, raise `scrape.timeout`",
                )
            )
        elif not engine.speaks_vllm:
            found.append(
                error(
                    where,
                    "no metric on its /metrics is one of vLLM's",
                    blind,
                    "point `url` at the vLLM server itself, and start it without `--disable-log-stats`",
                )
            )
        elif page.running is None or page.waiting is None:
            found.append(
                error(
                    where,
                    "running and waiting requests are not on its /metrics under the names that are known "
                    "(vllm:num_requests_running, vllm:num_requests_waiting)",
                    blind,
                    "run a vLLM from 0.6 on; if its names are newer than this router, update the router",
                )
            )
        elif page.refused:
            found.append(
                warning(
                    where,
                    f"{page.refused} of its metrics have impossible values",
                    "they count as unknown",
                    "see its /metrics; something between the engine and here may rewrite it",
                )
            )
        elif page.kv_usage is None:
            found.append(
                warning(
                    where,
                    "the use of its KV cache is not on its /metrics under a name that is known",
                    "`kv_usage` is unknown there",
                    "update the router, or leave `kv_usage` out of the policy",
                )
            )
        elif engine.has_old_names:
            found.append(
                info(
                    where,
                    "its metrics have the names of a vLLM before 0.10; they are understood",
                    "such versions lack much of what the other checks look at",
                    "update vLLM",
                )
            )
    return found


async def address(url: str) -> tuple[str, int] | None:
    """IP address and port of *url*; None if its host has none."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return sorted(str(one[4][0]) for one in infos)[0], port


def is_here(ip: str) -> bool:
    """Whether *ip* is an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True

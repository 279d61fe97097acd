"""Checks of engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from smetric.config.values import networks, odd_address
from smetric.doctor.site import (
    Engine,
    Finding,
    NoAnswer,
    Site,
    Skipped,
    error,
    info,
    is_own,
    listed,
    resolve,
    shown,
    warning,
)
from smetric.fleet.instance import SAME_START_S
from smetric.http.addresses import port_of
from smetric.http.upstream import KEEPALIVE_S
from smetric.sources.vllm import MAX_PAGE_BYTES, MAX_SERIES, parse_page

# Checks of the instances as such: do they answer, are they alike, are they who they seem to be.

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
        if odd := odd_address(at[0], networks(site.settings.instance_networks)):
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


# Checks of the engines' KV caches: on, alike, and cut into blocks as this router believes.

#: How many times larger than another one a cache may be before it is told.
UNEQUAL = 2.0


async def caches(site: Site) -> list[Finding]:
    """Prefix caching is on everywhere, with the same blocks and hashes."""
    silent = [engine for engine in site.reachable if not engine.page.cache]
    telling = [engine for engine in site.reachable if engine.page.cache]
    found = [
        info(
            engine.where,
            "its /metrics says nothing of its KV cache (vllm:cache_config_info)",
            "block size and capacity are taken to be as configured",
            "run a vLLM from 0.6 on",
        )
        for engine in silent
        if not engine.page_problem and engine.speaks_vllm and not engine.page.refused
    ]
    if not telling:
        if not found:
            raise Skipped("no instance tells of its cache")
        return found
    found += [
        error(
            engine.where,
            "prefix caching is off",
            "it computes every prompt anew, so that sending a session there again gains nothing",
            "start the engine with `--enable-prefix-caching` (and without `--no-enable-prefix-caching`)",
        )
        for engine in telling
        if engine.page.cache.get("enable_prefix_caching") == "False"
    ]
    sizes = _by(telling, "block_size")
    ours = str(site.settings.block_size)
    if set(sizes) - {ours}:
        told = _told(sizes)
        found.append(
            warning(
                "block_size",
                f"it is {ours} here; on the engines it is {told}",
                "expected hits are floored to blocks of another size than the engine's",
                f"set `block_size: {shown(next(iter(sizes)))}`"
                if len(sizes) == 1
                else "start all engines with the same `--block-size`, and set `block_size` to it",
            )
        )
    hashes = _by(telling, "prefix_caching_hash_algo")
    if len(hashes) > 1:
        found.append(
            warning(
                "instances",
                f"hashes of blocks differ: {_told(hashes)}",
                "what one engine puts into a shared store (LMCache), another one never finds",
                "start all engines with the same `--prefix-caching-hash-algo`",
            )
        )
    if unequal := _unequal(telling):
        found.append(unequal)
    return found


def _by(engines: Sequence[Engine], label: str) -> Mapping[str, list[str]]:
    """Ids of instances by the value of *label*, those left out that do not have it."""
    found: dict[str, list[str]] = {}
    for engine in engines:
        value = engine.page.cache.get(label, "None")
        if value != "None":
            found.setdefault(value, []).append(engine.settings.id)
    return found


def _told(by_value: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{shown(value)} on {listed(ids)}" for value, ids in sorted(by_value.items()))


def _unequal(engines: Sequence[Engine]) -> Finding | None:
    sized = sorted((engine for engine in engines if engine.cache_tokens), key=lambda engine: engine.cache_tokens)
    if len(sized) < 2 or sized[-1].cache_tokens <= UNEQUAL * sized[0].cache_tokens:
        return None
    small, large = sized[0], sized[-1]
    return info(
        small.where,
        f"its KV cache holds {small.cache_tokens} tokens; that of {large.settings.id} holds {large.cache_tokens}",
        "by a policy that counts requests, sessions are evicted there much sooner",
        "start it with a higher `--gpu-memory-utilization`, or let the policy look at `kv_usage`",
    )


# Check of the models that instances serve: every name stands for one model, every alias for one that is served.


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
        configured = set(engine.settings.models or ())
        names = {card.id for card in engine.cards} or configured
        missing = configured - names
        if missing:
            found.append(
                error(
                    engine.where,
                    f"it does not serve {listed(sorted(missing))}; it serves {listed(sorted(names))}",
                    "requests for that model are answered 404 by the engine",
                    "correct `models` of this instance, or its `--served-model-name`",
                )
            )
        for name in names:
            by_name.setdefault(name, []).append(engine)
    if not by_name and not site.settings.models:
        return found
    found += _differing(by_name)
    if all(engine.settings.models or not engine.cards_problem for engine in site.reachable):
        total, served = len(site.reachable), listed(sorted(by_name))
        found += [
            warning(
                engines[0].where,
                f"only it serves {shown(name)}; {total} instances answer",
                "requests for it can only go there, whatever the policy says",
                "give all engines of a model the same `--served-model-name`, or take this as meant",
            )
            for name, engines in sorted(by_name.items())
            if len(engines) == 1 and total > 1
        ]
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


# Check of the instances' /metrics: load is there, in time, under names that are known.


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
                    "point `url` at the vLLM server itself, and let nothing before it hide, change or compress the "
                    "page; if it is only slow, raise `scrape.timeout`",
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
        elif page.refused:
            blinds = page.running is None or page.waiting is None
            found.append(
                (error if blinds else warning)(
                    where,
                    f"{page.refused} of its metrics have impossible values"
                    if page.refused <= MAX_SERIES
                    else f"it has more than {MAX_SERIES} series of the metrics that are read",
                    blind if blinds else "they count as unknown",
                    "see its /metrics; something between the engine and here may rewrite it, or put several into one",
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


# Check of idle connections: engines keep them open longer than this router reuses them.

#: How much longer than ours an engine must keep a connection, and how long is waited for it to close one, seconds.
MARGIN_S = 0.5
WATCHED_S = KEEPALIVE_S + 3.0


async def keep_alive(site: Site) -> list[Finding]:
    """No engine closes an idle connection that the router would still use."""
    if not site.reachable:
        raise Skipped("no instance answers")
    if not site.may_wait:
        return [
            info(
                engine.where,
                f"it is not vLLM's own server that answers (server: {shown(engine.server) or 'not told'})",
                f"if it closes idle connections within {KEEPALIVE_S:g} s, some requests are sent twice",
                "run `smetric doctor --slow`, which measures it",
            )
            for engine in site.reachable
            if engine.server.lower() != "uvicorn"
        ]
    found = await asyncio.gather(*(_of_instance(engine) for engine in site.reachable))
    return [one for one in found if one is not None]


async def _of_instance(engine: Engine) -> Finding | None:
    parts = urlsplit(engine.settings.url)
    is_tls = parts.scheme == "https"
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, port_of(parts), ssl=is_tls or None, limit=1 << 16
        )
    except OSError:
        return None  # found by the check of instances
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: %b\r\n\r\n" % parts.netloc.encode())
        answered_at = time.monotonic()
        async with asyncio.timeout(WATCHED_S):
            while await reader.read(1 << 16):
                answered_at = time.monotonic()
    except TimeoutError:
        return None  # it is open still
    except OSError:
        pass  # closed with a reset, which is closed all the same
    finally:
        writer.close()
    kept_s = time.monotonic() - answered_at
    if kept_s >= KEEPALIVE_S + MARGIN_S:
        return None
    return warning(
        engine.where,
        f"it closes idle connections after {kept_s:.1f} s; the router reuses them for {KEEPALIVE_S:g} s",
        "a request on a connection that is just being closed is lost, and sent again",
        "set `VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5` or more for the engine, or raise the time-out of what stands before it",
    )

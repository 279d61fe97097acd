"""Checks of engines: reachability, versions, models, metrics, KV caches and idle connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from smetric.config.values import networks, odd_address
from smetric.doctor.site import (
    ExaminedEngine,
    Finding,
    Findings,
    NoReply,
    Site,
    Skipped,
    error,
    info,
    joined,
    listed,
    resolve,
    shown,
    warning,
)
from smetric.fleet.instance import SAME_START_S
from smetric.http.addresses import port_of
from smetric.http.upstream import KEEPALIVE_S
from smetric.sources.vllm import MAX_PAGE_BYTES, MAX_SERIES, parse_page

#: Further metrics pages that are read to detect several engines at one address.
PAGES = 4
#: Seconds by which a clock may differ from ours.
CLOCK_S = 30.0
#: Ratio of two cache sizes above which they are reported.
UNEQUAL = 2.0
#: Seconds by which an engine must keep a connection longer than the router, and seconds to wait for it to close one.
MARGIN_S = 0.5
WATCHED_S = KEEPALIVE_S + 3.0


async def reachable(site: Site) -> Findings:
    """Check that every instance answers, and is a different engine."""
    settings = site.settings
    for engine in site.engines:
        if engine.problem:
            yield error(
                engine.where,
                f"{engine.settings.url} is not well: {engine.problem}",
                "no request can be sent there",
                "start the engine, or correct `url` under `instances`",
            )
    async for finding in joined(_several(site, engine) for engine in site.reachable):
        yield finding
    allowed = networks(settings.instance_networks)
    seen: dict[tuple[str, int], ExaminedEngine] = {}
    found = await asyncio.gather(*(resolve(engine.settings.url) for engine in site.engines))
    for engine, at in zip(site.engines, found, strict=True):
        if at is None:
            continue
        if odd := odd_address(at[0], allowed):
            yield error(
                engine.where,
                f"its name leads to {at[0]}, {odd}",
                "the router connects to no such address",
                "correct `url` under `instances`, or allow its network in `instance_networks`",
            )
        twin = seen.setdefault(at, engine)
        if twin is not engine and _may_be_one(twin, engine):
            yield error(
                engine.where,
                f"it is the same engine as {twin.where}: both are at {at[0]}:{at[1]}",
                "its load counts twice, and half of its cache is looked for in the wrong place",
                f"take {engine.settings.id} out of `instances`",
            )


def _may_be_one(one: ExaminedEngine, other: ExaminedEngine) -> bool:
    """Return whether two engines at one address may be one process; a gateway may route to several by name."""
    ours, theirs = one.page.started_at, other.page.started_at
    return ours is None or theirs is None or abs(ours - theirs) <= SAME_START_S


async def _several(site: Site, engine: ExaminedEngine) -> Findings:
    """Read further pages, each on a new connection: all must come from one process."""
    if engine.page.started_at is None:
        return
    url, started = engine.settings.url, [engine.page.started_at]
    for _ in range(PAGES):
        try:
            reply = await site.client.ask(f"{url}/metrics", within_s=site.settings.scrape.timeout, most=MAX_PAGE_BYTES)
        except NoReply:
            break
        page = await asyncio.to_thread(parse_page, reply.body)
        started += [page.started_at] if page.started_at is not None else []
    if max(started) - min(started) > SAME_START_S:
        yield error(
            engine.where,
            f"several engines answer at {url}, or one that keeps restarting",
            "load and cache of one count for all, and each seems to be a new process with an empty cache",
            "give each engine an entry under `instances`, with an `url` that leads to it alone: in Kubernetes a pod "
            "(of a StatefulSet), not a service",
        )


async def versions(site: Site) -> Findings:
    """Check that all instances run one version of vLLM and have correct clocks."""
    by_version: dict[str, list[str]] = {}
    for engine in site.reachable:
        by_version.setdefault(engine.version, []).append(engine.settings.id)
        if engine.ahead_s is not None and abs(engine.ahead_s) > CLOCK_S:
            yield warning(
                engine.where,
                f"its clock is {abs(engine.ahead_s):.0f} s {'ahead of' if engine.ahead_s > 0 else 'behind'} ours",
                "spans of one request do not line up, and restarts may get wrong dates",
                "let NTP set the clocks of both machines",
            )
    if unknown := by_version.pop("", []):
        yield info(
            f"instance {listed(unknown)}",
            "its version is not at /version",
            "it may be another server than vLLM, for which the other checks prove less",
            "point `url` at the vLLM server itself, not at a proxy in front of it",
        )
    if len(by_version) > 1:
        yield warning(
            "instances",
            f"versions of vLLM differ: {_by_value(by_version)}",
            "chat templates, block hashes, metric names and KV events change between versions",
            "run one version of vLLM everywhere",
        )


def _by_value(by_value: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{shown(value)} on {listed(ids)}" for value, ids in sorted(by_value.items()))


async def caches(site: Site) -> Findings:
    """Check that prefix caching is on everywhere, with the same blocks and hashes."""
    reporting = [engine for engine in site.reachable if engine.page.cache]
    silent = [
        engine
        for engine in site.reachable
        if not engine.page.cache and not engine.page_problem and engine.speaks_vllm and not engine.page.refused
    ]
    if not reporting and not silent:
        raise Skipped("no instance reports its cache")
    for engine in silent:
        yield info(
            engine.where,
            "its /metrics says nothing of its KV cache (vllm:cache_config_info)",
            "block size and capacity are taken to be as configured",
            "run vLLM 0.6 or newer",
        )
    for engine in reporting:
        if engine.page.cache.get("enable_prefix_caching") == "False":
            yield error(
                engine.where,
                "prefix caching is off",
                "it computes every prompt from the start, so sending a session there again saves nothing",
                "start the engine with `--enable-prefix-caching` (and without `--no-enable-prefix-caching`)",
            )
    sizes, ours = _by_label(reporting, "block_size"), str(site.settings.block_size)
    if set(sizes) - {ours}:
        yield warning(
            "block_size",
            f"it is {ours} here; on the engines it is {_by_value(sizes)}",
            "expected hits are rounded down to blocks of the wrong size",
            f"set `block_size: {shown(next(iter(sizes)))}`"
            if len(sizes) == 1
            else "start all engines with the same `--block-size`, and set `block_size` to it",
        )
    hashes = _by_label(reporting, "prefix_caching_hash_algo")
    if len(hashes) > 1:
        yield warning(
            "instances",
            f"hashes of blocks differ: {_by_value(hashes)}",
            "what one engine puts into a shared store (LMCache) is never found by another",
            "start all engines with the same `--prefix-caching-hash-algo`",
        )
    sized = sorted((engine for engine in reporting if engine.cache_tokens), key=lambda engine: engine.cache_tokens)
    if sized and sized[-1].cache_tokens > UNEQUAL * sized[0].cache_tokens:
        small, large = sized[0], sized[-1]
        yield info(
            small.where,
            f"its KV cache holds {small.cache_tokens} tokens; that of {large.settings.id} holds {large.cache_tokens}",
            "with a policy that counts requests, it evicts sessions much sooner",
            "start it with a higher `--gpu-memory-utilization`, or let the policy read `kv_usage`",
        )


def _by_label(engines: Sequence[ExaminedEngine], label: str) -> dict[str, list[str]]:
    """Return the ids of instances by the value of *label* of their caches."""
    found: dict[str, list[str]] = {}
    for engine in engines:
        value = engine.page.cache.get(label, "None")
        if value != "None":
            found.setdefault(value, []).append(engine.settings.id)
    return found


async def models(site: Site) -> Findings:
    """Check that every name means one model, and that every alias means a served one."""
    by_name: dict[str, list[ExaminedEngine]] = {}
    for engine in site.reachable:
        if engine.cards_problem:
            yield (info if engine.settings.models else error)(
                engine.where,
                f"its models are not known: {engine.cards_problem}",
                "it gets requests for any model",
                "name its `models` under `instances`, or find out why the engine does not list them",
            )
        configured = set(engine.settings.models or ())
        names = {card.id for card in engine.cards} or configured
        if missing := configured - names:
            yield error(
                engine.where,
                f"it does not serve {listed(sorted(missing))}; it serves {listed(sorted(names))}",
                "the engine answers requests for that model with 404",
                "correct `models` of this instance, or its `--served-model-name`",
            )
        for name in names:
            by_name.setdefault(name, []).append(engine)
    if not by_name and not site.settings.models:
        return
    for finding in _differing(by_name):
        yield finding
    if any(engine.cards_problem and not engine.settings.models for engine in site.reachable):
        return  # an unknown list may have any name
    for name, engines in sorted(by_name.items()):
        if len(engines) == 1 < len(site.reachable):
            yield warning(
                engines[0].where,
                f"only it serves {shown(name)}; {len(site.reachable)} instances answer",
                "requests for that model can only go there, whatever the policy says",
                "give all engines of a model the same `--served-model-name`, unless this is intended",
            )
    for alias, model in site.settings.models.items():
        if model not in by_name:
            yield error(
                f"models.{shown(alias)}",
                f"it stands for {shown(model)}, which no instance serves; served are {listed(sorted(by_name))}",
                "requests for it are answered 404",
                f"set `models.{shown(alias)}` to a name that is served",
            )


def _differing(by_name: Mapping[str, Sequence[ExaminedEngine]]) -> Iterator[Finding]:
    for name, engines in sorted(by_name.items()):
        cards = [card for engine in engines if (card := engine.card(name)) is not None]
        for what, values, flag in (
            ("loaded from", {card.root for card in cards}, "--model"),
            ("cut off at", {card.max_model_len for card in cards}, "--max-model-len"),
        ):
            if len(values) > 1:
                yield warning(
                    f"model {shown(name)}",
                    f"it is {what} {listed(sorted(values, key=str))}, depending on the instance",
                    "answers depend on the instance, and KV blocks of one are useless to another",
                    f"start all engines of {shown(name)} with the same `{flag}`",
                )


async def metrics(site: Site) -> Findings:
    """Check that every instance's metrics page has its load under known names."""
    if not site.reachable:
        raise Skipped("no instance answers")
    for engine in site.reachable:
        if finding := _page_finding(engine):
            yield finding


def _page_finding(engine: ExaminedEngine) -> Finding | None:
    page, where = engine.page, engine.where
    has_load = page.running is not None and page.waiting is not None
    blind = "its load is only what this router itself sent there"
    if engine.page_problem:
        return error(
            where,
            f"its /metrics cannot be read: {engine.page_problem}",
            blind,
            "point `url` at the vLLM server itself, and let no proxy hide, change or compress the page; if it is only "
            "slow, raise `scrape.timeout`",
        )
    if not engine.speaks_vllm:
        return error(
            where,
            "no metric on its /metrics is one of vLLM's",
            blind,
            "point `url` at the vLLM server itself, and start it without `--disable-log-stats`",
        )
    if page.refused:
        return (warning if has_load else error)(
            where,
            f"{page.refused} of its metrics have impossible values"
            if page.refused <= MAX_SERIES
            else f"it has more than {MAX_SERIES} series of the metrics that are read",
            "they count as unknown" if has_load else blind,
            "see its /metrics; a proxy in between may rewrite it, or merge the pages of several engines",
        )
    if not has_load:
        return error(
            where,
            "running and waiting requests are not on its /metrics under known names (vllm:num_requests_running, "
            "vllm:num_requests_waiting)",
            blind,
            "run vLLM 0.6 or newer; if its names are newer than this router, update the router",
        )
    if page.kv_usage is None:
        return warning(
            where,
            "the use of its KV cache is not on its /metrics under a known name",
            "`kv_usage` is unknown there",
            "update the router, or leave `kv_usage` out of the policy",
        )
    if engine.has_old_names:
        return info(
            where,
            "its metrics have the names of a vLLM before 0.10, which the router understands",
            "such versions lack much of what the other checks need",
            "update vLLM",
        )
    return None


async def keep_alive(site: Site) -> Findings:
    """Check that no engine closes an idle connection that the router may still use."""
    if not site.reachable:
        raise Skipped("no instance answers")
    if site.may_wait:
        async for finding in joined(_kept_alive(engine) for engine in site.reachable):
            yield finding
        return
    for engine in site.reachable:
        if engine.server.lower() != "uvicorn":
            yield info(
                engine.where,
                f"another server than vLLM's answers (server: {shown(engine.server) or 'unknown'})",
                f"if it closes idle connections within {KEEPALIVE_S:g} s, some requests are sent twice",
                "run `smetric doctor --slow`, which measures it",
            )


async def _kept_alive(engine: ExaminedEngine) -> Findings:
    parts = urlsplit(engine.settings.url)
    is_tls = parts.scheme == "https" or None
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, port_of(parts), ssl=is_tls, limit=1 << 16)
    except OSError:
        return  # reported by the check of instances
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: %b\r\n\r\n" % parts.netloc.encode())
        answered_at = time.monotonic()
        async with asyncio.timeout(WATCHED_S):
            while await reader.read(1 << 16):
                answered_at = time.monotonic()
    except TimeoutError:
        return  # still open
    except OSError:
        pass  # closed with a reset
    finally:
        writer.close()
    kept_s = time.monotonic() - answered_at
    if kept_s < KEEPALIVE_S + MARGIN_S:
        yield warning(
            engine.where,
            f"it closes idle connections after {kept_s:.1f} s; the router reuses them for {KEEPALIVE_S:g} s",
            "a request on a connection that is being closed is lost, and sent again",
            "set `VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5` or more for the engine, or raise the timeout of the proxy before it",
        )

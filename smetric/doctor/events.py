"""Checks of KV events: engines publish them, nothing is missed, and a computed prompt shows in them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from smetric.doctor.check import Skipped
from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, error, warning
from smetric.doctor.probe import FEW_CHARACTERS, ProbeFailed, send_new
from smetric.doctor.site import Site
from smetric.doctor.wire import reason_of
from smetric.sources.kv_publisher import Publisher, publishers
from smetric.telemetry.kv_gauges import CacheFigures

if TYPE_CHECKING:
    from smetric.sources.kv_events import KvEvents

#: Seconds a port has to accept a connection and greet.
CONNECT_S = 2.0
#: Seconds within which a probe's events must arrive, and probes that are sent: a subscription takes its time.
ARRIVES_S = 2.0
PROBES = 2

_FLAG = '`--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\'`'
_UNKNOWN = "its hits are unknown by this source, and only estimated by the prefix index"


async def kv_events(site: Site) -> list[Finding]:
    """Every engine's events arrive, without gaps."""
    settings = site.settings.kv_events
    if not settings.enabled:
        raise Skipped("kv_events.enabled is false")
    if not site.reachable:
        raise Skipped("no instance answers")
    found = _ranks(site)
    if not settings.replay and not all(one.settings.kv_replay for one in site.engines):
        found.append(
            warning(
                "kv_events.replay",
                "it is not set",
                "an engine that ran before this router started, or whose events were once missed, stays unknown until "
                "it restarts",
                "start the engines with `replay_endpoint` in `--kv-events-config`, and set `kv_events.replay`",
            )
        )
    by_id: dict[str, list[Publisher]] = {}
    for publisher in publishers(site.settings, site.router.fleet.instances):
        by_id.setdefault(publisher.instance.id, []).append(publisher)
    # Not a module of the base installation: only who listens to events has the extra.
    from smetric.sources.kv_events import KvEvents

    source = next(one for one in site.router.knows.sources if isinstance(one, KvEvents))
    each = await asyncio.gather(
        *(_of_instance(site, source, engine, by_id[engine.settings.id]) for engine in site.reachable)
    )
    return found + [one for findings in each for one in findings]


def _ranks(site: Site) -> list[Finding]:
    listened = site.settings.kv_events.ranks
    return [
        error(
            engine.where,
            f"it has {engine.ranks} data-parallel ranks, and {listened} are listened to",
            "what the other ranks hold is never seen",
            f"set `kv_events.ranks: {engine.ranks}`",
        )
        for engine in site.reachable
        if engine.ranks > listened
    ]


async def _of_instance(site: Site, source: KvEvents, engine: Engine, listened: list[Publisher]) -> list[Finding]:
    for publisher in listened:
        if publisher.bind:
            continue  # this process listens there itself
        for setting, at in (("endpoint", publisher.endpoint), ("replay", publisher.replay)):
            if at and (problem := await _problem_at(at)):
                flag = "endpoint" if setting == "endpoint" else "replay_endpoint"
                return [
                    error(
                        engine.where,
                        f"its KV events cannot be had at {at}: {problem}",
                        _UNKNOWN,
                        f"start it with {_FLAG}, its `{flag}` at that port; or correct `kv_events.{setting}`",
                    )
                ]
    return await _arriving(site, source, engine)


async def _arriving(site: Site, source: KvEvents, engine: Engine) -> list[Finding]:
    """Provoke events, and look at what arrives."""
    id = engine.settings.id
    before = _messages(source.figures().instances[id])
    if site.may_probe and engine.models:
        for _ in range(PROBES):
            try:
                await send_new(site, engine, engine.models[0], FEW_CHARACTERS)
            except ProbeFailed:
                break  # what is wrong with it is found by the check of hits
            if await _more_than(source, id, before):
                break
        else:
            remedy = (
                f"start it with {_FLAG} and prefix caching on; `kv_events.topic` must be what its topics begin with"
            )
            if site.settings.kv_events.bind:
                remedy += "; a router that runs has the address that the engine connects to: stop it to check this"
            return [error(engine.where, "it computed new prompts, and nothing was published", _UNKNOWN, remedy)]
    return _quality(engine, source.figures().instances[id])


def _quality(engine: Engine, figures: CacheFigures) -> list[Finding]:
    if figures.messages.get("malformed"):
        return [
            error(
                engine.where,
                f"{figures.messages['malformed']} of its KV events could not be read",
                _UNKNOWN,
                "run a vLLM whose events this router reads, see docs/guide/kv-events.md",
            )
        ]
    if figures.restarts > 1:
        return [
            error(
                engine.where,
                f"the numbers of its messages began anew {figures.restarts} times within seconds",
                f"several engines publish at its address, or it restarts again and again: {_UNKNOWN}",
                "give each engine an address of its own (`kv_events` of the instance; the `endpoint` in its "
                "`--kv-events-config`)",
            )
        ]
    if figures.missed or (figures.orphans and not figures.is_known):
        return [
            warning(
                engine.where,
                f"{figures.missed} messages were missed for good, {figures.orphans} blocks have no beginning",
                _UNKNOWN,
                "raise `buffer_steps` in `--kv-events-config` and set `kv_events.replay`; restart the engine, or clear "
                "its cache, to have it known at once",
            )
        ]
    return []


def _messages(figures: CacheFigures) -> int:
    return sum(figures.messages.values())


async def _more_than(source: KvEvents, id: str, before: int) -> bool:
    """Whether more messages than *before* arrive in time."""
    deadline = asyncio.get_running_loop().time() + ARRIVES_S
    while _messages(source.figures().instances[id]) <= before:
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def _problem_at(address: str) -> str:
    """Why nothing that speaks ZeroMQ is at *address*; empty if it is, or if that cannot be told from here."""
    try:
        parts = urlsplit(address)
        if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
            return ""
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                greeting = await reader.readexactly(1)
            finally:
                writer.close()
    except TimeoutError:
        return "nothing greets there"
    except asyncio.IncompleteReadError:
        return "the connection is closed at once"
    except ValueError:  # or a name that no name server can be asked for
        return "that is no address"
    except OSError as problem:
        return reason_of(problem)
    return "" if greeting == b"\xff" else "what is there does not speak ZeroMQ"

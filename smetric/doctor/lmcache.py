"""Check of LMCache's lookup service: its kind, its instances, its chunks, and whether it finds a prompt.

The controller's `/health` is never asked: it hangs on an engine that is gone.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from smetric.doctor.site import (
    REPLY_S,
    ExaminedEngine,
    Finding,
    Findings,
    NoReply,
    ProbeFailed,
    Site,
    SiteReply,
    Skipped,
    error,
    info,
    listed,
    send_new,
    shown,
    warning,
)
from smetric.errors import UNREADABLE
from smetric.sources.lmcache.client import (
    Controller,
    Coordinator,
    LmcacheHits,
    LmcacheQuestion,
    LookupService,
    UnreadableError,
)

#: Age of a missed heartbeat, seconds; the controller's list may be 30 s old itself.
HEARTBEAT_S = 90.0
#: Seconds within which a computed prompt must be found.
FOUND_WITHIN_S = 3.0
#: Tensor-parallel ranks that are tried if nothing is found under the configured ones.
WORLD_SIZES = (1, 2, 4, 8, 16)

_LISTS = {"coordinator": "/instances", "controller": "/controller/workers"}
_UNSEEN = "what it holds is never found, and every length from LMCache stays unknown"


class _Entry(msgspec.Struct):
    instance_id: str
    registration_time: float = 0.0
    last_heartbeat_time: float = 0.0


class _List(msgspec.Struct):
    instances: list[_Entry] | None = None
    workers: list[_Entry] | None = None


async def lmcache(site: Site) -> Findings:
    """Check that the service answers as configured, knows the instances, and finds what they hold."""
    settings = site.settings.lmcache
    if not settings.url:
        raise Skipped("lmcache.url is not set")
    where, mode = f"LMCache at {settings.url}", settings.mode
    try:
        reply, entries = await _entries(site, mode)
        if entries is None:
            other = "controller" if mode == "coordinator" else "coordinator"
            _, others = await _entries(site, other)
            yield error(
                where,
                f"it does not answer as LMCache's {mode}" + (f", but as its {other}" if others is not None else ""),
                "look-ups fail",
                f"set `lmcache.mode: {other}`" if others is not None else f"set `lmcache.url` to the {mode}'s",
            )
            return
        chunks_problem = await _chunks_problem(site)
    except NoReply as reason:
        yield error(
            where,
            f"it cannot be asked: {reason}",
            "every length from LMCache is unknown",
            f"start `lmcache_controller` or `lmcache coordinator`, or correct `lmcache.url` ({mode})",
        )
        return
    ahead_s = reply.clock_ahead_s or 0.0
    now = time.time() + (ahead_s if abs(ahead_s) > 2 else 0)  # by the service's clock, which dates registrations
    for finding in (*_models(site), *_registered(site, entries, now)):
        yield finding
    known = {entry.instance_id for entry in entries}
    if chunks_problem:
        yield error(
            where,
            f"chunks are not as configured: {chunks_problem}",
            "every answer is unreadable, and every length from LMCache is unknown",
            "set `lmcache.chunk_size` to the `--chunk-size` of coordinator and servers, 256 by default",
        )
    elif site.may_probe:
        for model, (engine, *_) in site.by_model().items():
            is_asked = _id(site, engine) in known and (not settings.models or model in settings.models)
            if is_asked and (unfound := await _unfound(site, where, model, engine)) is not None:
                yield unfound
    elif mode == "controller":
        yield info(
            where,
            "without a probe it is unknown whether it hashes like the engines",
            "with another PYTHONHASHSEED, Python or vLLM nothing is ever found",
            "start the controller and all engines with the same `PYTHONHASHSEED`, such as 0",
        )


async def _entries(site: Site, mode: str) -> tuple[SiteReply, Sequence[_Entry] | None]:
    """Return the reply to a list in *mode*, and its registrations; None if the service is not of this kind."""
    reply = await site.client.ask(site.settings.lmcache.url + _LISTS[mode], within_s=REPLY_S)
    if reply.status != 200:
        return reply, None
    try:
        read = msgspec.json.decode(reply.body, type=_List)
    except UNREADABLE:
        return reply, None
    return reply, read.instances if mode == "coordinator" else read.workers


def _registered(site: Site, entries: Sequence[_Entry], now: float) -> Iterator[Finding]:
    """Yield findings on the registrations at the time *now* of the service."""
    known = {entry.instance_id for entry in entries}
    for engine in site.engines:
        if _id(site, engine) not in known:
            yield error(
                engine.where,
                f"LMCache knows no instance {shown(_id(site, engine))}; it knows {listed(sorted(known))}",
                _UNSEEN,
                f"set `lmcache.instances: {{{engine.settings.id}: ID}}` to its `lmcache_instance_id` (or the "
                "server's `--instance-id`), and see that the engine registers with this service",
            )
    for id in sorted(known & {_id(site, engine) for engine in site.engines}):
        beats = [entry for entry in entries if entry.instance_id == id and entry.last_heartbeat_time]
        # Without heartbeats the time of the last one stays that of the registration.
        beating = [entry for entry in beats if entry.last_heartbeat_time > entry.registration_time + 1]
        if beating and (age := now - max(entry.last_heartbeat_time for entry in beating)) > HEARTBEAT_S:
            yield warning(
                f"LMCache instance {shown(id)}",
                f"its last heartbeat was {age:.0f} s ago",
                "it is probably gone, and LMCache still reports what it held",
                "see whether the engine runs; with `--health-check-interval 10 --lmcache-worker-timeout 60` the "
                "controller forgets such instances itself",
            )
        elif beats and not beating and now - beats[0].registration_time > HEARTBEAT_S:
            yield info(
                f"LMCache instance {shown(id)}",
                "it has never sent a heartbeat",
                "after a restart of the controller it does not register again",
                "set `lmcache_worker_heartbeat_time` in the engine's LMCache configuration, and start the controller "
                "with a `heartbeat` port in `--monitor-ports`",
            )


def _models(site: Site) -> Iterator[Finding]:
    """Yield findings on names in `lmcache.models` that no instance serves, so that no prompt has them."""
    cards = {card.id for engine in site.reachable for card in engine.cards}
    served = sorted(cards.union(*(engine.models for engine in site.reachable)))
    aliases = site.settings.models
    for name in site.settings.lmcache.models:
        if served and name not in served:
            yield error(
                "lmcache.models",
                f"it names {shown(name)}, which no instance serves; they serve {listed(served)}",
                "look-ups use the names of the instances, so the intended prompts are never looked up",
                f"name {shown(aliases[name])} instead, which that alias stands for"
                if name in aliases
                else "name the model as the instances do, or leave `lmcache.models` out to look all models up",
            )


async def _chunks_problem(site: Site) -> str:
    """Return how the service cuts prompts otherwise than configured, by a look-up of unknown tokens."""
    settings = site.settings.lmcache
    if settings.mode == "controller":
        return ""  # unknown from its answers
    question = LmcacheQuestion(array("I", range(3 * settings.chunk_size)), "smetric-doctor", "")
    try:
        await _ask(site, Coordinator(settings.chunk_size, 1), question)
    except UnreadableError as problem:
        return str(problem)
    return ""


async def _unfound(site: Site, where: str, model: str, engine: ExaminedEngine) -> Finding | None:
    """Return a finding unless LMCache finds a prompt that *engine* has just computed, under the configured key."""
    settings = site.settings.lmcache
    try:
        probe, _ = await send_new(site, engine, model, 8 * settings.chunk_size)
    except ProbeFailed:
        return None  # reported by the check of hits
    ids = await site.router.token_ids.of(site.read(probe.api, probe.body))
    whole = len(ids or ()) // settings.chunk_size * settings.chunk_size
    if ids is None or not whole:
        return info(
            engine.where,
            f"it is unknown whether LMCache finds a prompt of {shown(model)}: it has no token ids, or too few",
            "hits by LMCache are unproved",
            "see the check tokens; lower `lmcache.chunk_size` if the model takes no prompt of that length",
        )
    tokens, id = array("I", ids[:whole]), _id(site, engine)
    name, size = settings.models.get(model, model), settings.world_size
    deadline = asyncio.get_running_loop().time() + FOUND_WITHIN_S
    while id not in await _holders(site, name, size, tokens):
        if asyncio.get_running_loop().time() >= deadline:
            break
        await asyncio.sleep(0.2)
    else:
        return None
    if settings.mode == "coordinator":
        card = engine.card(model)
        names = (name, model, *(each.id for each in engine.cards), card.root if card is not None else None)
        for key_name, key_size in ((each, n) for each in dict.fromkeys(names) if each for n in WORLD_SIZES):
            if id in await _holders(site, key_name, key_size, tokens):
                keys, remedies = [], []
                if key_name != name:
                    keys.append(f"of model {shown(key_name)}, not {shown(name)}")
                    remedies.append(f"set `lmcache.models: {{{shown(model)}: {shown(key_name)}}}`")
                if key_size != size:
                    keys.append(f"of world size {key_size}, not {size}")
                    remedies.append(f"set `lmcache.world_size: {key_size}`")
                what = f"prompts of {shown(model)} are under keys {' and '.join(keys)}"
                return error(where, what, _UNSEEN, "; ".join(remedies))
    return warning(
        engine.where,
        f"a prompt of {shown(model)} that it has just computed is not found in LMCache",
        _UNSEEN,
        "see that the engine runs `LMCacheMPConnector`, that its server has `--coordinator-event-reporting`, and that "
        "server and coordinator have the same `--hash-algorithm`; set `lmcache.models` and `lmcache.world_size` as in "
        "LMCache's keys"
        if settings.mode == "coordinator"
        else "give engines and controller the same `PYTHONHASHSEED`, such as 0, the same vLLM and the same Python; see "
        "that the engine runs `LMCacheConnectorV1` with `enable_controller: true`",
    )


async def _holders(site: Site, model: str, world_size: int, tokens: array[int]) -> set[str]:
    """Return LMCache's ids of the instances that hold a prefix of *tokens*; none for an unreadable reply."""
    settings = site.settings.lmcache
    service: LookupService = (
        Controller() if settings.mode == "controller" else Coordinator(settings.chunk_size, world_size)
    )
    try:
        found = await _ask(site, service, LmcacheQuestion(tokens, model, ""))
    except (UnreadableError, NoReply):
        return set()
    return {*found.host, *found.own, *found.likely}


async def _ask(site: Site, service: LookupService, question: LmcacheQuestion) -> LmcacheHits:
    url = site.settings.lmcache.url + service.path
    reply = await site.client.ask(url, body=service.body(question), within_s=REPLY_S)
    if reply.status != 200:
        raise NoReply(f"it answers look-ups with {reply.status}")
    return service.read(reply.body, question)


def _id(site: Site, engine: ExaminedEngine) -> str:
    return site.settings.lmcache.instances.get(engine.settings.id, engine.settings.id)

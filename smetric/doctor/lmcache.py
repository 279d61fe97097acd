"""Checks of LMCache's lookup service: is it what it is taken for, does it know the instances, does it find a prompt.

The controller's `/health` is never asked: it hangs on an engine that is gone.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from smetric.doctor.site import (
    Answer,
    Engine,
    Finding,
    NoAnswer,
    ProbeFailed,
    Site,
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

#: Seconds the service has for one answer.
ANSWER_S = 5.0
#: Seconds after which a heartbeat is missed: the controller's list may be 30 s old itself.
HEARTBEAT_S = 90.0
#: Seconds within which a computed prompt must be found.
FOUND_WITHIN_S = 3.0
#: Tensor-parallel ranks that are tried where nothing is found under those configured.
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


_LIST = msgspec.json.Decoder(_List)


async def lmcache(site: Site) -> list[Finding]:
    """The service answers as configured, knows the instances, and finds what they hold."""
    settings = site.settings.lmcache
    if not settings.url:
        raise Skipped("lmcache.url is not set")
    where = f"LMCache at {settings.url}"
    try:
        answer = await _list(site, settings.mode)
        entries = _entries(answer, settings.mode)
        if entries is None:
            other = "controller" if settings.mode == "coordinator" else "coordinator"
            is_other = _entries(await _list(site, other), other) is not None
            return [
                error(
                    where,
                    f"it does not answer as LMCache's {settings.mode}" + (f", but as its {other}" if is_other else ""),
                    "look-ups fail",
                    f"set `lmcache.mode: {other}`" if is_other else f"set `lmcache.url` to the {settings.mode}'s",
                )
            ]
        found = [*_models(site), *_registered(site, entries, _now(answer))]
        chunks = await _chunks(site, where)
    except NoAnswer as reason:
        return [
            error(
                where,
                f"it cannot be asked: {reason}",
                "every length from LMCache is unknown",
                f"start `lmcache_controller` or `lmcache coordinator`, or correct `lmcache.url` ({settings.mode})",
            )
        ]
    if chunks:
        return [*found, *chunks]
    if not site.may_probe and settings.mode == "controller":
        found.append(
            info(
                where,
                "whether it hashes as the engines do is not known without a probe",
                "with another PYTHONHASHSEED, Python or vLLM nothing is ever found",
                "start the controller and all engines with the same `PYTHONHASHSEED`, such as 0",
            )
        )
    if site.may_probe:
        known = {entry.instance_id for entry in entries}
        for model, engine in site.first_of_each_model():
            if _id(site, engine) in known and (not settings.models or model in settings.models):
                found += await _finds(site, where, model, engine)
    return found


async def _list(site: Site, mode: str) -> Answer:
    return await site.wire.get(site.settings.lmcache.url + _LISTS[mode], within_s=ANSWER_S)


def _entries(answer: Answer, mode: str) -> Sequence[_Entry] | None:
    """What is registered with the service; None if it is not of this kind."""
    if answer.status != 200:
        return None
    try:
        read = _LIST.decode(answer.body)
    except UNREADABLE:
        return None
    return read.instances if mode == "coordinator" else read.workers


def _now(answer: Answer) -> float:
    """What the clock says by which the service dates its registrations; ours, unless they are seconds apart."""
    ahead_s = answer.clock_ahead_s or 0.0
    return time.time() + (ahead_s if abs(ahead_s) > 2 else 0)


def _registered(site: Site, entries: Sequence[_Entry], now: float) -> list[Finding]:
    """What is wrong with the registrations at *now*."""
    known = {entry.instance_id for entry in entries}
    unknown = [engine for engine in site.engines if _id(site, engine) not in known]
    found = [
        error(
            engine.where,
            f"LMCache knows no instance {shown(_id(site, engine))}; it knows {listed(sorted(known))}",
            _UNSEEN,
            f"set `lmcache.instances: {{{engine.settings.id}: ID}}` to its `lmcache_instance_id` (or the server's "
            "`--instance-id`), and see that the engine registers with this service",
        )
        for engine in unknown
    ]
    for id in sorted(known & {_id(site, engine) for engine in site.engines}):
        beats = [entry for entry in entries if entry.instance_id == id and entry.last_heartbeat_time]
        # Without heartbeats the time of the last one stays that of the registration.
        beating = [entry for entry in beats if entry.last_heartbeat_time > entry.registration_time + 1]
        if beating and (age := now - max(entry.last_heartbeat_time for entry in beating)) > HEARTBEAT_S:
            found.append(
                warning(
                    f"LMCache instance {shown(id)}",
                    f"its last heartbeat was {age:.0f} s ago",
                    "it is probably gone, and what it held is still answered",
                    "see whether the engine runs; start the controller with `--health-check-interval 10 "
                    "--lmcache-worker-timeout 60`, and it forgets such instances itself",
                )
            )
        elif beats and not beating and now - beats[0].registration_time > HEARTBEAT_S:
            found.append(
                info(
                    f"LMCache instance {shown(id)}",
                    "it has never sent a heartbeat",
                    "after a restart of the controller it does not register again",
                    "set `lmcache_worker_heartbeat_time` in the engine's LMCache configuration, and start the "
                    "controller with a `heartbeat` port in `--monitor-ports`",
                )
            )
    return found


def _models(site: Site) -> list[Finding]:
    """Models to be looked up that no prompt is ever for, by the names that are sent on."""
    cards = {card.id for engine in site.reachable for card in engine.cards}
    served = sorted(cards.union(*(engine.models for engine in site.reachable)))
    return [
        error(
            "lmcache.models",
            f"it names {shown(name)}, which no instance serves; they serve {listed(served)}",
            "look-ups go by the name that the instances serve: prompts that were meant are never looked up",
            f"name {shown(site.settings.models[name])} instead, which that alias stands for"
            if name in site.settings.models
            else "name the model as the instances do, or leave `lmcache.models` out to look all models up",
        )
        for name in site.settings.lmcache.models
        if served and name not in served
    ]


async def _chunks(site: Site, where: str) -> list[Finding]:
    """The service cuts prompts into the chunks that are configured, asked with tokens that nobody holds."""
    settings = site.settings.lmcache
    if settings.mode == "controller":
        return []  # its answers do not tell
    question = LmcacheQuestion(array("I", range(3 * settings.chunk_size)), "smetric-doctor", "")
    try:
        await _ask(site, Coordinator(settings.chunk_size, 1), question)
    except UnreadableError as problem:
        return [
            error(
                where,
                f"chunks are not as configured: {problem}",
                "every answer is unreadable, and every length from LMCache is unknown",
                "set `lmcache.chunk_size` to the `--chunk-size` of coordinator and servers, 256 by default",
            )
        ]
    return []


@dataclass(frozen=True, slots=True)
class _Key:
    """Under what a prompt is looked up."""

    model: str
    world_size: int


async def _finds(site: Site, where: str, model: str, engine: Engine) -> list[Finding]:
    """A prompt that *engine* has just computed is found, under the configured key or another."""
    settings = site.settings.lmcache
    try:
        probe, _ = await send_new(site, engine, model, 8 * settings.chunk_size)
    except ProbeFailed:
        return []  # found by the check of hits
    ids = await site.router.token_ids.of(probe.request(site))
    whole = len(ids or ()) // settings.chunk_size * settings.chunk_size
    if ids is None or not whole:
        return [
            info(
                engine.where,
                f"whether LMCache finds a prompt of {shown(model)} is not known: it has no token ids, or too few",
                "what it is that look-ups would find is unproved",
                "see the check tokens; lower `lmcache.chunk_size` if the model takes no prompt of that length",
            )
        ]
    tokens, id = array("I", ids[:whole]), _id(site, engine)
    configured = _Key(settings.models.get(model, model), settings.world_size)
    deadline = asyncio.get_running_loop().time() + FOUND_WITHIN_S
    while True:
        if id in await _holders(site, configured, tokens):
            return []
        if asyncio.get_running_loop().time() >= deadline:
            break
        await asyncio.sleep(0.2)
    if settings.mode == "coordinator":
        card = engine.card(model)
        names = [configured.model, model, *[c.id for c in engine.cards], card.root if card is not None else None]
        for key in (_Key(name, size) for name in dict.fromkeys(n for n in names if n) for size in WORLD_SIZES):
            if id in await _holders(site, key, tokens):
                return [_under_another_key(where, model, configured, key)]
    return [
        warning(
            engine.where,
            f"a prompt of {shown(model)} that it has just computed is not found in LMCache",
            _UNSEEN,
            "see that the engine runs `LMCacheMPConnector`, that its server has `--coordinator-event-reporting`, and "
            "that server and coordinator have the same `--hash-algorithm`; set `lmcache.models` and "
            "`lmcache.world_size` to what LMCache's keys say"
            if settings.mode == "coordinator"
            else "give engines and controller the same `PYTHONHASHSEED`, such as 0, the same vLLM and the same Python; "
            "see that the engine runs `LMCacheConnectorV1` with `enable_controller: true`",
        )
    ]


def _under_another_key(where: str, model: str, configured: _Key, key: _Key) -> Finding:
    remedies, told = [], []
    if key.model != configured.model:
        told.append(f"of model {shown(key.model)}, not {shown(configured.model)}")
        remedies.append(f"set `lmcache.models: {{{shown(model)}: {shown(key.model)}}}`")
    if key.world_size != configured.world_size:
        told.append(f"of world size {key.world_size}, not {configured.world_size}")
        remedies.append(f"set `lmcache.world_size: {key.world_size}`")
    return error(where, f"prompts of {shown(model)} are under keys {' and '.join(told)}", _UNSEEN, "; ".join(remedies))


async def _holders(site: Site, key: _Key, tokens: array[int]) -> set[str]:
    """LMCache's ids of those that hold a beginning of *tokens*; nobody for an answer that cannot be read."""
    settings = site.settings.lmcache
    service: LookupService = (
        Controller() if settings.mode == "controller" else Coordinator(settings.chunk_size, key.world_size)
    )
    try:
        holdings = await _ask(site, service, LmcacheQuestion(tokens, key.model, ""))
    except (UnreadableError, NoAnswer):
        return set()
    return {*holdings.host, *holdings.own, *holdings.likely}


async def _ask(site: Site, service: LookupService, question: LmcacheQuestion) -> LmcacheHits:
    answer: Answer = await site.wire.post(
        site.settings.lmcache.url + service.path, service.body(question), within_s=ANSWER_S
    )
    if answer.status != 200:
        raise NoAnswer(f"it answers look-ups with {answer.status}")
    return service.read(answer.body, question)


def _id(site: Site, engine: Engine) -> str:
    return site.settings.lmcache.instances.get(engine.settings.id, engine.settings.id)

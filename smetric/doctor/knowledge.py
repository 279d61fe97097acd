"""Checks of sources."""

from __future__ import annotations

import asyncio
import os
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from smetric.doctor.site import (
    FEW_CHARACTERS,
    Engine,
    Finding,
    Prediction,
    Probe,
    ProbeFailed,
    Site,
    Skipped,
    error,
    info,
    predict,
    reason_of,
    send,
    send_new,
    shown,
    warning,
)
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.sources.kv_events.publisher import Publisher, publishers
from smetric.sources.lookups import LookupDeadline
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes, PrefixPart
from smetric.sources.prefix_index.persistence import NAME, UnreadableImage, read_image
from smetric.sources.prefix_index.tokens import PrefixTokens
from smetric.sources.tokens.chat import ChatPrompt, NotTokenised, Unavailable, chat_of_chat
from smetric.sources.tokens.engine import EngineEncoder

if TYPE_CHECKING:
    from smetric.sources.kv_events.source import CacheFigures, KvEvents


# Checks of KV events: engines publish them, nothing is missed, and a computed prompt shows in them.

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
    from smetric.sources.kv_events.source import KvEvents

    source = next(one for one in site.router.sources.ranked if isinstance(one, KvEvents))
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


# The proof: a fresh prompt twice to one instance; what the sources predict is what the engine reports.

#: Seconds within which what an instance has just computed must be known to hold.
KNOWN_WITHIN_S = 3.0
_PAUSE_S = 0.1


async def hits(site: Site) -> list[Finding]:
    """Predicted hits are reported hits, for one instance of each model; the others report hits, too."""
    if not site.may_probe:
        raise Skipped("no probe was wanted")
    each = site.first_of_each_model()
    if not each:
        raise Skipped("no instance tells what it serves")
    proved = [engine for _, engine in each]
    others = [engine for engine in site.reachable if engine.models and engine not in proved]
    found = await asyncio.gather(
        *(_of_model(site, model, engine) for model, engine in each), *(_of_other(site, engine) for engine in others)
    )
    return [one for findings in found for one in findings]


async def _of_model(site: Site, model: str, engine: Engine) -> list[Finding]:
    instance = site.router.fleet[engine.settings.id]
    try:
        probe, usage = await send_new(site, engine, model)
        request = probe.request(site)
        ids = await site.router.token_ids.of(request)
        count = len(ids) if ids is not None else None
        if engine.page.cache.get("enable_prefix_caching") == "False":
            return _counted(engine, model, count, usage)
        _learn(site, request, instance, usage)
        prediction = await _once_known(site, probe, instance)
        again = await send(site, engine, probe)
    except ProbeFailed as problem:
        return [_refused(engine, model, problem)]
    # By wrong ids a wrong hit is predicted: what is to be mended are the ids.
    counted = _counted(engine, model, count, again)
    return counted or _judged(site, engine, model, prediction, again)


async def _of_other(site: Site, engine: Engine) -> list[Finding]:
    try:
        probe, usage = await send_new(site, engine, engine.models[0], FEW_CHARACTERS)
        if usage.cached_tokens is None:
            # Older engines do not report that nothing was cached.
            usage = await send(site, engine, probe)
    except ProbeFailed as problem:
        return [_refused(engine, engine.models[0], problem)]
    return [_unreported(engine)] if usage.cached_tokens is None else []


def _refused(engine: Engine, model: str, problem: ProbeFailed) -> Finding:
    return error(
        engine.where,
        f"it does not answer a small request for {shown(model)}: {problem}",
        "neither will it answer those of clients",
        "see the engine's log; send it a request by hand",
    )


def _unreported(engine: Engine) -> Finding:
    return warning(
        engine.where,
        "its answers do not report cached tokens",
        "predicted hits cannot be checked against real ones, and the index cannot learn from them",
        "start it with `--enable-prompt-tokens-details`",
    )


def _learn(site: Site, request: InferenceRequest, instance: Instance, usage: Usage) -> None:
    """Tell the sources what a router would: *instance* has answered *request*."""
    if request.prompt is not None and usage.prompt_tokens:
        site.router.tokens.learn(request.model, request.prompt.size, usage.prompt_tokens)
    site.router.router.prefilled(request, instance)
    site.router.router.settled(request, instance, usage)


async def _once_known(site: Site, probe: Probe, instance: Instance) -> Prediction:
    """What is predicted as soon as anything is; the last prediction if nothing ever is."""
    deadline = asyncio.get_running_loop().time() + KNOWN_WITHIN_S
    while True:
        prediction = await predict(site, probe.request(site), instance)
        if prediction.tokens or asyncio.get_running_loop().time() >= deadline:
            return prediction
        await asyncio.sleep(_PAUSE_S)


def _counted(engine: Engine, model: str, ids: int | None, usage: Usage) -> list[Finding]:
    if ids is None or usage.prompt_tokens in (None, ids):
        return []
    return [
        error(
            engine.where,
            f"a prompt has {ids} token ids here, and the engine counts {usage.prompt_tokens}",
            "every look-up by token ids (KV events, LMCache, the prefix index) finds nothing, or the wrong thing",
            f"let `tokenizer.folders` name the very model that {shown(model)} is, with its chat template, or set "
            "`tokenizer.source: engine`",
        )
    ]


def _judged(site: Site, engine: Engine, model: str, prediction: Prediction, usage: Usage) -> list[Finding]:
    actual = usage.cached_tokens
    if actual is None:
        return [_unreported(engine)]
    if prediction.tokens is None:
        return [
            warning(
                engine.where,
                f"no source knows what it holds, just after it computed a prompt; it reports {actual} cached tokens",
                "sessions cannot be sent where their cache is",
                "turn on `prefix_index.enabled`, and see the other findings on `kv_events` and `lmcache`",
            )
        ]
    room = _room(site, engine, model, prediction.source)
    if abs(prediction.tokens - actual) <= room:
        return _slow(site, engine, prediction, usage)
    return [
        warning(
            engine.where,
            f"{prediction.source} predicts {prediction.tokens:.0f} cached tokens, and the engine reports {actual}",
            f"they differ by more than a block ({room:.0f} tokens): sessions are sent where their cache is not, or "
            "leave where it is",
            "see the other findings; if there are none, something clears or fills the cache beside the router",
        )
    ]


def _slow(site: Site, engine: Engine, prediction: Prediction, usage: Usage) -> list[Finding]:
    lookup = site.settings.lookup
    waits = LookupDeadline(lookup.deadline_base, lookup.deadline_per_1k_tokens, lookup.deadline_cap)
    allowed = waits.of(usage.prompt_tokens or 1)
    if prediction.took_s <= allowed:
        return []
    return [
        info(
            engine.where,
            f"looking a prompt up took {prediction.took_s * 1000:.0f} ms; a decision waits {allowed * 1000:.0f} ms",
            "what is late is unknown",
            "if it stays so, raise `lookup.deadline_base`, or set `tokenizer.source: local`",
        )
    ]


def _room(site: Site, engine: Engine, model: str, source: str) -> float:
    """Tokens by which a prediction may be wrong: a block of the source's, and of the engine's."""
    block = engine.block_size or site.settings.block_size
    if source in (PrefixIndex.name, PrefixPart.name):
        return block + BLOCK_BYTES / site.router.tokens.of(model)
    if source == PrefixTokens.name:
        return max(block, site.settings.block_size)
    return block + (site.settings.lmcache.chunk_size if source.startswith("lmcache:") else 0)


# Check of what the prefix index is kept in over a restart: its folder can be written, and its file read.
#
# Nothing is written here; a router that runs goes on writing meanwhile.

#: Free bytes that a disk has to have, beside what a new file of the present size takes.
LEAST_FREE = 1024 * 1024

_LOST = "after a restart the router knows nothing of what its instances hold, and sessions scatter"


async def index(site: Site) -> list[Finding]:
    """The index outlives a restart."""
    settings = site.settings.prefix_index
    if not settings.enabled or not settings.folder:
        raise Skipped("prefix_index.folder is not set")
    return await asyncio.to_thread(_look, Path(settings.folder), site.router.sources.indexes)


def _look(folder: Path, indexes: PrefixIndexes) -> list[Finding]:
    existing = folder.absolute()
    while not os.path.exists(existing):
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            error(
                f"prefix_index.folder {shown(str(folder))}",
                f"{shown(str(existing))} is no folder that can be written",
                _LOST,
                "let the user that the router runs as own it, or set `prefix_index.folder` to another",
            )
        ]
    found = _problem(folder, indexes)
    path = folder / NAME
    size = path.stat().st_size if path.is_file() else 0
    free = shutil.disk_usage(existing).free
    if free < size + LEAST_FREE:
        found.append(
            warning(
                f"prefix_index.folder {shown(str(folder))}",
                f"{free} bytes are free, and a new file of the index takes {size} before it replaces the old one",
                _LOST,
                "make room on that disk, or set `prefix_index.folder` to another",
            )
        )
    return found


def _problem(folder: Path, indexes: PrefixIndexes) -> list[Finding]:
    try:
        read_image(folder, indexes.image_bytes)
    except UnreadableImage as problem:
        reason = str(problem)
    except OSError as problem:
        reason = str(problem.strerror).lower()
    else:
        return []
    return [
        warning(
            f"prefix_index.folder {shown(str(folder))}",
            f"its file {NAME} cannot be used: {reason}",
            _LOST,
            "give each router a folder of its own, which its user owns; a router of this release writes the file anew",
        )
    ]


# Check of token ids: a conversation with tools has the same ids here and in every engine.

#: Seconds an engine has to tokenise a short conversation.
ANSWER_S = 5.0

_TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "notes.txt"}'}}
_PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What do my notes say? Größe, 大小, \U0001f4c4"},
]
_WITH_TOOLS: list[dict[str, Any]] = [
    *_PLAIN,
    {"role": "assistant", "content": "I will look.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Buy milk."},
    {"role": "user", "content": "And else?"},
]
#: Conversations, the harder one first: not every chat template takes tools.
_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("with tools", {"messages": _WITH_TOOLS, "tools": [_TOOL]}),
    ("without tools", {"messages": _PLAIN}),
)


async def tokens(site: Site) -> list[Finding]:
    """Ids are the same everywhere, for every model."""
    if site.settings.tokenizer.source == "estimated":
        raise Skipped("tokenizer.source is estimated, so nothing is looked up by token ids")
    by_model: dict[str, list[Engine]] = {}
    for engine in site.reachable:
        for model in engine.models[:1]:
            by_model.setdefault(model, []).append(engine)
    if not by_model:
        raise Skipped("no instance tells what it serves")
    found = await asyncio.gather(*(_tokens_of_model(site, model, engines) for model, engines in by_model.items()))
    return [one for findings in found for one in findings]


async def _tokens_of_model(site: Site, model: str, engines: Sequence[Engine]) -> list[Finding]:
    for kind, body in _BODIES:
        told = await asyncio.gather(*(_ids(site, engine, model, chat_of_chat(body)) for engine in engines))
        if all(isinstance(ids, NotTokenised) and not isinstance(ids, Unavailable) for ids in told):
            continue  # no engine's template takes it: perhaps it takes less
        return await _compare(site, model, kind, body, list(zip(engines, told, strict=True)))
    return [
        info(
            f"model {shown(model)}",
            "no engine renders a conversation of it",
            "only prompts that are texts, or token ids, can be looked up",
            "if it is a chat model, start the engines with `--chat-template`",
        )
    ]


async def _compare(
    site: Site, model: str, kind: str, body: dict[str, Any], told: Sequence[tuple[Engine, array[int] | NotTokenised]]
) -> list[Finding]:
    source = site.settings.tokenizer.source
    found = [
        error(
            engine.where,
            f"it does not tokenise a conversation {kind} of {shown(model)} (/tokenize: "
            f"{'no answer' if isinstance(ids, Unavailable) else 'refused'})",
            "with `tokenizer.source: engine`, look-ups by token ids find nothing",
            "let whatever stands before the engine pass /tokenize on, or set `tokenizer.source: local`",
        )
        for engine, ids in told
        if isinstance(ids, NotTokenised) and source == "engine"
    ]
    known = [(engine, ids) for engine, ids in told if not isinstance(ids, NotTokenised)]
    if not known:
        return found
    first, theirs = known[0]
    found += [
        warning(
            engine.where,
            f"a conversation {kind} of {shown(model)} has other token ids than on {first.settings.id} "
            f"({_difference(ids, theirs)})",
            "ids that are right for one are wrong for the other, and so are its hits",
            "start all engines of a model with the same files, `--chat-template` and `--tokenizer`",
        )
        for engine, ids in known[1:]
        if ids != theirs
    ]
    content = orjson.dumps({"model": model, **body})
    reading = ReaderSettings(block_size=site.settings.block_size, aliases=site.settings.models)
    ours = await site.router.token_ids.of(parse(Api.CHAT, content, (), site.router.tokens, reading))
    if ours is None:
        if source == "local":
            found.append(
                error(
                    f"model {shown(model)}",
                    f"a conversation {kind} of it cannot be tokenised here",
                    "look-ups by token ids find nothing",
                    f"set `tokenizer.folders: {{{shown(model)}: FOLDER}}` to its folder, with its chat template",
                )
            )
    elif source == "local" and array("I", ours) != theirs:
        found.append(
            error(
                f"model {shown(model)}",
                f"a conversation {kind} has other token ids here than on {first.settings.id} "
                f"({_difference(array('I', ours), theirs)})",
                "every look-up by token ids (KV events, LMCache) finds nothing, or the wrong thing",
                "let `tokenizer.folders` name the folder of the very model that is served, with the chat template that "
                "it is served with; or set `tokenizer.source: engine`",
            )
        )
    return found


async def _ids(site: Site, engine: Engine, model: str, chat: ChatPrompt) -> array[int] | NotTokenised:
    """What *engine* makes of *chat*, or why nothing."""
    instance = Instance(engine.settings.id, engine.settings.url, key=site.router.fleet[engine.settings.id].key)
    encoder = EngineEncoder(Fleet([instance], VOCABULARY), timeout_s=ANSWER_S)
    await encoder.start()
    try:
        return await encoder.encode(model, chat, 0)
    except NotTokenised as reason:
        return reason
    finally:
        await encoder.stop()


def _difference(ids: array[int], others: array[int]) -> str:
    """Where they part, in numbers alone."""
    same = next((at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
    return f"{len(ids)} and {len(others)} ids, the first {same} of them equal"

"""Checks of sources: KV events, predicted hits, the file of the prefix index, and token ids."""

from __future__ import annotations

import asyncio
import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from smetric.doctor.site import (
    FEW_CHARACTERS,
    REPLY_S,
    ExaminedEngine,
    Finding,
    Findings,
    Prediction,
    ProbeFailed,
    Site,
    Skipped,
    error,
    info,
    joined,
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
from smetric.request.request import INITIAL, Api, Usage
from smetric.sources.kv_events.publisher import Publisher, publishers
from smetric.sources.lookups import LookupDeadline
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes, PrefixPart
from smetric.sources.prefix_index.persistence import NAME, UnreadableImage, read_image
from smetric.sources.prefix_index.tokens import TokenPrefixIndex
from smetric.sources.tokens.chat import ChatPrompt, NotTokenised, Unavailable, chat_of_chat
from smetric.sources.tokens.engine import EngineEncoder
from smetric.sources.tokens.request_tokens import token_source

if TYPE_CHECKING:
    from smetric.sources.kv_events.source import CacheFigures, KvEvents

#: Seconds a port has to accept a connection and greet.
CONNECT_S = 2.0
#: Seconds within which the events of a probe must arrive, and number of probes: a subscription takes time.
ARRIVES_S = 2.0
PROBES = 2
#: Seconds within which sources must know what an instance has just computed.
KNOWN_WITHIN_S = 3.0
#: Free bytes that a disk needs beside those for a new file of the present size.
LEAST_FREE = 1024 * 1024

_FLAG = '`--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557"}\'`'
_UNKNOWN = "its hits are unknown by this source, and only estimated by the prefix index"
_LOST = "after a restart the router knows nothing of what its instances hold, and sessions scatter"


async def kv_events(site: Site) -> Findings:
    """Check that every engine's events arrive without gaps."""
    settings = site.settings.kv_events
    if not settings.enabled:
        raise Skipped("kv_events.enabled is false")
    if not site.reachable:
        raise Skipped("no instance answers")
    for engine in site.reachable:
        if engine.ranks > settings.ranks:
            yield error(
                engine.where,
                f"it has {engine.ranks} data-parallel ranks, and {settings.ranks} are listened to",
                "the caches of the other ranks stay unseen",
                f"set `kv_events.ranks: {engine.ranks}`",
            )
    if not settings.replay and not all(one.settings.kv_replay for one in site.engines):
        yield warning(
            "kv_events.replay",
            "it is not set",
            "an engine that ran before this router, or whose events were once missed, stays unknown until it restarts",
            "start the engines with `replay_endpoint` in `--kv-events-config`, and set `kv_events.replay`",
        )
    by_id: dict[str, list[Publisher]] = {}
    for publisher in publishers(site.settings, site.router.fleet.instances):
        by_id.setdefault(publisher.instance.id, []).append(publisher)
    # The base installation lacks this module's dependency, the extra `kv-events`.
    from smetric.sources.kv_events.source import KvEvents

    source = next(one for one in site.router.sources.ranked if isinstance(one, KvEvents))
    async for finding in joined(
        _published(site, source, engine, by_id[engine.settings.id]) for engine in site.reachable
    ):
        yield finding


async def _published(site: Site, source: KvEvents, engine: ExaminedEngine, listened: Sequence[Publisher]) -> Findings:
    """Look for a publisher at each address, have the engine compute something, and look at the events."""
    for publisher in listened:
        if publisher.bind:
            continue  # this process listens there itself
        for setting, flag, at in (
            ("endpoint", "endpoint", publisher.endpoint),
            ("replay", "replay_endpoint", publisher.replay),
        ):
            if at and (problem := await publisher_problem(at)):
                yield error(
                    engine.where,
                    f"its KV events cannot be received at {at}: {problem}",
                    _UNKNOWN,
                    f"start it with {_FLAG}, its `{flag}` at that port; or correct `kv_events.{setting}`",
                )
                return
    id = engine.settings.id
    before = sum(source.figures().instances[id].messages.values())
    if site.may_probe and engine.models:
        for _ in range(PROBES):
            try:
                await send_new(site, engine, engine.models[0], FEW_CHARACTERS)
            except ProbeFailed:
                break  # reported by the check of hits
            if await _arrives(source, id, before):
                break
        else:
            remedy = f"start it with {_FLAG} and prefix caching on; its topics must begin with `kv_events.topic`"
            if site.settings.kv_events.bind:
                remedy += "; a running router has the address that the engine connects to: stop it to check this"
            yield error(engine.where, "it computed new prompts, and nothing was published", _UNKNOWN, remedy)
            return
    if (finding := _gap(engine, source.figures().instances[id])) is not None:
        yield finding


def _gap(engine: ExaminedEngine, figures: CacheFigures) -> Finding | None:
    if figures.messages.get("malformed"):
        return error(
            engine.where,
            f"{figures.messages['malformed']} of its KV events could not be read",
            _UNKNOWN,
            "run a vLLM whose events this router reads, see docs/guide/kv-events.md",
        )
    if figures.restarts > 1:
        return error(
            engine.where,
            f"the numbers of its messages started again {figures.restarts} times within seconds",
            f"several engines publish at its address, or it keeps restarting: {_UNKNOWN}",
            "give each engine an address of its own (`kv_events` of the instance; `endpoint` in `--kv-events-config`)",
        )
    if figures.missed or (figures.orphans and not figures.is_known):
        return warning(
            engine.where,
            f"{figures.missed} messages are lost, and {figures.orphans} blocks have no beginning",
            _UNKNOWN,
            "raise `buffer_steps` in `--kv-events-config` and set `kv_events.replay`; a restart of the engine, or a "
            "cleared cache, makes it known at once",
        )
    return None


async def _arrives(source: KvEvents, id: str, before: int) -> bool:
    """Return whether more than *before* messages arrive in time."""
    deadline = asyncio.get_running_loop().time() + ARRIVES_S
    while sum(source.figures().instances[id].messages.values()) <= before:
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def publisher_problem(address: str) -> str:
    """Return why no ZeroMQ socket is at *address*; empty if there is one, or if it cannot be checked from here."""
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
    except ValueError:  # also raised for a name that cannot be looked up
        return "it is not an address"
    except OSError as problem:
        return reason_of(problem)
    return "" if greeting == b"\xff" else "another protocol than ZeroMQ"


async def hits(site: Site) -> Findings:
    """Check predictions against reports by a prompt that is sent twice, to one instance of each model.

    The other instances get a short prompt that shows whether they report cached tokens.
    """
    if not site.may_probe:
        raise Skipped("probes are turned off")
    by_model = site.by_model()
    if not by_model:
        raise Skipped("no instance lists its models")
    parts = [_proved(site, model, engines[0]) for model, engines in by_model.items()]
    parts += [_reports(site, model, other) for model, engines in by_model.items() for other in engines[1:]]
    async for finding in joined(parts):
        yield finding


async def _proved(site: Site, model: str, engine: ExaminedEngine) -> Findings:
    instance, router = site.router.fleet[engine.settings.id], site.router
    try:
        probe, usage = await send_new(site, engine, model)
        request = site.read(probe.api, probe.body)
        ids = await router.token_ids.of(request)
        prediction = None
        if engine.page.cache.get("enable_prefix_caching") != "False":
            # The sources learn what a router would report to them.
            if request.prompt is not None and usage.prompt_tokens:
                router.tokens.learn(request.model, request.prompt.size, usage.prompt_tokens)
            router.router.lookups.prefilled(request, instance)
            router.router.lookups.settled(request, instance, usage)
            deadline = asyncio.get_running_loop().time() + KNOWN_WITHIN_S
            prediction = await predict(site, site.read(probe.api, probe.body), instance)
            while not prediction.tokens and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.1)
                prediction = await predict(site, site.read(probe.api, probe.body), instance)
            usage = await send(site, engine, probe)
    except ProbeFailed as problem:
        yield _refused(engine, model, problem)
        return
    if ids is not None and usage.prompt_tokens not in (None, len(ids)):
        # Wrong ids predict wrong hits: the ids come first.
        yield error(
            engine.where,
            f"a prompt has {len(ids)} token ids here, and the engine counts {usage.prompt_tokens}",
            "every look-up by token ids (KV events, LMCache, the prefix index) finds nothing, or the wrong thing",
            f"let `tokenizer.folders` name exactly the model that {shown(model)} is, with its chat template, or set "
            "`tokenizer.source: engine`",
        )
    elif prediction is not None and (finding := _judged(site, engine, model, prediction, usage)) is not None:
        yield finding


async def _reports(site: Site, model: str, engine: ExaminedEngine) -> Findings:
    try:
        probe, usage = await send_new(site, engine, model, FEW_CHARACTERS)
        if usage.cached_tokens is None:  # older engines omit a 0
            usage = await send(site, engine, probe)
    except ProbeFailed as problem:
        yield _refused(engine, model, problem)
        return
    if usage.cached_tokens is None:
        yield _unreported(engine)


def _refused(engine: ExaminedEngine, model: str, problem: ProbeFailed) -> Finding:
    return error(
        engine.where,
        f"it does not answer a small request for {shown(model)}: {problem}",
        "requests of clients will fail, too",
        "see the engine's log; send it a request by hand",
    )


def _unreported(engine: ExaminedEngine) -> Finding:
    return warning(
        engine.where,
        "its answers do not report cached tokens",
        "predicted hits cannot be checked against real ones, and the index cannot learn from them",
        "start it with `--enable-prompt-tokens-details`",
    )


def _judged(site: Site, engine: ExaminedEngine, model: str, prediction: Prediction, usage: Usage) -> Finding | None:
    actual, lookup = usage.cached_tokens, site.settings.lookup
    if actual is None:
        return _unreported(engine)
    if prediction.tokens is None:
        return warning(
            engine.where,
            f"no source knows what it holds, just after it computed a prompt; it reports {actual} cached tokens",
            "sessions cannot be sent where their cache is",
            "turn on `prefix_index.enabled`, and see the other findings on `kv_events` and `lmcache`",
        )
    room = _tolerance(site, engine, model, prediction.source)
    if abs(prediction.tokens - actual) > room:
        return warning(
            engine.where,
            f"{prediction.source} predicts {prediction.tokens:.0f} cached tokens, and the engine reports {actual}",
            f"they differ by more than a block ({room:.0f} tokens): sessions go where their cache is not, or leave "
            "where it is",
            "see the other findings; without any, something else clears or fills the cache",
        )
    deadline = LookupDeadline(lookup.deadline_base, lookup.deadline_per_1k_tokens, lookup.deadline_cap)
    allowed_s = deadline.of(usage.prompt_tokens or 1)
    if prediction.took_s > allowed_s:
        return info(
            engine.where,
            f"a look-up took {prediction.took_s * 1000:.0f} ms; a decision waits {allowed_s * 1000:.0f} ms",
            "a late result counts as unknown",
            "if it stays so, raise `lookup.deadline_base`, or set `tokenizer.source: local`",
        )
    return None


def _tolerance(site: Site, engine: ExaminedEngine, model: str, source: str) -> float:
    """Return by how many tokens a prediction may differ: a block of the source, and one of the engine."""
    block = engine.block_size or site.settings.block_size
    if source in (PrefixIndex.name, PrefixPart.name):
        return block + BLOCK_BYTES / site.router.tokens.get(model, INITIAL)
    if source == TokenPrefixIndex.name:
        return max(block, site.settings.block_size)
    return block + (site.settings.lmcache.chunk_size if source.startswith("lmcache:") else 0)


async def index(site: Site) -> Findings:
    """Check that the folder of the prefix index can be written, and its file be read. It writes nothing."""
    settings = site.settings.prefix_index
    if not settings.enabled or not settings.folder:
        raise Skipped("prefix_index.folder is not set")
    for finding in await asyncio.to_thread(list, _kept_in(Path(settings.folder), site.router.sources.indexes)):
        yield finding


def _kept_in(folder: Path, indexes: PrefixIndexes) -> Iterator[Finding]:
    where = f"prefix_index.folder {shown(str(folder))}"
    existing = folder.absolute()
    while not os.path.exists(existing):
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield error(
            where,
            f"{shown(str(existing))} is not a writable folder",
            _LOST,
            "let the user of the router own it, or set `prefix_index.folder` to another",
        )
        return
    reason = ""
    try:
        read_image(folder, indexes.image_bytes)
    except UnreadableImage as problem:
        reason = str(problem)
    except OSError as problem:
        reason = str(problem.strerror).lower()
    if reason:
        yield warning(
            where,
            f"its file {NAME} cannot be used: {reason}",
            _LOST,
            "give each router a folder of its own, owned by its user; a router of this release writes a new file",
        )
    path = folder / NAME
    size = path.stat().st_size if path.is_file() else 0
    free = shutil.disk_usage(existing).free
    if free < size + LEAST_FREE:
        yield warning(
            where,
            f"{free} bytes are free, and a new file of the index takes {size} before it replaces the old one",
            _LOST,
            "make room on that disk, or set `prefix_index.folder` to another",
        )


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
#: Conversations, the harder one first: some chat templates take no tools.
_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("with tools", {"messages": _WITH_TOOLS, "tools": [_TOOL]}),
    ("without tools", {"messages": _PLAIN}),
)


async def tokens(site: Site) -> Findings:
    """Check that a conversation has the same token ids here and in every engine of its model."""
    if token_source(site.settings) == "estimated":
        raise Skipped("no source needs token ids, or tokenizer.source is estimated: nothing is looked up by token ids")
    by_model = site.by_model()
    if not by_model:
        raise Skipped("no instance lists its models")
    async for finding in joined(_tokens_of(site, model, engines) for model, engines in by_model.items()):
        yield finding


async def _tokens_of(site: Site, model: str, engines: Sequence[ExaminedEngine]) -> Findings:
    for kind, body in _BODIES:
        answers = await asyncio.gather(*(_engine_ids(site, engine, model, chat_of_chat(body)) for engine in engines))
        if all(isinstance(ids, NotTokenised) and not isinstance(ids, Unavailable) for ids in answers):
            continue  # no template takes it; one without tools may pass
        request = site.read(Api.CHAT, orjson.dumps({"model": model, **body}))
        ours = await site.router.token_ids.of(request) if token_source(site.settings) != "engine" else None
        for finding in _compared(site, model, kind, list(zip(engines, answers, strict=True)), ours):
            yield finding
        return
    yield info(
        f"model {shown(model)}",
        "no engine renders a conversation of it",
        "only prompts of text or token ids can be looked up",
        "if it is a chat model, start the engines with `--chat-template`",
    )


def _compared(
    site: Site,
    model: str,
    kind: str,
    answers: Sequence[tuple[ExaminedEngine, array[int] | NotTokenised]],
    ours: Sequence[int] | None,
) -> Iterator[Finding]:
    source = site.settings.tokenizer.source
    for engine, ids in answers:
        if isinstance(ids, NotTokenised) and source == "engine":
            yield error(
                engine.where,
                f"it does not tokenise a conversation {kind} of {shown(model)} (/tokenize: "
                f"{'no answer' if isinstance(ids, Unavailable) else 'refused'})",
                "with `tokenizer.source: engine`, look-ups by token ids find nothing",
                "let the proxy before the engine pass /tokenize on, or set `tokenizer.source: local`",
            )
    known = [(engine, ids) for engine, ids in answers if not isinstance(ids, NotTokenised)]
    if not known:
        return
    first, theirs = known[0]
    for engine, ids in known[1:]:
        if ids != theirs:
            yield warning(
                engine.where,
                f"a conversation {kind} of {shown(model)} has other token ids than on {first.settings.id} "
                f"({_difference(ids, theirs)})",
                "ids that are right for one are wrong for the other, and so are its hits",
                "start all engines of a model with the same files, `--chat-template` and `--tokenizer`",
            )
    if source == "engine":
        return
    if ours is None:
        yield error(
            f"model {shown(model)}",
            f"a conversation {kind} of it cannot be tokenised here",
            "look-ups by token ids find nothing",
            f"set `tokenizer.folders: {{{shown(model)}: FOLDER}}` to its folder, with its chat template",
        )
    elif array("I", ours) != theirs:
        yield error(
            f"model {shown(model)}",
            f"a conversation {kind} has other token ids here than on {first.settings.id} ({_difference(ours, theirs)})",
            "every look-up by token ids (KV events, LMCache) finds nothing, or the wrong thing",
            "let `tokenizer.folders` name the folder of exactly the served model, with the chat template that it is "
            "served with; or set `tokenizer.source: engine`",
        )


async def _engine_ids(site: Site, engine: ExaminedEngine, model: str, chat: ChatPrompt) -> array[int] | NotTokenised:
    """Return the token ids of *chat* by *engine*, or why there are none."""
    instance = Instance(engine.settings.id, engine.settings.url, key=site.router.fleet[engine.settings.id].key)
    encoder = EngineEncoder(Fleet([instance], VOCABULARY), timeout_s=REPLY_S)
    await encoder.start()
    try:
        return await encoder.encode(model, chat, 0)
    except NotTokenised as reason:
        return reason
    finally:
        await encoder.stop()


def _difference(ids: Sequence[int], others: Sequence[int]) -> str:
    """Return where they differ, in numbers alone."""
    same = next((at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
    return f"{len(ids)} and {len(others)} ids, the first {same} of them equal"

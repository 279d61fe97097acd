"""Check of token ids: a conversation with tools has the same ids here and in every engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import orjson

from smetric.doctor.check import Skipped
from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, error, info, shown, warning
from smetric.doctor.site import Site
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.reading.reader import Reading, parse
from smetric.request import Api
from smetric.tokenize.chat import Chat, NotTokenised, chat_of_chat
from smetric.tokenize.encoder import Unavailable
from smetric.tokenize.engine import EngineEncoder

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
    found = await asyncio.gather(*(_of_model(site, model, engines) for model, engines in by_model.items()))
    return [one for findings in found for one in findings]


async def _of_model(site: Site, model: str, engines: Sequence[Engine]) -> list[Finding]:
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
    reading = Reading(block_size=site.settings.block_size, aliases=site.settings.models)
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


async def _ids(site: Site, engine: Engine, model: str, chat: Chat) -> array[int] | NotTokenised:
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

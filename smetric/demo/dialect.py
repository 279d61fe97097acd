"""How an agent speaks: a session as the bodies of one API, and that API's streamed replies read back.

Texts are filler of the recorded lengths. When requests are sent, and what is measured, is in `smetric.demo.agent`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from xxhash import xxh3_64_intdigest, xxh32_intdigest

from smetric.demo.session import Session
from smetric.emulator import reply, tokenizer

#: The name emulated engines answer to.
MODEL = "emulated"
_TOOLS = ("Bash", "Read", "Edit", "Write", "Glob", "Grep", "Task", "WebFetch")


@dataclass(slots=True)
class Reply:
    """What came back so far: the text, and the tokens as the engine counted them in `usage`."""

    text: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    #: The API's own end of stream was seen.
    is_complete: bool = False


class Dialect(Protocol):
    """One API."""

    path: str
    headers: Mapping[str, str]

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """The request that follows *replies*, with the whole history as an agent sends it."""

    def read(self, data: bytes, into: Reply) -> None:
        """Take what stands after `data: ` in one line of a streamed reply."""


class Chat:
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    headers: Mapping[str, str] = {"content-type": "application/json", "authorization": "Bearer demo"}

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """System prompt first, then what the user and the engine said in turn."""
        messages = [{"role": "system", "content": _system(session)}]
        for number, said in enumerate(_said(session, len(replies))):
            messages.append({"role": "user", "content": said})
            if number < len(replies):
                messages.append({"role": "assistant", "content": replies[number]})
        return orjson.dumps(
            {
                "model": MODEL,
                "messages": messages,
                "tools": [
                    {"type": "function", "function": {"name": name, "description": text, "parameters": _PARAMETERS}}
                    for name, text in _tools(session)
                ],
                "max_tokens": session.turns[len(replies)].output,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def read(self, data: bytes, into: Reply) -> None:
        """A chunk: text, or usage at the end; an error has neither."""
        if data == b"[DONE]":
            into.is_complete = True
            return
        chunk = orjson.loads(data)
        for choice in chunk.get("choices", ()):
            into.text.append(choice["delta"].get("content") or "")
        if usage := chunk.get("usage"):
            into.prompt_tokens = usage["prompt_tokens"]
            into.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Messages:
    """`/v1/messages` as Claude Code uses it: a billing header that always changes, cache marks that move."""

    path = "/v1/messages?beta=true"
    headers: Mapping[str, str] = {
        "content-type": "application/json",
        "anthropic-version": "2023-06-01",
        "x-api-key": "demo",
    }

    def body(self, session: Session, replies: Sequence[str]) -> bytes:
        """The mark is on the system prompt and on the last message."""
        mark = {"cache_control": {"type": "ephemeral"}}
        messages: list[dict[str, Any]] = []
        for number, said in enumerate(_said(session, len(replies))):
            last = number == len(replies)
            messages.append({"role": "user", "content": [{"type": "text", "text": said, **(mark if last else {})}]})
            if not last:
                messages.append({"role": "assistant", "content": [{"type": "text", "text": replies[number]}]})
        checksum = xxh32_intdigest(f"{session.id} {len(replies)}".encode()) & 0xFFFFF
        billing = f"x-anthropic-billing-header: cc_version=2.1.0; cch={checksum:05x};"
        return orjson.dumps(
            {
                "model": MODEL,
                "system": [{"type": "text", "text": billing}, {"type": "text", "text": _system(session), **mark}],
                "messages": messages,
                "tools": [
                    {"name": name, "description": text, "input_schema": _PARAMETERS} for name, text in _tools(session)
                ],
                "max_tokens": session.turns[len(replies)].output,
                "ignore_eos": True,
                "stream": True,
            }
        )

    def read(self, data: bytes, into: Reply) -> None:
        """An event: text, usage at the end, or the end."""
        event = orjson.loads(data)
        match event["type"]:
            case "content_block_delta":
                into.text.append(event["delta"]["text"])
            case "message_delta":
                usage = event["usage"]
                cached = usage.get("cache_read_input_tokens") or 0
                created = usage.get("cache_creation_input_tokens") or 0
                into.prompt_tokens = usage["input_tokens"] + created + cached
                into.cached_tokens = cached
            case "message_stop":
                into.is_complete = True


_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _filler(key: str, tokens: int) -> str:
    return reply.text(xxh3_64_intdigest(key.encode()), max(0, tokens))


def _said(session: Session, replies: int) -> list[str]:
    """What the user or a tool said before each reply, and after the last one."""
    turns = session.turns[: replies + 1]
    return [_filler(f"{session.id} {number}", turn.new) for number, turn in enumerate(turns)]


def _system(session: Session) -> str:
    return _filler(f"system {session.tools} {session.system}", session.system)


def _tools(session: Session) -> list[tuple[str, str]]:
    """Names and descriptions, which together with their schemas have about the recorded length."""
    schema = tokenizer.count(tokenizer.encode(orjson.dumps(_PARAMETERS).decode())) + 20
    each = session.tools // len(_TOOLS) - schema
    return [(name, _filler(f"tool {name} {session.tools}", each)) for name in _TOOLS]

"""Trace of the traffic."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import structlog

from smetric.fleet.exchange import Exchange, Listener
from smetric.records.writer import Writer
from smetric.request.parts import Kind
from smetric.request.prompt import BLOCK_BYTES
from smetric.request.request import Api

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord
    from smetric.request.request import InferenceRequest


# What made a client send a request: a person, an agent that has run its tools, or the compaction of a session.
#
# Judged by the last message alone (the paper's Figure 7 tells the same three apart). Its text is looked at and not
# kept.

#: With what agents ask for a summary of the session: Claude Code and Cline, Codex, OpenCode, Gemini CLI.
_COMPACTIONS = (
    b"create a detailed summary of the conversation",
    b"CONTEXT CHECKPOINT COMPACTION",
    b"detailed prompt for continuing our conversation",
    b"<state_snapshot>",
)


class Trigger(enum.Enum):
    """Who or what sent a request."""

    USER = "user"
    #: The results of tools came back.
    AGENT = "agent"
    #: The agent has its context summarised.
    COMPACTION = "compaction"


def trigger_of(last: Iterable[tuple[Kind, bytes]]) -> Trigger:
    """What *last*, the parts of a request's last message with the beginning of each one's text, was sent for."""
    trigger = Trigger.USER
    for kind, text in last:
        if kind is Kind.TOOL_RESULT:
            trigger = Trigger.AGENT
        elif any(phrase in text for phrase in _COMPACTIONS):
            return Trigger.COMPACTION
    return trigger


# A trace of the traffic itself, for studies and simulators: what the paper's section 3 collected of each request.
#
# Prompts appear as chained hashes of their blocks, sessions as a hash; both are keyed with a secret that this process
# alone has, so that they can be compared with each other and with nothing else. Field names are those of public traces
# where they mean the same: Mooncake's (`timestamp`, `input_length`, `output_length`, `hash_ids`) and Bailian's
# (`chat_id`, `parent_chat_id`, `turn`).

#: Rendered bytes of a block of the trace: about 512 tokens, the blocks of Mooncake's traces.
TRACE_BLOCK_BYTES = 2 * BLOCK_BYTES
#: Requests remembered so that a later one is known to follow them.
MOST_PARENTS = 65_536
#: Hashes kept, so that what a follow-up repeats is not hashed again.
_MOST_HASHES = 1 << 16
_encode = msgspec.json.Encoder().encode

log = structlog.get_logger("smetric.records")


class TrafficLine(msgspec.Struct, kw_only=True):
    """One request.

    Args:
        timestamp: its arrival, milliseconds since that of the first request that this process decided; less than 0
            where its body took longer.
        unix_ms: the same since 1970.
        input_length: tokens of the prompt, as the instance counted them, else as the router did.
        output_length: tokens generated; None for a stream without usage, which clients ask for by
            `stream_options: {"include_usage": true}`.
        hash_ids: one for each full block of the prompt, each covering all before it: equal ids, equal beginnings.
        block_tokens: tokens of a block: 2,048 rendered bytes, about 512.
        chat_id: the id of its decision, as in traces and the record of decisions.
        parent_chat_id: the request that it follows, by its history, else by its session's header; None where there is
            none or it is not known.
        session: hash of the session, that of the client's header or that of the first request.
        turn: assistant turns in the carried history.
        trigger: `user`, `agent` (tools' results came back) or `compaction` (the agent has its context summarised), by
            the last message.
        api: the wire format.
        model: hash of the model asked for.
        instance: where it was served; None for nowhere.
        status: what the client was sent; 200 also for a stream that broke off.
        error_type: what went wrong; empty for nothing.
        ttft_ms: milliseconds from arrival to the first byte of the answer; None where there was none.
        duration_ms: milliseconds from arrival to its end.
        cached_tokens: prompt tokens the instance says it had cached; None where it did not say.
    """

    timestamp: int
    unix_ms: int
    input_length: int
    output_length: int | None
    hash_ids: list[int]
    block_tokens: int
    chat_id: str
    parent_chat_id: str | None
    session: str
    turn: int | None
    trigger: str
    api: str
    model: str
    instance: str | None
    status: int | None
    error_type: str
    ttft_ms: float | None
    duration_ms: float | None
    cached_tokens: int | None


class _Glance(msgspec.Struct):
    """What is taken of a prompt while its text is there."""

    hash_ids: list[int]
    block_tokens: int
    whole: int
    question: int
    trigger: Trigger


class Traffic(Listener):
    """Writes one line for each inference request.

    Args:
        writer: where to.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._secret = os.urandom(32)
        self._first_ms = 0  # not that of the first line: lines stand in the order in which requests end
        #: By the identity of the request, from its first decision to its end.
        self._glances: dict[int, _Glance] = {}
        #: A whole prompt's hash, or a session's, to the last request with it: its id and its session.
        self._followed: OrderedDict[int | str, tuple[str, str]] = OrderedDict()
        self._hash_id = lru_cache(_MOST_HASHES)(self._keyed)

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Look at the prompt of a request decided for the first time, as soon as it has been sent."""
        if exchange.previous is not None or not record.is_inference:
            return
        request, arrival_ns = record.request, exchange.arrival_ns
        if not self._first_ms:
            self._first_ms = arrival_ns // 1_000_000
        if request.prompt is not None and request.api is not Api.OTHER:
            asyncio.get_running_loop().call_soon(self._look, request)

    def _look(self, request: InferenceRequest) -> None:
        prompt = request.prompt
        if prompt is None or request.body is None:
            return  # it ended, or was answered, in the same tick
        hashes = prompt.hashes
        self._glances[id(request)] = _Glance(
            [self._hash_id(block) for block in hashes.blocks[1::2]],
            prompt.tokens(TRACE_BLOCK_BYTES),
            hashes.whole,
            hashes.question,
            trigger_of(prompt.last_message()),
        )

    def ended(self, exchange: Exchange) -> None:
        """Write the line of a request whose prompt was looked at."""
        record = exchange.record
        glance = self._glances.pop(id(record.request), None) if record is not None else None
        if record is None or glance is None:
            return
        try:
            line = self._line(record, glance, exchange.arrival_ns)
        except Exception:  # a request must not fail because it cannot be recorded
            if (kept_back := self._writer.spoilt()) is not None:
                log.exception("smetric.record.failed", record="trace", kept_back=kept_back)
            return
        self._writer.put(0, b"", line)

    def _line(self, record: DecisionRecord, glance: _Glance, arrival_ns: int) -> bytes:
        request, usage = record.request, record.usage
        unix_ms = arrival_ns // 1_000_000
        parent, session = self._place(record, glance)
        line = TrafficLine(
            timestamp=unix_ms - self._first_ms,
            unix_ms=unix_ms,
            input_length=(usage.prompt_tokens if usage is not None else None) or request.prompt_len,
            output_length=usage.completion_tokens if usage is not None else None,
            hash_ids=glance.hash_ids,
            block_tokens=glance.block_tokens,
            chat_id=record.id,
            parent_chat_id=parent,
            session=session,
            turn=request.turn,
            trigger=glance.trigger.value,
            api=request.api.value,
            model=self._name(f"model {request.model}"),
            instance=record.instance.id if record.instance is not None else None,
            status=record.status,
            error_type=record.error_type,
            ttft_ms=_ms(record.ttft_s),
            duration_ms=_ms(record.duration_s),
            cached_tokens=usage.cached_tokens if usage is not None else None,
        )
        return _encode(line) + b"\n"

    def _place(self, record: DecisionRecord, glance: _Glance) -> tuple[str | None, str]:
        """The request that this one follows, and the session of both.

        It follows the one whose whole prompt is its own up to the last assistant turn; where a client has edited its
        history, the last one of the session that a header names.
        """
        named = self._name(f"session {record.request.session}") if record.request.session else ""
        found = self._followed.get(glance.question) if glance.question else None
        if found is None and named and record.request.turn:
            found = self._followed.get(named)
        parent, session = found if found is not None else (None, "")
        session = named or session or self._name(f"request {record.id}")
        for key in (glance.whole, session):
            self._followed[key] = record.id, session
            self._followed.move_to_end(key)
        while len(self._followed) > 2 * MOST_PARENTS:
            self._followed.popitem(last=False)
        return parent, session

    def _keyed(self, block: int) -> int:
        """The id of a block's hash: 53 bits, which every reader of JSON holds exactly."""
        digest = hashlib.blake2b(block.to_bytes(8, "big"), key=self._secret, digest_size=7).digest()
        return int.from_bytes(digest, "big") >> 3

    def _name(self, text: str) -> str:
        return hashlib.blake2b(text.encode(errors="replace"), key=self._secret, digest_size=8).hexdigest()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)

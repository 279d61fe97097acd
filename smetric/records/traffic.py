"""Trace of the traffic, for studies and simulators: the data of the paper's section 3 for each request.

Prompts appear as chained hashes of their blocks, sessions as a hash. Both are keyed with a secret of this process, so
they can be compared with each other and with nothing else. Field names are those of public traces where they mean the
same: Mooncake's (`timestamp`, `input_length`, `output_length`, `hash_ids`) and Bailian's (`chat_id`, `parent_chat_id`,
`turn`).
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import os
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import structlog
from cachetools import LRUCache

from smetric.fleet.exchange import Exchange, Listener
from smetric.records.writer import Writer
from smetric.request.prompt import BLOCK_BYTES, PartKind
from smetric.request.request import Api

if TYPE_CHECKING:
    from smetric.fleet.record import DecisionRecord
    from smetric.request.request import InferenceRequest


#: Phrases of agents that ask for a summary of the session: Claude Code and Cline, Codex, OpenCode, Gemini CLI.
_COMPACTIONS = (
    b"create a detailed summary of the conversation",
    b"CONTEXT CHECKPOINT COMPACTION",
    b"detailed prompt for continuing our conversation",
    b"<state_snapshot>",
)


class Trigger(enum.Enum):
    """Cause of a request, judged by its last message (the classes of the paper's Figure 7). Its text is not kept."""

    USER = "user"
    #: An agent returns the results of tools.
    AGENT = "agent"
    #: An agent asks for a summary of its context.
    COMPACTION = "compaction"


def trigger_of(last: Iterable[tuple[PartKind, bytes]]) -> Trigger:
    """Return the cause of a request from *last*: the parts of its last message with the beginning of each text."""
    trigger = Trigger.USER
    for kind, text in last:
        if kind is PartKind.TOOL_RESULT:
            trigger = Trigger.AGENT
        elif any(phrase in text for phrase in _COMPACTIONS):
            return Trigger.COMPACTION
    return trigger


#: Rendered bytes of a block of the trace: about 512 tokens, the blocks of Mooncake's traces.
TRACE_BLOCK_BYTES = 2 * BLOCK_BYTES
#: Requests that are remembered as possible parents.
MOST_PARENTS = 65_536
#: Block ids that are cached.
_MOST_HASHES = 1 << 16
_encode = msgspec.json.Encoder().encode

log = structlog.get_logger("smetric.records")


class TrafficLine(msgspec.Struct, kw_only=True):
    """One request.

    Args:
        timestamp: arrival, milliseconds after the first request that this process decided; below 0 if that one's body
            took longer.
        unix_ms: arrival since 1970.
        input_length: prompt tokens as the instance counted them, else as the router estimated them.
        output_length: generated tokens; None for a stream without usage, which clients ask for by
            `stream_options: {"include_usage": true}`.
        hash_ids: one for each full block of the prompt, each covering all before it: equal ids, equal beginnings.
        block_tokens: tokens of a block: 2,048 rendered bytes, about 512.
        chat_id: id of its decision, as in traces and the record of decisions.
        parent_chat_id: the request that it follows, by its history, else by its session header; None if there is none
            or it is unknown.
        session: hash of the session: that of the client's header, else that of the first request.
        turn: assistant turns in the carried history.
        trigger: `user`, `agent` (results of tools) or `compaction` (a summary of the context), by the last message.
        api: wire format.
        model: hash of the requested model.
        instance: where it was served, or None.
        status: the client's status; 200 also for a broken stream.
        error_type: empty without an error.
        ttft_ms: milliseconds from arrival to the first output of the answer; None without one.
        duration_ms: milliseconds from arrival to its end.
        cached_tokens: cached prompt tokens as the instance reported them, or None.
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
    """What is kept of a prompt while its text is available."""

    hash_ids: list[int]
    block_tokens: int
    whole: int
    question: int
    trigger: Trigger


class Traffic(Listener):
    """Listener that writes one line per inference request.

    Args:
        writer: receiver of the lines.
        most_parents: requests that are remembered as possible parents.
    """

    def __init__(self, writer: Writer, *, most_parents: int = MOST_PARENTS) -> None:
        self._writer = writer
        self._secret = os.urandom(32)
        self._first_ms = 0  # not of the first line: lines are in the order in which requests end
        #: By the identity of the request, from its first decision to its end.
        self._glances: dict[int, _Glance] = {}
        #: Hash of a whole prompt, or of a session, to id and session of the last request with it.
        self._followed: LRUCache[int | str, tuple[str, str]] = LRUCache(2 * most_parents)
        self._hash_id = lru_cache(_MOST_HASHES)(self._keyed)

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """Read the prompt of a new request, as soon as it has been sent."""
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
            return  # it has ended, or was answered, in the same tick
        hashes = prompt.hashes
        self._glances[id(request)] = _Glance(
            [self._hash_id(block) for block in hashes.blocks[1::2]],
            prompt.tokens(TRACE_BLOCK_BYTES),
            hashes.whole,
            hashes.question,
            trigger_of(prompt.last_message()),
        )

    def ended(self, exchange: Exchange) -> None:
        """Write the line of a request whose prompt was read."""
        record = exchange.record
        glance = self._glances.pop(id(record.request), None) if record is not None else None
        if record is None or glance is None:
            return
        try:
            line = self._line(record, glance, exchange.arrival_ns)
        except Exception:  # a request must not fail because its line cannot be made
            if (kept_back := self._writer.record_failure()) is not None:
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
        """Return the request that this one follows, and the session of both.

        It follows the request whose whole prompt is its own up to the last assistant turn. If a client has edited its
        history, it follows the last request of the session in its header.
        """
        named = self._name(f"session {record.request.session}") if record.request.session else ""
        found = self._followed.get(glance.question) if glance.question else None
        if found is None and named and record.request.turn:
            found = self._followed.get(named)
        parent, session = found if found is not None else (None, "")
        session = named or session or self._name(f"request {record.id}")
        for key in (glance.whole, session):
            self._followed[key] = record.id, session
        return parent, session

    def _keyed(self, block: int) -> int:
        """Return the id of a block: 53 bits, which every JSON reader holds exactly."""
        digest = hashlib.blake2b(block.to_bytes(8, "big"), key=self._secret, digest_size=7).digest()
        return int.from_bytes(digest, "big") >> 3

    def _name(self, text: str) -> str:
        return hashlib.blake2b(text.encode(errors="replace"), key=self._secret, digest_size=8).hexdigest()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)

"""Answer of an instance on its way to the client."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, TypeAlias

import msgspec

from smetric.errors import UNREADABLE, HttpError, UpstreamError
from smetric.fleet.exchange import Attempt, Exchange
from smetric.fleet.health import AttemptLog
from smetric.fleet.instance import Lease
from smetric.fleet.record import DecisionRecord
from smetric.http.answer import Answer, AnswerBroken
from smetric.http.headers import Scope, first, response_headers
from smetric.proxy.client import Client
from smetric.proxy.context import ProxyContext
from smetric.proxy.error_response import error_event
from smetric.request.request import Api, Usage

# What is learnt from an answer while its bytes pass: whether it is whole, its usage, its response id.
#
# Bounded and lossy on purpose: a few kilobytes of the head and the tail are looked at, nothing is decoded on the way.

#: Bytes of the tail in which usage is looked for (sometimes a few more), and of the head in which the response id is.
TAIL_BYTES = 4096
HEAD_BYTES = 1024

_DONE = re.compile(rb"\ndata: ?\[DONE\]")
#: The lines that end a stream of each API, or the engine's own error. They begin with a line break, which no text of a
#: model can hold: JSON escapes it.
END_MARKERS: dict[Api, re.Pattern[bytes]] = {
    Api.CHAT: _DONE,
    Api.COMPLETIONS: _DONE,
    Api.MESSAGES: re.compile(rb"\nevent: ?(?:message_stop|error)"),
    Api.RESPONSES: re.compile(rb"\nevent: ?(?:response\.(?:completed|incomplete|failed)|error)"),
}
#: No end marker is longer.
_OVERLAP = 32
#: Where an engine's error is an event like any other, this is how it begins.
ENGINE_ERROR = (b'\ndata: {"error":', b'\ndata:{"error":')
#: How an engine that is told to stop ends what it was generating. No text of a model can hold it: JSON escapes quotes.
ABORTED = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')
#: The APIs whose answers have an id that nobody refers to.
_NEVER_REFERRED_TO = frozenset({Api.CHAT, Api.COMPLETIONS, Api.MESSAGES})
#: Why an answer ended, as each API says it; what it says is a word.
_REASON = re.compile(rb'"(?:finish_reason|stop_reason)": ?"([a-z_]{1,32})"')
_RESPONSE_STATUS = re.compile(rb'"status": ?"(completed|incomplete|failed|cancelled)"')


#: Tokens, as an instance counts them: counters never fall, and what no engine holds is no count.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None


class _Details(msgspec.Struct):
    cached_tokens: _Count = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode


class Observer:
    """Watches one answer pass.

    Args:
        api: decides what marks the end of a stream.
        is_stream: the answer is a stream of events.
    """

    __slots__ = ("_api", "_head", "_marker", "_tail", "ended", "events", "is_stream", "size")

    def __init__(self, api: Api, is_stream: bool) -> None:
        self._api = api
        #: The answer is a stream of events.
        self.is_stream = is_stream
        self._marker = END_MARKERS.get(api) if is_stream else None
        self._head = b""
        #: A stream begins as if an event had ended.
        self._tail = bytearray(b"\n\n")
        #: The stream's own end mark has passed; True for what has none.
        self.ended = self._marker is None
        #: Bytes passed, and ends of events among them.
        self.size = 0
        self.events = 0

    def passed(self, piece: bytes) -> None:
        """*piece* is on its way to the client."""
        size = self.size
        self.size = size + len(piece)
        if size < HEAD_BYTES:
            self._head += piece[: HEAD_BYTES - size]
        tail = self._tail
        before = len(tail)
        tail += piece
        if self.is_stream:
            self.events += tail.count(b"\n\n", before - 1)
        if not self.ended and self._marker is not None:
            self.ended = self._marker.search(tail, before - _OVERLAP) is not None  # from 0 if that is less
        if len(tail) > TAIL_BYTES + HEAD_BYTES:
            del tail[:-TAIL_BYTES]

    @property
    def is_past_mark(self) -> bool:
        """The stream has an end mark, and it has passed."""
        return self.ended and self._marker is not None

    @property
    def is_within_event(self) -> bool:
        """What has passed ends in the middle of an event."""
        return not self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    @property
    def is_engine_error(self) -> bool:
        """The stream's tail holds the engine's own error event."""
        return any(marker in self._tail for marker in ENGINE_ERROR)

    def is_aborted(self) -> bool:
        """The engine ended the answer before its end; the client did not ask for that."""
        find = self._tail.find  # `in` costs ten times as much
        return find(b'"abort"') >= 0 and any(find(each) >= 0 for each in ABORTED)

    def usage(self) -> Usage | None:
        """The last usage object seen, or None."""
        found = self._whole_usage() or _last_usage(self._tail) or (_last_usage(self._head) if self.is_stream else None)
        if found is None:
            return None
        details = found.prompt_tokens_details or found.input_tokens_details
        cached = details.cached_tokens if details is not None else found.cache_read_input_tokens
        if found.prompt_tokens is not None:
            return Usage(found.prompt_tokens, found.completion_tokens, cached)
        prompt = found.input_tokens
        if prompt is not None and self._api is Api.MESSAGES:
            # Anthropic counts cached tokens apart, OpenAI within.
            prompt += (found.cache_read_input_tokens or 0) + (found.cache_creation_input_tokens or 0)
        return Usage(prompt, found.output_tokens, cached)

    def _whole_usage(self) -> _Usage | None:
        """That of a short answer that is one object: to read it all is less work than to look for a part of it."""
        if self.is_stream or self.size > len(self._tail) - 2:  # which begins with two line breaks
            return None
        try:
            return _decode_whole(self._tail).usage
        except UNREADABLE:
            return None

    def finish_reason(self) -> str:
        """Why the instance ended its answer, e.g. `stop`, `length`, `end_turn`; empty where it did not say."""
        pattern = _RESPONSE_STATUS if self._api is Api.RESPONSES else _REASON
        found = pattern.findall(self._tail)
        return found[-1].decode() if found else ""

    def response_id(self) -> str:
        """The id of a Responses API answer, or empty."""
        if self._api in _NEVER_REFERRED_TO:
            return ""
        start = self._head.find(b'"id":"resp_')
        if start < 0:
            return ""
        end = self._head.find(b'"', start + 6)
        return self._head[start + 6 : end].decode("ascii", "replace") if 0 < end - start <= 200 else ""


def _last_usage(text: bytes | bytearray) -> _Usage | None:
    at = len(text)
    while (at := text.rfind(b'"usage":', 0, at)) >= 0:
        end = _object_end(text, at + 8)
        if end:
            try:
                return _decode_usage(text[at + 8 : end])
            except msgspec.DecodeError:
                continue
    return None


def _object_end(text: bytes | bytearray, start: int) -> int:
    """The end of the object that begins at *start*; 0 if it is not whole, or holds what no usage object does.

    It may hold objects, but none of them another, and no braces in strings.
    """
    depth = 0
    while close := text.find(b"}", start) + 1:
        depth += text.count(b"{", start, close)
        if depth == 1:
            return close
        if depth != 2:
            return 0
        depth = 1
        start = close
    return 0


# One answer of an instance on its way to the client: passed on as it comes, watched, and learnt from at its end.
#
# Which instance it comes from, and whether another is tried instead, is `forward.py`'s.


class Delivery:
    """One answer, from its first byte on.

    Args:
        plane: what all requests share.
        scope: the client's request, as ASGI has it.
        exchange: what telemetry sees of it.
        client: where the answer goes.
        lease: the charge on the instance.
        attempt: the answer's own telemetry.
        answer: its head has come.
        trial: what the request says of instances.
        record: the decision that led here, with the request as the router has it.
    """

    __slots__ = (
        "_answer",
        "_attempt",
        "_client",
        "_exchange",
        "_headers",
        "_is_compressed",
        "_is_stream",
        "_lease",
        "_plane",
        "_record",
        "_scope",
        "_trial",
        "observer",
    )

    def __init__(
        self,
        plane: ProxyContext,
        scope: Scope,
        exchange: Exchange,
        client: Client,
        lease: Lease,
        attempt: Attempt,
        answer: Answer,
        trial: AttemptLog,
        record: DecisionRecord,
    ) -> None:
        self._plane = plane
        self._scope = scope
        self._exchange = exchange
        self._client = client
        self._lease = lease
        self._attempt = attempt
        self._answer = answer
        self._trial = trial
        self._record = record
        self._headers = response_headers(answer.headers)
        self._is_stream = (first(self._headers, b"content-type") or b"").lower().startswith(b"text/event-stream")
        #: The client asked for it; nothing of it can be read here, nor added to it.
        self._is_compressed = (first(self._headers, b"content-encoding") or b"identity").lower() != b"identity"
        #: What passes.
        self.observer = Observer(
            record.request.api, self._is_stream and answer.status == 200 and not self._is_compressed
        )
        lease.answer = self.observer

    async def run(self, held: bytes) -> None:
        """Pass on what is *held* of the answer and what is still to come."""
        answer, client, deadlines = self._answer, self._client, self._plane.deadlines
        watchdog = client.watchdog
        observer, is_inference = self.observer, self._record.is_inference
        headers = self._headers
        if self._is_stream:
            headers.append((b"x-accel-buffering", b"no"))
        headers += self._plane.receipt(self._record)
        # A write costs more than all else here: the head goes with the first piece if that has come too, and the last
        # piece with the end where it is known to be the last.
        has_begun, is_sent = bool(held) or not answer.pieces, False
        try:
            if has_begun:
                observer.passed(held)
                if client.begin(answer.status, headers, held):
                    await client.drained()
            if not answer.pieces:
                watchdog.arm(deadlines.first_byte_s, "first_byte")
            while not is_sent and (piece := answer.take() if answer.pieces else await answer.read()):
                is_first = not observer.size
                observer.passed(piece)
                if is_sent := observer.ended and answer.is_done:  # *piece* was all there was
                    self._lease.release()  # the engine has ended, however long the client takes to read
                if is_first:
                    ttfc_s = self._attempt.first_byte()
                    self._lease.first_byte()
                    if is_inference and observer.is_stream and not self._lease.is_past:
                        self._trial.waited(self._lease, ttfc_s)
                        self._plane.router.first_token(self._lease, ttfc_s)
                if has_begun:
                    is_full = client.pass_on(piece, is_last=is_sent)
                else:
                    has_begun = True
                    is_full = client.begin(answer.status, headers, piece, is_last=is_sent)
                if is_full:
                    await client.drained()
                if is_first and answer.status == 200 and is_inference:
                    if not self._lease.is_past:
                        self._plane.router.prefilled(self._record.request, self._lease.instance)
                    self._record.request.answering()
                    self._exchange.answering()
                if not is_sent:
                    watchdog.arm(deadlines.idle_s, "idle")
        except AnswerBroken:
            await self._break_off("closed")
            return
        except asyncio.CancelledError:
            if watchdog.expired not in ("first_byte", "idle"):
                raise
            watchdog.resume()
            await self._break_off("timeout")
            return
        if not (observer.ended or observer.is_engine_error):
            await self._break_off("closed")
            return
        answer.finish()
        self._lease.release()
        if not is_sent and client.pass_on(b"", is_last=True):
            await client.drained()
        self._settle()

    def _settle(self) -> None:
        """The answer is complete: learn from it."""
        plane, observer, record, request = self._plane, self.observer, self._record, self._record.request
        status, lease = self._answer.status, self._lease
        usage = observer.usage() if status == 200 else None
        if observer.is_aborted():
            self._trial.aborted(lease)
        prompt = request.prompt
        if prompt is not None and not prompt.counted and request.prompts == 1 and usage is not None:
            plane.tokens.learn(request.model, prompt.size, usage.prompt_tokens or 0)
        response_id = observer.response_id()
        if response_id:  # also of a process that seems gone: it may be new, and asked before it was seen to be
            plane.router.pin(response_id, lease.instance)
        if status == 200 and record.is_inference and not lease.is_past:
            plane.router.settled(request, lease.instance, usage)
            plane.caches.answered(record, usage, self._scope["headers"])
        reason = observer.finish_reason() if self._attempt.is_recorded and status == 200 else ""
        self._attempt.end("5xx" if status >= 500 else "ok", status=status, usage=usage, finish_reason=reason)
        self._exchange.end(status, bytes_out=observer.size, events=observer.events, usage=usage)

    async def _break_off(self, result: str) -> None:
        """The answer ended early and the client has seen some of it.

        Returning without a last piece makes the server close the connection.
        """
        self._answer.close()
        self._attempt.end(result, status=self._answer.status)
        self._exchange.end(self._answer.status, bytes_out=self.observer.size, error_type=f"upstream_{result}")
        await self.tell(UpstreamError("the instance broke off its answer", reason=result))

    async def tell(self, error: HttpError) -> None:
        """Add *error* to the stream as its last event, where it is one that can be read and does not look whole then.

        One of an announced length has room for less than it lacks. Behind part of another event there is none: clients
        would read that part as an event, and fail at its JSON, where they know what a connection's early end is.
        """
        observer = self.observer
        has_ended = observer.is_past_mark or (observer.ended and self._answer.is_whole)
        if self._is_stream and not (self._is_compressed or has_ended or observer.is_within_event):
            event = error_event(self._scope["path"], error)
            length = first(self._headers, b"content-length")
            if (length is None or observer.size + len(event) < int(length)) and self._client.pass_on(event):
                await self._client.drained()

"""Answer of an instance on its way to the client.

Its bytes pass untouched. Which instance it comes from, and whether another one is tried instead, is in `forward.py`.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec

from smetric.errors import UNREADABLE, HttpError, UpstreamError
from smetric.fleet.exchange import Attempt, Exchange
from smetric.fleet.health import AttemptLog
from smetric.fleet.instance import Lease
from smetric.fleet.record import DecisionRecord
from smetric.http.answer import AnswerBroken, UpstreamResponse
from smetric.http.headers import Headers, Scope, first, response_headers
from smetric.proxy.context import ProxyContext
from smetric.proxy.error_response import error_event
from smetric.proxy.intake import Client
from smetric.request.request import Api, Usage

#: Bytes of the tail in which usage is searched (sometimes a few more), and of the head in which the response id is.
TAIL_BYTES = 4096
HEAD_BYTES = 1024

_DONE = re.compile(rb"\ndata: ?\[DONE\]")
#: Lines that end a stream of each API, with the engine's own error. They begin with a line break, which the text of a
#: model cannot contain, as JSON escapes it.
END_MARKERS: dict[Api, re.Pattern[bytes]] = {
    Api.CHAT: _DONE,
    Api.COMPLETIONS: _DONE,
    Api.MESSAGES: re.compile(rb"\nevent: ?(?:message_stop|error)"),
    Api.RESPONSES: re.compile(rb"\nevent: ?(?:response\.(?:completed|incomplete|failed)|error)"),
}
#: Upper bound on the length of an end marker.
_OVERLAP = 32
#: Beginnings of an engine's error where it is an event like any other.
ENGINE_ERROR = (b'\ndata: {"error":', b'\ndata:{"error":')
#: End of an answer that the engine aborted as it stops. The text of a model cannot contain it, as JSON escapes quotes.
ABORTED = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')
#: APIs whose answers have an id that later requests cannot refer to.
_WITHOUT_REFERENCES = frozenset({Api.CHAT, Api.COMPLETIONS, Api.MESSAGES})
#: Finish reason of an answer in each API: one word.
_REASON = re.compile(rb'"(?:finish_reason|stop_reason)": ?"([a-z_]{1,32})"')
_RESPONSE_STATUS = re.compile(rb'"status": ?"(completed|incomplete|failed|cancelled)"')

#: Number of tokens as an instance counts them. A number larger than any engine can hold is invalid.
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


class AnswerObserver:
    """Observer of an answer as its bytes pass: whether it is complete, its usage, its response id.

    It looks at a few kilobytes of the head and of the tail, and decodes nothing until the end.

    Args:
        api: determines the end marker of a stream.
        is_stream: the answer is a stream of events.
    """

    __slots__ = ("_api", "_head", "_marker", "_tail", "ended", "events", "is_stream", "size")

    def __init__(self, api: Api, is_stream: bool) -> None:
        self._api = api
        self.is_stream = is_stream
        self._marker = END_MARKERS.get(api) if is_stream else None
        self._head = b""
        #: An event marker at the beginning of a stream is preceded by line breaks too.
        self._tail = bytearray(b"\n\n")
        #: The end marker has passed; True for an answer without one.
        self.ended = self._marker is None
        #: Number of bytes passed, and of the ends of events in them.
        self.size = 0
        self.events = 0

    def passed(self, piece: bytes) -> None:
        """Look at *piece*, which goes to the client."""
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
        """The stream has an end marker, and it has passed."""
        return self.ended and self._marker is not None

    @property
    def is_within_event(self) -> bool:
        """The bytes that have passed end in the middle of an event."""
        return not self._tail.endswith((b"\n\n", b"\r\n\r\n"))

    @property
    def is_engine_error(self) -> bool:
        """The tail of the stream contains the engine's own error event."""
        return any(marker in self._tail for marker in ENGINE_ERROR)

    def is_aborted(self) -> bool:
        """Return whether the engine aborted the answer, which the client had not asked for."""
        find = self._tail.find  # `in` takes ten times as long
        return find(b'"abort"') >= 0 and any(find(each) >= 0 for each in ABORTED)

    def usage(self) -> Usage | None:
        """Return the last usage object, or None."""
        found = self._whole_usage() or _last_usage(self._tail) or (_last_usage(self._head) if self.is_stream else None)
        if found is None:
            return None
        details = found.prompt_tokens_details or found.input_tokens_details
        cached = details.cached_tokens if details is not None else found.cache_read_input_tokens
        if found.prompt_tokens is not None:
            return Usage(found.prompt_tokens, found.completion_tokens, cached)
        prompt = found.input_tokens
        if prompt is not None and self._api is Api.MESSAGES:
            # Anthropic counts cached tokens beside `input_tokens`, OpenAI within them.
            prompt += (found.cache_read_input_tokens or 0) + (found.cache_creation_input_tokens or 0)
        return Usage(prompt, found.output_tokens, cached)

    def _whole_usage(self) -> _Usage | None:
        """Return the usage of a short answer that is one object: decoding it takes less time than a search."""
        if self.is_stream or self.size > len(self._tail) - 2:  # the tail begins with two line breaks
            return None
        try:
            return _decode_whole(self._tail).usage
        except UNREADABLE:
            return None

    def finish_reason(self) -> str:
        """Return the finish reason, e.g. `stop`, `length`, `end_turn`; empty if the answer has none."""
        pattern = _RESPONSE_STATUS if self._api is Api.RESPONSES else _REASON
        found = pattern.findall(self._tail)
        return found[-1].decode() if found else ""

    def response_id(self) -> str:
        """Return the id of an answer of the Responses API, or an empty text."""
        if self._api in _WITHOUT_REFERENCES:
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
    """Return the end of the object that begins at *start*; 0 if it is incomplete or cannot be a usage object.

    A usage object contains objects of one more level at most, and no braces in strings.
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


@dataclass(slots=True, eq=False)
class Delivery:
    """Answer of an instance on its way to the client: passed on as it arrives, observed, and learnt from at its end.

    Args:
        context: shared context of all requests.
        scope: ASGI scope of the client's request.
        exchange: telemetry of the request.
        client: gets the answer.
        lease: charge on the instance.
        attempt: telemetry of the attempt.
        answer: its head has arrived.
        trial: reports to health checking.
        record: the decision that led here.
        headers: header fields that the client gets.
        is_stream: it is a stream of events.
        is_compressed: its bytes cannot be read, nor can an event be added.
        has_begun: the head has been sent.
        is_sent: the last piece has been sent as such.
        observer: observes its bytes.
    """

    context: ProxyContext
    scope: Scope
    exchange: Exchange
    client: Client
    lease: Lease
    attempt: Attempt
    answer: UpstreamResponse
    trial: AttemptLog
    record: DecisionRecord
    headers: Headers = field(init=False)
    is_stream: bool = field(init=False)
    is_compressed: bool = field(init=False)
    has_begun: bool = field(default=False, init=False)
    is_sent: bool = field(default=False, init=False)
    observer: AnswerObserver = field(init=False)

    def __post_init__(self) -> None:
        self.headers = headers = response_headers(self.answer.headers)
        self.is_stream = (first(headers, b"content-type") or b"").lower().startswith(b"text/event-stream")
        self.is_compressed = (first(headers, b"content-encoding") or b"identity").lower() != b"identity"
        headers += self.context.receipt(self.record)
        if self.is_stream:
            headers.append((b"x-accel-buffering", b"no"))
        is_readable_stream = self.is_stream and self.answer.status == 200 and not self.is_compressed
        self.observer = self.lease.answer = AnswerObserver(self.record.request.api, is_readable_stream)

    async def run(self, held: bytes) -> None:
        """Pass the answer on. *held* has been read of its body already."""
        answer, client, context, observer = self.answer, self.client, self.context, self.observer
        watchdog = client.watchdog
        try:
            # A write costs more than all else here: a head whose body has begun to arrive goes with the first piece.
            if held or not answer.pieces:
                observer.passed(held)
                if self._begin(held, is_last=False):
                    await client.drained()
                watchdog.arm(context.deadlines.first_byte_s, "first_byte")
            while not await answer.relay(self._pass):
                await client.drained()
                watchdog.arm(context.deadlines.idle_s, "idle")
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
        if not self.is_sent:
            self.lease.release()
            if client.pass_on(b"", is_last=True):
                await client.drained()
        self._settle()

    def _pass(self, piece: bytes) -> bool:
        """Pass *piece* on; return whether the client takes more now."""
        observer, client = self.observer, self.client
        is_first = not observer.size
        observer.passed(piece)
        self.is_sent = is_last = observer.ended and self.answer.is_done
        if is_last:
            self.lease.release()  # the engine is done, however long the client takes to read
        else:
            client.watchdog.arm(self.context.deadlines.idle_s, "idle")
        if not is_first:
            return not client.pass_on(piece, is_last=is_last)
        record, lease, router = self.record, self.lease, self.context.router
        is_current = not lease.is_past
        lease.first_byte()
        ttfc_s = self.attempt.first_byte()
        if is_current and record.is_inference and observer.is_stream:
            self.trial.waited(lease, ttfc_s)
            router.first_token(lease, ttfc_s)
        is_full = client.pass_on(piece, is_last=is_last) if self.has_begun else self._begin(piece, is_last=is_last)
        if record.is_inference and self.answer.status == 200:
            if is_current:
                router.prefilled(record.request, lease.instance)
            record.request.answering()
            self.exchange.answering()
        return not is_full

    def _begin(self, piece: bytes, *, is_last: bool) -> bool:
        """Send the head with *piece*; return whether to wait until the client has drained."""
        self.has_begun = True
        return self.client.begin(self.answer.status, self.headers, piece, is_last=is_last)

    def _settle(self) -> None:
        """Learn from the complete answer."""
        context, observer, record, request = self.context, self.observer, self.record, self.record.request
        status, lease = self.answer.status, self.lease
        usage = observer.usage() if status == 200 else None
        if observer.is_aborted():
            self.trial.aborted(lease)
        prompt = request.prompt
        if prompt is not None and not prompt.counted and request.prompts == 1 and usage is not None:
            context.tokens.learn(request.model, prompt.size, usage.prompt_tokens or 0)
        response_id = observer.response_id()
        if response_id:  # also of a process that seems gone: the request may have reached a new one before it was seen
            context.router.pin(response_id, lease.instance)
        if status == 200 and record.is_inference and not lease.is_past:
            context.router.settled(request, lease.instance, usage)
            context.caches.answered(record, usage, self.scope["headers"])
        reason = observer.finish_reason() if self.attempt.span is not None and status == 200 else ""
        self.attempt.end("5xx" if status >= 500 else "ok", status=status, usage=usage, finish_reason=reason)
        self.exchange.end(status, bytes_out=observer.size, events=observer.events, usage=usage)

    async def _break_off(self, result: str) -> None:
        """End an answer of which the client has seen the beginning. Without a last piece the server then closes."""
        self.answer.close()
        self.attempt.end(result, status=self.answer.status)
        self.exchange.end(self.answer.status, bytes_out=self.observer.size, error_type=f"upstream_{result}")
        await self.append_error(UpstreamError("the instance broke off its answer", reason=result))

    async def append_error(self, error: HttpError) -> None:
        """Append *error* to a readable stream as its last event, if the stream then still looks broken.

        A stream of an announced length must stay shorter than that. An event behind part of another one would make
        clients fail at its JSON, whereas they know what the early end of a connection means.
        """
        observer = self.observer
        has_ended = observer.is_past_mark or (observer.ended and self.answer.is_whole)
        if self.is_stream and not (self.is_compressed or has_ended or observer.is_within_event):
            event = error_event(self.scope["path"], error)
            length = first(self.headers, b"content-length")
            if (length is None or observer.size + len(event) < int(length)) and self.client.pass_on(event):
                await self.client.drained()

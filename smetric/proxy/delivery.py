"""Answer of an instance on its way to the client.

Its bytes pass untouched. Which instance it comes from, and whether another one is tried instead, is in `forward.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias, TypedDict

import msgspec

from smetric import names
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

#: Most bytes of an unfinished event, or of an answer in one piece, that are kept. Of a longer one the first
#: `HEAD_BYTES` and the last `OVERLAP_BYTES` are, so that whatever is looked for and is shorter than that is seen whole.
KEPT_BYTES = 16 * 1024
HEAD_BYTES = 256
OVERLAP_BYTES = 4096

#: Types of the last event of a stream, the engine's own error included.
_LAST: dict[Api, frozenset[str]] = {
    Api.CHAT: frozenset({"[DONE]"}),
    Api.COMPLETIONS: frozenset({"[DONE]"}),
    Api.MESSAGES: frozenset({"message_stop", "error"}),
    Api.RESPONSES: frozenset({"response.completed", "response.incomplete", "response.failed", "error"}),
}
#: Types of events that engines send before the prefill has ended, or at any time.
_WITHOUT_OUTPUT: dict[Api, re.Pattern[str]] = {
    Api.MESSAGES: re.compile(r"message_start|content_block_start|ping"),
    Api.RESPONSES: re.compile(r"response\..*(?:created|queued|in_progress|added)"),
}
_ERRORS = frozenset({"error", "response.failed"})
#: Types and codes of errors that are the request's own.
_REFUSALS = re.compile(r"(?i)invalid|bad_?request|not_?found|too_large")
_BOM = b"\xef\xbb\xbf"
_FIELD = re.compile(rb"^(event|data)(?:: ?(.*))?$", re.MULTILINE)
_EVENT = re.compile(rb"event: ?(.*)\n")
_TYPE = re.compile(rb'"type": ?"((?:response\.|message_|content_block_|ping|error)[a-z_.]*)"')
_RESPONSE_ID = re.compile(rb'"id": ?"(resp_[^"]{1,200})"')
#: Key of the finish reason, and its value: one word.
_REASON = (b'"finish_reason":', re.compile(rb'"finish_reason": ?"([a-z_]{1,32})"'))
_REASONS = {
    Api.MESSAGES: (b'"stop_reason":', re.compile(rb'"stop_reason": ?"([a-z_]{1,32})"')),
    Api.RESPONSES: (b'"status":', re.compile(rb'"status": ?"(completed|incomplete|failed|cancelled)"')),
}

#: Number of tokens as an instance counts them. A number larger than any engine can hold is invalid.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None


class _Details(TypedDict, total=False):
    cached_tokens: _Count


class _Counts(TypedDict, total=False):
    prompt_tokens: _Count
    completion_tokens: _Count
    input_tokens: _Count
    output_tokens: _Count
    prompt_tokens_details: _Details | None
    input_tokens_details: _Details | None
    cache_read_input_tokens: _Count
    cache_creation_input_tokens: _Count


class _Object(msgspec.Struct):
    """Data of an event, or an answer in one piece; also the message or response that an event is about."""

    type: Any = None
    code: Any = None
    error: Any = None
    choices: Any = None
    usage: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()


_first_value = json.JSONDecoder().raw_decode
_decode_counts = msgspec.json.Decoder(_Counts).decode
_decode_object = msgspec.json.Decoder(_Object).decode


@dataclass(slots=True, eq=False, repr=False)
class AnswerObserver:
    """Observer of an answer as its bytes pass: its output, usage, response id and errors, and whether it is complete.

    A stream is read as the HTML standard's server-sent events, in pieces of any cut. An event that begins and ends like
    the output before it is only counted; all others are decoded.

    Args:
        api: wire format of the answer.
        is_stream: the answer is a stream of events; otherwise it is one object.
    """

    api: Api
    is_stream: bool
    #: The last event has passed, to its end; True for an answer without one.
    ended: bool = field(init=False)
    #: Output has passed: the prompt is prefilled.
    has_output: bool = field(default=False, init=False)
    #: The engine reports an error in the answer, of whatever status; it refuses what the request asks for.
    has_error: bool = field(default=False, init=False)
    is_refusal: bool = field(default=False, init=False)
    #: Finish reason, e.g. `stop`, `length`, `end_turn`, and id of a stored response; empty as long as none has passed.
    finish_reason: str = field(default="", init=False)
    response_id: str = field(default="", init=False)
    #: Number of bytes passed, and of events from the first output on, without the last event of the stream.
    size: int = field(default=0, init=False)
    events: int = field(default=0, init=False)
    #: The unfinished event, or the answer in one piece. If it is too long, only its end, and a part of its head.
    _rest: bytes = field(default=b"", init=False)
    _head: bytes = field(default=b"", init=False)
    #: The last byte was a CR. An LF behind it belongs to the same line break.
    _has_cr: bool = field(default=False, init=False)
    #: How an event begins and ends that holds nothing but output, once one has passed; no event does before.
    _usual: tuple[bytes, bytes] = field(default=(b"\n\n\n", b"\n\n"), init=False)
    _counts: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.ended = not self.is_stream or self.api not in _LAST

    def passed(self, piece: bytes) -> None:
        """Look at *piece*, which goes to the client."""
        self.size += len(piece)
        rest = self._rest
        begin, end = self._usual
        if piece.startswith(begin) and piece.endswith(end) and not rest and piece.find(b"\n\n") == len(piece) - 2:
            self.events += 1
            return
        if not self.is_stream:
            self.has_output = True
            self._rest = rest + piece
        else:
            if self._has_cr or piece.find(b"\r") >= 0:  # `in` takes twice as long
                piece = self._with_line_feeds(piece)
            text = rest + piece if rest else piece
            if text.endswith(b"\n\n"):
                self._rest = b""
            else:
                whole = text.rfind(b"\n\n", max(0, len(rest) - 1)) + 2
                text, self._rest = (text[:whole], text[whole:]) if whole > 1 else (b"", text)
            if text:
                self._read(text)
        if len(self._rest) > KEPT_BYTES:
            self._skim(self._rest)
            self._head = self._head or self._rest[:HEAD_BYTES]
            self._rest = self._rest[-OVERLAP_BYTES:]

    def finish(self) -> None:
        """Note the end of the body. An event without its blank line does not count, but `[DONE]` does."""
        rest, self._rest = self._rest, b""
        if not self.is_stream or rest.rstrip(b"\n").endswith(b"[DONE]"):
            self._event(rest)

    @property
    def is_past_mark(self) -> bool:
        """The stream has a last event, and it has passed."""
        return self.ended and self.is_stream and self.api in _LAST

    @property
    def is_within_event(self) -> bool:
        """The bytes that have passed end in the middle of an event."""
        return bool(self._rest) or self._has_cr

    def usage(self) -> Usage | None:
        """Return the tokens that the instance has counted so far, or None."""
        counts = self._counts
        if not counts:
            return None
        details = counts.get("prompt_tokens_details") or counts.get("input_tokens_details")
        cached = details.get("cached_tokens") if details else counts.get("cache_read_input_tokens")
        if "prompt_tokens" in counts:
            return Usage(counts["prompt_tokens"], counts.get("completion_tokens"), cached)
        prompt = counts.get("input_tokens")
        if prompt is not None and self.api is Api.MESSAGES:
            # Anthropic counts cached tokens beside `input_tokens`, OpenAI within them.
            prompt += (counts.get("cache_read_input_tokens") or 0) + (counts.get("cache_creation_input_tokens") or 0)
        return Usage(prompt, counts.get("output_tokens"), cached)

    # Events

    def _with_line_feeds(self, piece: bytes) -> bytes:
        """Return *piece* with CR and CRLF as LF."""
        if self._has_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._has_cr = False
        if piece:
            self._has_cr = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _read(self, text: bytes) -> None:
        """Read whole events."""
        begin, end = self._usual[0], self._usual[1][:-2]
        for event in text[:-2].split(b"\n\n"):
            if event.startswith(begin) and event.endswith(end) and not self._head:
                self.events += 1
            else:
                self._event(event)
                begin, end = self._usual[0], self._usual[1][:-2]

    def _event(self, text: bytes) -> None:
        """Read a whole event or object, or the last part of one that was too long to keep."""
        found: _Object | None = None
        kind = ""
        if self._head:
            head, self._head = self._head, b""
            named = _EVENT.match(head) or _TYPE.search(head + text)
            kind = named[1].decode("latin-1") if named is not None else ""
        elif not self.is_stream:
            found = _decoded(text)
        else:
            fields = _FIELD.findall(text.removeprefix(_BOM))
            data = b"\n".join([value for field, value in fields if field == b"data"])
            if not data:
                return  # a comment
            kind = "".join([value.decode("latin-1") for field, value in fields if field == b"event"][-1:])
            if data == b"[DONE]":
                kind = "[DONE]"
            elif (found := _decoded(data)) is not None and isinstance(found.type, str):
                kind = found.type
        error: Any = None
        if found is None and kind != "[DONE]":
            self._skim(text)
        elif found is not None:
            self._note_names(text)
            for part in (found, *(_decoded(raw) for raw in (found.message, found.response) if raw)):
                if part is not None:
                    error = error or part.error
                    if part.usage:
                        with suppress(msgspec.DecodeError):
                            self._count(_decode_counts(part.usage))
        if error or kind in _ERRORS:
            self.has_error = True
            self.is_refusal = _is_refusal(error or (found and {"type": found.type, "code": found.code}))
        elif not (self.has_output or self.has_error):
            self.has_output = self._carries_output(kind, found)
        if kind in _LAST.get(self.api, ()):
            self.ended = True
        elif self.is_stream and self.has_output:
            self.events += 1
            self._usual = self._bounds(text, kind)

    def _skim(self, text: bytes) -> None:
        """Read a part of an event or object that is too long to keep, or one that cannot be decoded."""
        at = len(text)
        while (at := text.rfind(b'"usage":', 0, at)) >= 0:
            try:
                usage, _ = _first_value(text[at + 8 : at + OVERLAP_BYTES].decode("latin-1").lstrip())
                self._count(msgspec.convert(usage, _Counts))
                break
            except (*UNREADABLE, ValueError):
                continue  # incomplete, null, or a text of the model's
        self._note_names(text)

    def _note_names(self, text: bytes) -> None:
        """Note the response id and the finish reason in *text*."""
        api = self.api
        if api in (Api.RESPONSES, Api.OTHER) and not self.response_id and (found := _RESPONSE_ID.search(text)):
            self.response_id = found[1].decode("ascii", "replace")
        key, pattern = _REASONS.get(api, _REASON)
        at = len(text)
        while (at := text.rfind(key, 0, at)) >= 0:
            if (found := pattern.match(text, at)) is not None:
                self.finish_reason = found[1].decode()
                break

    def _count(self, counts: _Counts) -> None:
        """Take *counts* in place of earlier ones."""
        self._counts |= {name: count for name, count in counts.items() if count is not None}

    def _bounds(self, text: bytes, kind: str) -> tuple[bytes, bytes]:
        """Return how events begin and end that hold nothing but output, as *text* does, which is of type *kind*."""
        if self.api in _WITHOUT_OUTPUT:
            at = text.find(kind.encode()) + len(kind)
            if kind.endswith("delta") and kind != "message_delta" and len(kind) <= at <= 100:
                return text[:at], b"\n\n"
        elif (at := text.find(b'"choices":')) >= 0:
            if (end := text.find(b'"finish_reason":null', at)) >= 0:
                return text[:at], text[end:] + b"\n\n"
            if text.endswith(b'"}}]}'):
                return text[:at], b'"}}]}\n\n'
        return self._usual

    def _carries_output(self, kind: str, found: _Object | None) -> bool:
        """Return whether an event of type *kind* shows that the prompt is prefilled. One of an unknown shape does."""
        if (without := _WITHOUT_OUTPUT.get(self.api)) is not None:
            return without.fullmatch(kind) is None
        choices = found.choices if found is not None else None
        return not isinstance(choices, list) or any(map(_has_output, choices))


def _has_output(choice: Any) -> bool:
    """Return whether a choice of a chunk holds more than the role, or an unknown shape."""
    if not isinstance(choice, dict) or choice.get("finish_reason") or choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text", True))


def _is_refusal(error: Any) -> bool:
    """Return whether an error that stands in an answer is the request's own, which a status of 4xx would say."""
    about = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return any(
        400 <= one < 500 if isinstance(one, int) else isinstance(one, str) and _REFUSALS.search(one) is not None
        for one in about
    )


def _decoded(text: bytes | msgspec.Raw) -> _Object | None:
    try:
        return _decode_object(text)
    except UNREADABLE:
        return None


@dataclass(slots=True, eq=False)
class Delivery:
    """Answer of an instance on its way to the client: passed on as it arrives, observed, and learnt from as it passes.

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
        is_prefilled: output has passed.
        is_sent: the last piece has been sent as such.
        due: deadline of the first output, on the loop's clock.
        idle_s: longest pause from then on.
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
    is_prefilled: bool = field(default=False, init=False)
    is_sent: bool = field(default=False, init=False)
    due: float = field(init=False)
    idle_s: float = field(init=False)
    observer: AnswerObserver = field(init=False)

    def __post_init__(self) -> None:
        self.headers = headers = response_headers(self.answer.headers)
        self.is_stream = (first(headers, b"content-type") or b"").lower().startswith(b"text/event-stream")
        self.is_compressed = (first(headers, b"content-encoding") or b"identity").lower() != b"identity"
        headers += self.context.receipt(self.record)
        if self.is_stream:
            headers.append((b"x-accel-buffering", b"no"))
        is_readable_stream = self.is_stream and self.answer.status == 200 and not self.is_compressed
        self.due, self.idle_s = self.client.watchdog.at, self.context.deadlines.idle_s
        self.observer = self.lease.answer = AnswerObserver(self.record.request.api, is_readable_stream)

    async def run(self, held: bytes) -> None:
        """Pass the answer on. *held* has been read of its body already."""
        answer, client, observer = self.answer, self.client, self.observer
        watchdog = client.watchdog
        try:
            # A write costs more than all else here: a head whose body has begun to arrive goes with the first piece.
            if held or not answer.pieces:
                observer.passed(held)
                if self._begin(held, is_last=False):
                    await self._drained()
            while not await answer.relay(self._pass):
                await self._drained()
            observer.finish()
            if is_whole := observer.ended or observer.has_error:
                answer.finish()
                if not self.is_sent:
                    self.lease.release()
                    if client.pass_on(b"", is_last=True):
                        await client.drained()
        except AnswerBroken:
            await self._break_off(names.CLOSED)
            return
        except asyncio.CancelledError:
            if watchdog.expired not in ("first_byte", "idle"):
                self._leave()
                raise
            watchdog.resume()
            if self.record.is_in_one_piece and not self.is_prefilled:
                self.trial.excuse()
            await self._break_off(names.TIMEOUT)
            return
        if is_whole:
            self._settle()
        else:
            await self._break_off(names.CLOSED)

    def _pass(self, piece: bytes) -> bool:
        """Pass *piece* on; return whether the client takes more now."""
        observer, client = self.observer, self.client
        observer.passed(piece)
        if self.is_prefilled and not self.answer.is_done:
            client.watchdog.extend(self.idle_s)
            return not client.pass_on(piece)
        self.is_sent = is_last = observer.ended and self.answer.is_done
        if is_last:
            self.lease.release()  # the engine is done, however long the client takes to read
        if self.is_prefilled:
            return not client.pass_on(piece, is_last=is_last)
        self._tie()
        # A refusal computes nothing: it has no time to first token.
        ttfc_s = self.attempt.first_output() if observer.has_output and self.answer.status == 200 else 0.0
        is_full = client.pass_on(piece, is_last=is_last) if self.has_begun else self._begin(piece, is_last=is_last)
        if observer.has_output:
            client.watchdog.arm(self.idle_s, "idle")
            self._prefilled(ttfc_s)
        return not is_full

    def _prefilled(self, ttfc_s: float) -> None:
        """Learn from the first output, which came *ttfc_s* seconds after the request was sent."""
        self.is_prefilled = True
        record, lease, lookups = self.record, self.lease, self.context.router.lookups
        is_current = not lease.is_past
        lease.first_output()
        if record.is_inference and self.answer.status == 200:
            if is_current:
                is_stream = self.observer.is_stream
                is_unreadable = self.is_stream and not is_stream
                self.trial.waited(lease, ttfc_s, is_stream=None if is_unreadable else is_stream)
                if is_stream:
                    lookups.first_token(lease, ttfc_s)
                lookups.prefilled(record.request, lease.instance)
            record.request.answering()
            self.exchange.answering()

    def _begin(self, piece: bytes, *, is_last: bool) -> bool:
        """Send the head with *piece*; return whether to wait until the client has drained."""
        self.has_begun = True
        return self.client.begin(self.answer.status, self.headers, piece, is_last=is_last)

    async def _drained(self) -> None:
        """Wait until the client has drained, and set the instance's deadline again."""
        client = self.client
        await client.drained()
        if self.is_prefilled:
            client.watchdog.arm(self.idle_s, "idle")
        else:
            client.watchdog.arm(self.due - client.task.get_loop().time(), "first_byte")

    def _tie(self) -> None:
        """Tie a stored response to its instance, which alone can continue it. No client has seen its id before that.

        So also if its process seems gone: the request may have reached a new one before that was seen.
        """
        if self.observer.response_id:
            self.context.router.pin(self.observer.response_id, self.lease.instance)

    def _settle(self) -> None:
        """Learn from an answer that has passed whole."""
        observer, status = self.observer, self.answer.status
        result, error_type = ("5xx" if status >= 500 else names.OK), ""
        if status == 200:
            self._tie()
            if observer.finish_reason == "abort":
                self.trial.aborted(self.lease)
            if observer.has_error:
                if observer.is_refusal:
                    self.trial.excuse()
                else:
                    result, error_type = names.ENGINE_ERROR, f"upstream_{names.ENGINE_ERROR}"
        self._end(status, result, error_type, is_whole=not observer.has_error)

    def _leave(self) -> None:
        """Learn from an answer that is left. A client that leaves behind the last event or an error has all of it."""
        if self.client.gone and (self.observer.is_past_mark or self.observer.has_error):
            self._settle()
        else:
            usage = self._learn(is_whole=False)
            self.attempt.end(names.ABORTED, status=self.answer.status, usage=usage)

    def _learn(self, *, is_whole: bool) -> Usage | None:
        """Learn from the usage that has passed, and return it; *is_whole*: the engine has answered to the end."""
        record, lease, observer, context = self.record, self.lease, self.observer, self.context
        request = record.request
        usage = observer.usage() if self.answer.status == 200 else None
        prompt = request.prompt
        if prompt is not None and not prompt.counted and request.prompts == 1 and usage is not None:
            context.tokens.learn(request.model, prompt.size, usage.prompt_tokens or 0)
        if (is_whole or usage is not None) and self.answer.status == 200 and record.is_inference and not lease.is_past:
            context.router.lookups.settled(request, lease.instance, usage)
            context.caches.answered(record, usage, self.scope["headers"])
        return usage

    def _end(self, status: int, result: str, error_type: str, *, is_whole: bool) -> None:
        """End attempt and exchange with what was learnt."""
        observer, usage = self.observer, self._learn(is_whole=is_whole)
        reason = observer.finish_reason if status == 200 else ""
        self.attempt.end(result, status=status, usage=usage, finish_reason=reason)
        self.exchange.end(status, bytes_out=observer.size, events=observer.events, usage=usage, error_type=error_type)

    async def _break_off(self, result: str) -> None:
        """End an answer of which the client has seen the beginning. Without a last piece the server then closes."""
        self.answer.close()
        self.lease.release()  # however long the client takes to read
        self._end(self.answer.status, result, f"upstream_{result}", is_whole=False)
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

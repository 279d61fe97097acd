"""What is learnt from an answer while its bytes pass: whether it is whole, its usage, its response id.

Bounded and lossy on purpose: a few kilobytes of the head and the tail are looked at, nothing is decoded on the way.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec

from smetric.request import Api
from smetric.unreadable import UNREADABLE
from smetric.usage import Usage

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

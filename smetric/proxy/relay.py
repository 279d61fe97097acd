"""What is learnt from an answer while its bytes pass: whether it is whole, its usage, its response id.

Bounded and lossy on purpose: a few kilobytes of the head and the tail are looked at, nothing is decoded on the way.
"""

from __future__ import annotations

import re

import msgspec

from smetric.request import Api
from smetric.telemetry.record import Usage

#: Bytes of the tail in which usage is looked for, and of the head in which the response id is.
TAIL_BYTES = 4096
HEAD_BYTES = 1024

#: The lines that end a stream of each API, or the engine's own error. They begin with a line break, which no text of a
#: model can hold: JSON escapes it.
END_MARKERS: dict[Api, tuple[bytes, ...]] = {
    Api.CHAT: (b"\ndata: [DONE]", b"\ndata:[DONE]"),
    Api.COMPLETIONS: (b"\ndata: [DONE]", b"\ndata:[DONE]"),
    Api.MESSAGES: (b"\nevent: message_stop", b"\nevent:message_stop", b"\nevent: error", b"\nevent:error"),
    Api.RESPONSES: tuple(
        b"\nevent:%b%b" % (space, kind)
        for space in (b" ", b"")
        for kind in (b"response.completed", b"response.incomplete", b"response.failed", b"error")
    ),
}
#: Where an engine's error is an event like any other, this is how it begins.
ENGINE_ERROR = (b'\ndata: {"error":', b'\ndata:{"error":')
#: How an engine that is told to stop ends what it was generating. No text of a model can hold it: JSON escapes quotes.
ABORTED = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')
_OVERLAP = max(len(marker) for markers in END_MARKERS.values() for marker in markers) - 1


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


#: An object that holds objects, but none of them another, and no braces in strings: so are usage objects.
_OBJECT = re.compile(rb"\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
_decode_usage = msgspec.json.Decoder(_Usage).decode


class Observer:
    """Watches one answer pass.

    Args:
        api: decides what marks the end of a stream.
        is_stream: the answer is a stream of events.
    """

    __slots__ = ("_api", "_head", "_markers", "_tail", "ended", "is_stream", "size")

    def __init__(self, api: Api, *, is_stream: bool) -> None:
        self._api = api
        #: The answer is a stream of events.
        self.is_stream = is_stream
        self._markers = END_MARKERS.get(api, ()) if is_stream else ()
        self._head = b""
        #: A stream begins at the beginning of a line.
        self._tail = b"\n"
        #: The stream's own end mark has passed; True for what has none.
        self.ended = not self._markers
        #: Bytes passed.
        self.size = 0

    def passed(self, piece: bytes) -> None:
        """*piece* is on its way to the client."""
        if self.size < HEAD_BYTES:
            self._head += piece[: HEAD_BYTES - self.size]
        self.size += len(piece)
        if not self.ended:
            seam = self._tail[-_OVERLAP:] + piece
            self.ended = any(marker in seam for marker in self._markers)
        self._tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (self._tail + piece)[-TAIL_BYTES:]

    @property
    def is_engine_error(self) -> bool:
        """The stream's tail holds the engine's own error event."""
        return any(marker in self._tail for marker in ENGINE_ERROR)

    @property
    def is_aborted(self) -> bool:
        """The engine ended the answer before its end; the client did not ask for that."""
        return any(marker in self._tail for marker in ABORTED)

    def usage(self) -> Usage | None:
        """The last usage object seen, or None."""
        found = _last_usage(self._tail) or (_last_usage(self._head) if self.is_stream else None)
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

    def response_id(self) -> str:
        """The id of a Responses API answer, or empty."""
        start = self._head.find(b'"id":"resp_')
        if start < 0:
            return ""
        end = self._head.find(b'"', start + 6)
        return self._head[start + 6 : end].decode("ascii", "replace") if 0 < end - start <= 200 else ""


def _last_usage(text: bytes) -> _Usage | None:
    at = len(text)
    while (at := text.rfind(b'"usage":', 0, at)) >= 0:
        found = _OBJECT.match(text, at + 8)
        if found is not None:
            try:
                return _decode_usage(found[1])
            except msgspec.DecodeError:
                continue
    return None

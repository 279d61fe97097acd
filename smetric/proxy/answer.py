"""What an instance answers, as it arrives: the head, then the pieces of the body that nobody has taken yet.

What is not unmistakably HTTP/1.x, framed in one way only and of a bounded head, is refused. httptools reads the bytes;
the connection they come over is `wire.py`'s.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import httptools

from smetric.proxy.headers import MOST_DIGITS, Headers

if TYPE_CHECKING:
    from smetric.proxy.wire import Wire

#: Most bytes of an answer's head, and most bytes within its body that bring none of it (chunk extensions, trailers).
MAX_HEAD_BYTES = 64 * 1024
#: Most header fields of an answer, those of interim answers (1xx) and trailers included.
MAX_FIELDS = 256
#: What a piece of a body costs as an object, whatever its size.
PIECE_OVERHEAD = 64


class _Refused(Exception):
    """Raised within the parser's callbacks to stop it."""


class Answer:
    """One answer: its head, then its body piece by piece. `close` or `finish` must be called, whatever happens.

    Args:
        wire: over which it comes.
        is_head: the request's method is HEAD, so that the answer has no body.
    """

    __slots__ = (
        "_field_bytes",
        "_field_count",
        "_has_length",
        "_is_chunked",
        "_is_head",
        "_is_interim",
        "_is_over",
        "_parser",
        "_unspent",
        "_wire",
        "has_head",
        "headers",
        "is_done",
        "is_reusable",
        "is_silent",
        "pieces",
        "reason",
        "size",
        "status",
    )

    def __init__(self, wire: Wire, is_head: bool) -> None:
        self._wire = wire
        self._is_head = is_head
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._field_bytes = self._field_count = 0
        self._has_length = self._is_chunked = self._is_interim = False
        #: Bytes received since the last that belonged to a body.
        self._unspent = 0
        #: Finished or closed: the connection may be somebody else's.
        self._is_over = False
        self.status = 0
        #: As received: order, case and duplicates kept.
        self.headers: Headers = []
        #: What has come of the body since it was last read.
        self.pieces: list[bytes] = []
        #: The head has come; all of the answer has come.
        self.has_head = self.is_done = False
        #: By its framing and fields, another answer may follow on its connection.
        self.is_reusable = False
        #: No byte has come.
        self.is_silent = True
        #: Why no more will come, though it is not done: closed or protocol; empty while more may.
        self.reason = ""
        #: Bytes that wait to be read, the cost of their objects included.
        self.size = 0

    # What is done with it.

    def take(self) -> bytes:
        """What has arrived of the body since the last time; empty if nothing has."""
        pieces = self.pieces
        self.pieces = []
        self.size = 0
        self._wire.taken()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read(self) -> Coroutine[Any, Any, bytes]:
        """Whatever has arrived of the body; empty at its end.

        Raises:
            AnswerBroken: the connection ended or spoke nonsense in the middle.
        """
        return self._wire.read(self)

    @property
    def is_whole(self) -> bool:
        """All of it has come and been read."""
        return self.is_done and not self.pieces

    def finish(self) -> None:
        """The body was read to its end: the connection may serve another request."""
        if not self._is_over:
            self._is_over = True
            self._wire.finish(self)

    def close(self) -> None:
        """Give the answer up: the connection is closed, which tells the engine to stop."""
        if not self._is_over:
            self._is_over = True
            self._wire.abort()

    # What its connection does.

    def feed(self, data: bytes | memoryview) -> bool:
        """Take in what has arrived; False when nothing more may come over this connection."""
        parser = self._parser
        if self.is_done or self.reason or parser is None:
            return False  # bytes that nobody asked for, or the rest of nonsense
        self.is_silent = False
        size = self.size
        try:
            parser.feed_data(data)
            if self.size == size and not self.is_done:
                self._unspent += len(data)
                if self._unspent > MAX_HEAD_BYTES:
                    raise _Refused
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, _Refused):
            self.is_reusable = False
            if not self.is_done:
                self.reason = "protocol"
            return False
        return True

    def end(self) -> None:
        """The instance has closed its side in good order: that ends a body without a length."""
        if self.has_head and not (self._has_length or self._is_chunked or self.reason):
            self.is_done = True

    def cut(self) -> None:
        """No more will come: the connection is gone, or another request's."""
        self._parser = None  # it refers back to this
        self.is_reusable = False
        if not self.is_done and not self.reason:
            self.reason = "closed"

    # What the parser calls.

    def on_message_begin(self) -> None:
        """An answer begins; there is to be one."""
        if self.is_done:
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head or of the trailer section."""
        length = len(name)
        self._field_count = count = self._field_count + 1
        self._field_bytes = size = self._field_bytes + length + len(value)
        if count > MAX_FIELDS or size > MAX_HEAD_BYTES:
            raise _Refused
        if self.has_head:
            return  # a trailer; these are dropped
        self.headers.append((name, value))
        if length == 14 and name.lower() == b"content-length":
            if len(value) > MOST_DIGITS:
                raise _Refused
            self._has_length = True
        elif length == 17 and name.lower() == b"transfer-encoding":
            # Nobody asked for any other coding, and a second one would have to be undone.
            if self._is_chunked or value.strip().lower() != b"chunked":
                raise _Refused
            self._is_chunked = True

    def on_headers_complete(self) -> None:
        """The head has come, or that of an interim answer."""
        parser = self._parser
        assert parser is not None
        status, version = parser.get_status_code(), parser.get_http_version()
        if status < 100 or status == 101 or version not in ("1.1", "1.0") or (self._is_chunked and version == "1.0"):
            raise _Refused
        if status < 200:
            self._is_interim = True
            self.headers = []
            self._has_length = self._is_chunked = False
            return
        self.status = status
        self.has_head = True
        if self._is_head:
            self.is_done = True
            self.is_reusable = parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self.is_done:
            raise _Refused
        self.pieces.append(data)
        self.size += len(data) + PIECE_OVERHEAD
        self._unspent = 0

    def on_message_complete(self) -> None:
        """The answer, or an interim one, is complete."""
        if self._is_interim:
            self._is_interim = False
        elif not self.is_done:
            assert self._parser is not None
            self.is_done = True
            self.is_reusable = self._parser.should_keep_alive()

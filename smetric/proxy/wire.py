"""One keep-alive connection to an instance and the answer on it: HTTP/1.1, read by httptools.

What is not unmistakably HTTP/1.x is refused, and a connection that did anything odd is never used again. Where
connections come from and wait between requests is `pool.py`; deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import cast

import httptools

Headers = list[tuple[bytes, bytes]]

#: Most bytes of an answer's head, and most bytes within its body that bring none of it (chunk extensions, trailers).
MAX_HEAD_BYTES = 64 * 1024
#: Most header fields of an answer, those of interim answers (1xx) included.
MAX_FIELDS = 256
#: Reading pauses while this much of an answer waits for its reader; a piece counts for its object too.
HIGH_BYTES = 256 * 1024
PIECE_OVERHEAD = 64
#: A body is handed to the socket in pieces of this size, so that other requests are served in between.
WRITE_BYTES = 256 * 1024
#: A body of at most this size is cheaper to copy behind the head than to write apart.
JOIN_BYTES = 16 * 1024


class UpstreamFailed(Exception):
    """A request to an instance failed before any byte of its answer could be passed on.

    `reason` is one of: connect_error (refused, unreachable, no name, no trusted certificate), connect_timeout, closed
    (the connection ended), protocol (what came was not HTTP). The cause's text is never shown to clients: it can quote
    bytes.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreachable(UpstreamFailed):
    """Nobody answers there, for now."""


class AnswerBroken(Exception):
    """An answer ended before it was complete."""


class _Refused(Exception):
    """Raised within the parser's callbacks to stop it."""


class Wire(asyncio.Protocol):
    """A connection that carries one request at a time.

    Args:
        loop: where it lives.
        on_made: told when it is established.
        on_idle: told when it may carry another request.
        on_lost: told when it has ended.
    """

    __slots__ = (
        "_field_bytes",
        "_field_count",
        "_has_head",
        "_has_length",
        "_is_chunked",
        "_is_congested",
        "_is_cut_short",
        "_is_done",
        "_is_head",
        "_is_interim",
        "_is_paused",
        "_is_reusable",
        "_loop",
        "_lost",
        "_on_idle",
        "_on_lost",
        "_on_made",
        "_parser",
        "_pieces",
        "_poll",
        "_reason",
        "_size",
        "_transport",
        "_unsent",
        "_unspent",
        "_waiter",
        "born_at",
        "fields",
        "idle_since",
        "is_silent",
        "status",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_made: Callable[[Wire], None],
        on_idle: Callable[[Wire], None],
        on_lost: Callable[[Wire], None],
    ) -> None:
        self._loop = loop
        self._on_made = on_made
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._poll = select.poll()
        self._unsent: memoryview | None = None
        self._is_congested = self._is_paused = self._lost = False
        #: Seconds on the loop's clock.
        self.born_at = loop.time()
        self.idle_since = 0.0
        self._reset(is_head=False)
        self._is_done = True  # nothing has been asked: whatever comes is too much

    def _reset(self, *, is_head: bool) -> None:
        self._is_head = is_head
        self.status = 0
        #: As received: order, case and duplicates kept.
        self.fields: Headers = []
        self._field_bytes = self._field_count = 0
        self._has_head = self._has_length = self._is_chunked = self._is_interim = False
        self._pieces: list[bytes] = []
        self._size = 0
        #: Bytes received since the last that belonged to a body.
        self._unspent = 0
        self._is_done = self._is_cut_short = self._is_reusable = False
        self._reason = ""
        #: No byte of an answer has come.
        self.is_silent = True

    # What the pool and the answer do with it.

    @property
    def is_fresh(self) -> bool:
        """Still open, and nothing has come that nobody asked for, neither bytes nor its end."""
        return not self._lost and not self._poll.poll(0)

    async def ask(self, head: bytes, body: bytes | None, *, is_head: bool) -> None:
        """Send a request and wait for the head of its answer.

        Args:
            head: request line and fields, with the empty line.
            body: what follows; None for nothing.
            is_head: the method is HEAD, so that the answer has no body.

        Raises:
            UpstreamFailed: closed or protocol.
        """
        self._reset(is_head=is_head)
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        transport = self._transport
        assert transport is not None
        if body is None or len(body) <= JOIN_BYTES:
            transport.write(head if body is None else head + body)
        elif len(body) <= WRITE_BYTES:
            transport.writelines((head, body))
        else:
            self._unsent = memoryview(body)
            transport.write(head)
            self._push()
        while not self._has_head:
            if self._reason:
                raise UpstreamFailed(self._reason)
            await self._wait()
        if self._reason == "protocol" and not self._pieces:
            raise UpstreamFailed("protocol")

    async def read(self) -> bytes:
        """Whatever has arrived of the body; empty at its end.

        Raises:
            AnswerBroken: the connection ended or spoke nonsense in the middle.
        """
        while not self._pieces:
            if self._is_done:
                return b""
            if self._reason:
                raise AnswerBroken(self._reason)
            await self._wait()
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        self._size = 0
        if self._is_paused and not self._lost:
            assert self._transport is not None
            self._is_paused = False
            self._transport.resume_reading()
        return data

    @property
    def is_whole(self) -> bool:
        """All of the body has been read."""
        return self._is_done and not self._pieces

    def finish(self) -> None:
        """The answer has been read to its end; keep the connection if it may be kept."""
        transport = self._transport
        assert transport is not None
        is_sent = self._unsent is None and not transport.get_write_buffer_size()
        if self.is_whole and self._is_reusable and is_sent and not self._lost:
            self.fields = []
            self._on_idle(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once, whatever is still on its way."""
        self._unsent = None
        self._is_reusable = self._is_paused = False
        if self._transport is not None and not self._lost:
            self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # The way out.

    def _push(self) -> None:
        """Hand over what the socket takes of the body."""
        assert self._transport is not None
        while self._unsent is not None and not self._is_congested:
            piece, rest = self._unsent[:WRITE_BYTES], self._unsent[WRITE_BYTES:]
            self._unsent = rest if len(rest) else None
            self._transport.write(piece)

    def pause_writing(self) -> None:
        """The transport holds enough."""
        self._is_congested = True

    def resume_writing(self) -> None:
        """The transport takes more."""
        self._is_congested = False
        self._push()

    # The way in.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        """Parse, and wake who waits."""
        parser = self._parser
        if self._is_done or self._reason or parser is None:
            self.abort()  # bytes that nobody asked for, or the rest of nonsense
            return
        self.is_silent = False
        size = self._size
        try:
            parser.feed_data(data)
            if self._size == size:
                self._unspent += len(data)
                if self._unspent > MAX_HEAD_BYTES and not self._is_done:
                    raise _Refused
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, _Refused):
            if not self._is_done:
                self._reason = "protocol"
            self.abort()
        if self._size >= HIGH_BYTES and not (self._is_paused or self._is_done or self._reason):
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        if self._has_head or self._reason:
            self._wake()

    def eof_received(self) -> None:
        """The instance sends no more: that ends a body without a length."""
        if self._has_head and not (self._has_length or self._is_chunked or self._reason):
            self._is_done = True

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._lost = True
        self._parser = None  # it refers back to this
        self._unsent = None
        if not self._is_done and not self._reason:
            self._reason = "closed"
        self._wake()
        self._on_lost(self)

    # What the parser sees.

    def on_message_begin(self) -> None:
        """An answer begins; there is to be one."""
        if self._is_done:
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head or of the trailer section."""
        self._field_count += 1
        self._field_bytes += len(name) + len(value)
        if self._field_count > MAX_FIELDS or self._field_bytes > MAX_HEAD_BYTES:
            raise _Refused
        if self._has_head:
            return  # a trailer; these are dropped
        self.fields.append((name, value))
        length = len(name)
        if length == 14 and name.lower() == b"content-length":
            self._has_length = True
        elif length == 17 and name.lower() == b"transfer-encoding":
            # Nobody asked for any other coding, and a second one would have to be undone.
            if self._is_chunked or value.strip().lower() != b"chunked":
                raise _Refused
            self._is_chunked = True

    def on_headers_complete(self) -> None:
        """The head has come."""
        parser = self._parser
        assert parser is not None
        status, version = parser.get_status_code(), parser.get_http_version()
        if status < 100 or status == 101 or version not in ("1.1", "1.0") or (self._is_chunked and version == "1.0"):
            raise _Refused
        if status < 200:
            self._is_interim = True
            self.fields = []
            self._has_length = self._is_chunked = False
            return
        self.status = status
        self._has_head = True
        if status >= 400 and self._unsent is not None:
            self._unsent = None  # it has been refused: what is left need not be sent
            self._is_cut_short = True
        if self._is_head:
            self._complete(parser.should_keep_alive())
            self._parser = None  # it expects a body

    def on_body(self, data: bytes) -> None:
        """A piece of the body."""
        if self._is_done:
            raise _Refused
        self._pieces.append(data)
        self._size += len(data) + PIECE_OVERHEAD
        self._unspent = 0

    def on_message_complete(self) -> None:
        """The answer, or an interim one, is complete."""
        if self._is_interim:
            self._is_interim = False
        elif not self._is_done:
            assert self._parser is not None
            self._complete(self._parser.should_keep_alive())

    def _complete(self, may_be_kept: bool) -> None:
        self._is_done = True
        self._is_reusable = may_be_kept and not self._is_cut_short

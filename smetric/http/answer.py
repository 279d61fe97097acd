"""Connection to an instance: a request goes out, its answer comes in.

An answer that is not plainly HTTP/1.x, framed in one way and of a bounded head, is refused, and a connection that did
anything odd is never used again. Deadlines are the caller's; connections come from `upstream`.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import cast

import httptools

from smetric.http.headers import MOST_DIGITS, Headers

#: Limit on the bytes of a head, and on bytes within a body that are not of it (chunk extensions, trailers).
MAX_HEAD_BYTES = 64 * 1024
#: Limit on header fields, those of interim answers (1xx) and trailers included.
MAX_FIELDS = 256
#: Bytes that a piece of a body takes as an object, beside its content.
PIECE_OVERHEAD = 64
#: Bytes of an answer that wait for the reader from which reading pauses, and bytes that are read at a time. A client
#: that never reads holds less than four times as much, on both sides together.
HIGH_BYTES = 32 * 1024
READ_BYTES = 64 * 1024
#: A body is handed to the socket in pieces of this size, so that other requests are served in between.
WRITE_BYTES = 256 * 1024
#: A body of at most this size is copied behind the head.
JOIN_BYTES = 16 * 1024


class UpstreamFailed(Exception):
    """A request failed before any byte of its answer could be passed on.

    `reason` is one of: connect_error (refused, unreachable, no name, no trusted certificate), connect_timeout,
    exhausted (this process can open no more connections), closed (the connection ended), protocol (the answer was not
    HTTP). The text of the cause is never shown to clients: it can quote bytes.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class InstanceUnreachable(UpstreamFailed):
    """No server accepts a connection, for now."""


class AnswerBroken(Exception):
    """An answer ended before it was complete."""


class _Refused(Exception):
    """Stops the parser from within its callbacks."""


class UpstreamResponse:
    """Answer of an instance: its head, then its body piece by piece. `close` or `finish` must be called in the end.

    Args:
        wire: the connection.
        is_head: the request's method is HEAD, so that the answer has no body.
    """

    __slots__ = (
        "_field_bytes",
        "_field_count",
        "_has_length",
        "_is_chunked",
        "_is_head",
        "_is_interim",
        "_parser",
        "_unspent",
        "_wire",
        "has_head",
        "headers",
        "is_done",
        "is_over",
        "is_reusable",
        "is_silent",
        "pieces",
        "reason",
        "size",
        "status",
    )

    def __init__(self, wire: UpstreamConnection, is_head: bool) -> None:
        self._wire = wire
        self._is_head = is_head
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._field_bytes = self._field_count = 0
        self._has_length = self._is_chunked = self._is_interim = False
        #: Bytes received since the last byte of the body.
        self._unspent = 0
        #: Finished or closed: the connection may serve another request.
        self.is_over = False
        self.status = 0
        #: As received: order, case and duplicates kept.
        self.headers: Headers = []
        #: Pieces of the body that have not been read.
        self.pieces: list[bytes] = []
        #: The head has arrived; the whole answer has arrived.
        self.has_head = self.is_done = False
        #: By its framing and fields, the connection may be used again.
        self.is_reusable = False
        #: No byte has arrived.
        self.is_silent = True
        #: Why no more will arrive though it is not done, closed or protocol; empty while more may.
        self.reason = ""
        #: Bytes of the pieces, the overhead of their objects included.
        self.size = 0

    def take(self) -> bytes:
        """Return what has arrived of the body since the last call; empty if nothing has."""
        pieces = self.pieces
        self.pieces = []
        self.size = 0
        self._wire.taken()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read(self) -> bytes:
        """Wait for the next piece of the body and return it; empty at its end.

        Raises:
            AnswerBroken: the connection ended or broke HTTP within the body.
        """
        while not self.pieces:
            if self.is_done:
                return b""
            if self.reason:
                raise AnswerBroken(self.reason)
            await self._wire.arrival()
        return self.take()

    async def relay(self, sink: Callable[[bytes], bool]) -> bool:
        """Call *sink* with each piece of the body as soon as it arrives, without a change of tasks in between.

        Args:
            sink: takes a piece; returns whether it takes more now.

        Returns:
            True at the end of the body; False once *sink* takes no more.

        Raises:
            AnswerBroken: the connection ended or broke HTTP within the body.
            Exception: as *sink* raised it.
        """
        while True:
            if self.pieces and not sink(self.take()):
                return False
            if self.is_done:
                return True
            if self.reason:
                raise AnswerBroken(self.reason)
            if not await self._wire.arrival(sink):
                return False

    @property
    def is_whole(self) -> bool:
        """It has arrived and been read to its end."""
        return self.is_done and not self.pieces

    def finish(self) -> None:
        """Give the connection back after the body was read to its end."""
        if not self.is_over:
            self.is_over = True
            self._wire.finish(self)

    def close(self) -> None:
        """Close the connection, which makes the engine stop."""
        if not self.is_over:
            self.is_over = True
            self._wire.abort()

    # From the connection

    def feed(self, data: bytes | memoryview) -> bool:
        """Parse *data*; returns False when the connection must close."""
        parser = self._parser
        if self.is_done or self.reason or parser is None:
            return False  # bytes after an answer, or after malformed ones
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
        """Note the end of the instance's side, which ends a body without a length."""
        if self.has_head and not (self._has_length or self._is_chunked or self.reason):
            self.is_done = True

    def cut(self) -> None:
        """Note that no more will arrive."""
        self._parser = None  # it refers back to this
        self.is_reusable = False
        if not self.is_done and not self.reason:
            self.reason = "closed"

    # From the parser

    def on_message_begin(self) -> None:
        """Begin the answer; refuse a second one."""
        if self.is_done:
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a field; trailer fields are dropped."""
        length = len(name)
        self._field_count = count = self._field_count + 1
        self._field_bytes = size = self._field_bytes + length + len(value)
        if count > MAX_FIELDS or size > MAX_HEAD_BYTES:
            raise _Refused
        if self.has_head:
            return
        self.headers.append((name, value))
        if length == 14 and name.lower() == b"content-length":
            if len(value) > MOST_DIGITS:
                raise _Refused
            self._has_length = True
        elif length == 17 and name.lower() == b"transfer-encoding":
            # No other coding was asked for, and a second one would have to be undone.
            if self._is_chunked or value.strip().lower() != b"chunked":
                raise _Refused
            self._is_chunked = True

    def on_headers_complete(self) -> None:
        """End the head, or that of an interim answer."""
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
        """Read a piece of the body."""
        if self.is_done:
            raise _Refused
        self.pieces.append(data)
        self.size += len(data) + PIECE_OVERHEAD
        self._unspent = 0

    def on_message_complete(self) -> None:
        """End the answer, or an interim one."""
        if self._is_interim:
            self._is_interim = False
        elif not self.is_done:
            assert self._parser is not None
            self.is_done = True
            self.is_reusable = self._parser.should_keep_alive()


class UpstreamConnection(asyncio.BufferedProtocol):
    """Keep-alive connection to an instance, with one request at a time.

    Args:
        loop: the event loop.
        just_read: buffer of `READ_BYTES`, shared by the connections of a loop: it is parsed before the next read.
        on_made: called when the connection is established.
        on_idle: called when it may serve another request.
        on_lost: called when it has ended.
    """

    __slots__ = (
        "_is_congested",
        "_is_lost",
        "_is_paused",
        "_is_spoilt",
        "_just_read",
        "_loop",
        "_on_idle",
        "_on_lost",
        "_on_made",
        "_poll",
        "_sink",
        "_transport",
        "_unsent",
        "_waiter",
        "answer",
        "born_at",
        "idle_since",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        just_read: memoryview,
        on_made: Callable[[UpstreamConnection], None],
        on_idle: Callable[[UpstreamConnection], None],
        on_lost: Callable[[UpstreamConnection], None],
    ) -> None:
        self._loop = loop
        self._just_read = just_read
        self._on_made = on_made
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        #: Takes each piece of a body that is relayed.
        self._sink: Callable[[bytes], bool] | None = None
        self._poll = select.poll()
        self._unsent: memoryview | None = None
        self._is_congested = self._is_paused = self._is_lost = False
        #: It must not be used again.
        self._is_spoilt = False
        #: Response to the request that is under way.
        self.answer: UpstreamResponse | None = None
        #: Seconds on the loop's clock.
        self.born_at = loop.time()
        self.idle_since = 0.0

    def is_fresh(self) -> bool:
        """Return whether it is open and nothing has arrived since it was idle, neither bytes nor its end."""
        return not self._is_lost and not self._poll.poll(0)

    async def ask(self, answer: UpstreamResponse, head: bytes, body: bytes | None) -> UpstreamResponse:
        """Send a request and wait for the head of its *answer*; without one the connection is closed.

        Args:
            answer: the answer.
            head: request line and fields, with the empty line.
            body: the body, or None.

        Raises:
            UpstreamFailed: closed or protocol.
        """
        self.answer = answer
        transport = self._transport
        assert transport is not None
        try:
            if body is None or len(body) <= JOIN_BYTES:
                transport.write(head if body is None else head + body)
            elif len(body) <= WRITE_BYTES:
                transport.writelines((head, body))
            else:
                self._unsent = memoryview(body)
                transport.write(head)
                self._push()
            while not answer.has_head:
                if self._is_lost:
                    answer.cut()
                if answer.reason:
                    raise UpstreamFailed(answer.reason)
                await self.arrival()
            if answer.reason == "protocol" and not answer.pieces:
                raise UpstreamFailed("protocol")
        except BaseException:
            self.abort()
            raise
        return answer

    async def arrival(self, sink: Callable[[bytes], bool] | None = None) -> bool:
        """Wait until more has arrived. Pieces of the body go to *sink*, if there is one, and do not end the wait.

        Returns:
            False if *sink* takes no more.
        """
        self._waiter = self._loop.create_future()
        self._sink = sink
        try:
            await self._waiter
            return self._sink is sink
        finally:
            self._sink = None

    def taken(self) -> None:
        """Read on, now that the answer's pieces have been taken."""
        if self._is_paused and not self._is_lost:
            assert self._transport is not None
            self._is_paused = False
            self._transport.resume_reading()

    def finish(self, answer: UpstreamResponse) -> None:
        """Keep the connection, after *answer* was read to its end, if it may be used again."""
        transport = self._transport
        assert transport is not None
        is_sent = self._unsent is None and not transport.get_write_buffer_size()
        if answer.is_whole and answer.is_reusable and is_sent and not (self._is_spoilt or self._is_lost):
            self._let_go()
            self._on_idle(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        self._unsent = None
        self._is_paused = False
        self._is_spoilt = True
        self._let_go()
        if self._transport is not None and not self._is_lost:
            self._transport.abort()

    def _let_go(self) -> None:
        """Detach the answer, which refers back to this."""
        if self.answer is not None:
            self.answer.cut()
            self.answer = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    # Writing

    def _push(self) -> None:
        """Write what the socket takes of the body.

        Read first: the instance may have refused the request and reset the connection. A write then fails, and what has
        arrived before the reset is lost.
        """
        transport = self._transport
        assert transport is not None
        while self._unsent is not None and not (self._is_congested or transport.is_closing()):
            if not self._is_paused and self._poll.poll(0):
                self._loop.call_soon(self._push)
                return
            piece, rest = self._unsent[:WRITE_BYTES], self._unsent[WRITE_BYTES:]
            self._unsent = rest if len(rest) else None
            transport.write(piece)

    def pause_writing(self) -> None:
        """Note that the transport takes no more."""
        self._is_congested = True

    def resume_writing(self) -> None:
        """Note that the transport takes more."""
        self._is_congested = False
        self._push()

    # Reading

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._on_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into."""
        return self._just_read

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what has arrived and wake the task that waits for it."""
        answer = self.answer
        if answer is None or not answer.feed(self._just_read[:nbytes]):
            self.abort()
        elif self._sink is not None and answer.pieces and not answer.is_done:
            self._relay_piece(answer, self._sink)
            return
        elif answer.size >= HIGH_BYTES and not (self._is_paused or answer.is_done):
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        if answer is None:
            return
        if answer.status >= 400 and self._unsent is not None:
            # The request is refused: the rest of it is not sent, and no other request can follow.
            self._unsent = None
            self._is_spoilt = True
        if answer.has_head or answer.reason:
            self._wake()

    def _relay_piece(self, answer: UpstreamResponse, sink: Callable[[bytes], bool]) -> None:
        """Hand what has arrived to *sink*. Wake the reader if *sink* takes no more; the end of a body wakes it too."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # its task has been cancelled
        try:
            if sink(answer.take()):
                return
            self._sink = None
        except Exception as error:  # noqa: BLE001 - its reader raises it
            waiter.set_exception(error)
        self._wake()

    def eof_received(self) -> None:
        """Close; what is still to be sent is dropped."""
        if self.answer is not None:
            self.answer.end()
        assert self._transport is not None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._is_lost = True
        self._unsent = None
        if self.answer is not None:
            self.answer.close()
        self._wake()
        self._on_lost(self)

"""One keep-alive connection to an instance: a request goes out over it, in pieces, and its answer comes in.

A connection that did anything odd is never used again. What comes is read by `answer.py`; where connections come from
and wait between requests is `pool.py`; deadlines are the caller's.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import cast

from smetric.proxy.answer import Answer

#: Reading pauses while this much of an answer waits for its reader, and so much is read at a time: a client that never
#: reads holds less than four times as much, on both sides together.
HIGH_BYTES = 32 * 1024
READ_BYTES = 64 * 1024
#: A body is handed to the socket in pieces of this size, so that other requests are served in between.
WRITE_BYTES = 256 * 1024
#: A body of at most this size is cheaper to copy behind the head than to write apart.
JOIN_BYTES = 16 * 1024


class UpstreamFailed(Exception):
    """A request to an instance failed before any byte of its answer could be passed on.

    `reason` is one of: connect_error (refused, unreachable, no name, no trusted certificate), connect_timeout,
    exhausted (this process can open no more connections), closed (the connection ended), protocol (what came was not
    HTTP). The cause's text is never shown to clients: it can quote bytes.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreachable(UpstreamFailed):
    """Nobody answers there, for now."""


class AnswerBroken(Exception):
    """An answer ended before it was complete."""


class Wire(asyncio.BufferedProtocol):
    """A connection that carries one request at a time.

    Args:
        loop: where it lives.
        just_read: `READ_BYTES` for what has just been read; all connections of a loop share them, as what has been read
            is fed on before anything else is read.
        on_made: told when it is established.
        on_idle: told when it may carry another request.
        on_lost: told when it has ended.
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
        on_made: Callable[[Wire], None],
        on_idle: Callable[[Wire], None],
        on_lost: Callable[[Wire], None],
    ) -> None:
        self._loop = loop
        self._just_read = just_read
        self._on_made = on_made
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._poll = select.poll()
        self._unsent: memoryview | None = None
        self._is_congested = self._is_paused = self._is_lost = False
        #: It must not carry another request.
        self._is_spoilt = False
        #: To the request that is under way, None while there is none.
        self.answer: Answer | None = None
        #: Seconds on the loop's clock.
        self.born_at = loop.time()
        self.idle_since = 0.0

    # What the pool and the answer do with it.

    def is_fresh(self) -> bool:
        """Still open, and nothing has come that nobody asked for, neither bytes nor its end."""
        return not self._is_lost and not self._poll.poll(0)

    async def ask(self, answer: Answer, head: bytes, body: bytes | None) -> Answer:
        """Send a request and wait for the head of its *answer*; the connection is given up where none comes.

        Args:
            answer: what is to come.
            head: request line and fields, with the empty line.
            body: what follows; None for nothing.

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
                self._waiter = self._loop.create_future()
                await self._waiter
            if answer.reason == "protocol" and not answer.pieces:
                raise UpstreamFailed("protocol")
        except BaseException:
            self.abort()
            raise
        return answer

    async def read(self, answer: Answer) -> bytes:
        """Whatever has arrived of the body; empty at its end.

        Raises:
            AnswerBroken: the connection ended or spoke nonsense in the middle.
        """
        while not answer.pieces:
            if answer.is_done:
                return b""
            if answer.reason:
                raise AnswerBroken(answer.reason)
            self._waiter = self._loop.create_future()
            await self._waiter
        return answer.take()

    def taken(self) -> None:
        """What had come of the answer has been taken."""
        if self._is_paused and not self._is_lost:
            assert self._transport is not None
            self._is_paused = False
            self._transport.resume_reading()

    def finish(self, answer: Answer) -> None:
        """The *answer* has been read to its end; keep the connection if it may be kept."""
        transport = self._transport
        assert transport is not None
        is_sent = self._unsent is None and not transport.get_write_buffer_size()
        if answer.is_whole and answer.is_reusable and is_sent and not (self._is_spoilt or self._is_lost):
            self._let_go()
            self._on_idle(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once, whatever is still on its way."""
        self._unsent = None
        self._is_paused = False
        self._is_spoilt = True
        self._let_go()
        if self._transport is not None and not self._is_lost:
            self._transport.abort()

    def _let_go(self) -> None:
        """No more of an answer will come; it refers back to this."""
        if self.answer is not None:
            self.answer.cut()
            self.answer = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
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

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to read to."""
        return self._just_read

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on what has arrived, and wake who waits."""
        answer = self.answer
        if answer is None or not answer.feed(self._just_read[:nbytes]):
            self.abort()
        elif answer.size >= HIGH_BYTES and not (self._is_paused or answer.is_done):
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        if answer is None:
            return
        if answer.status >= 400 and self._unsent is not None:
            # It has been refused: what is left need not be sent, and so no other request can follow.
            self._unsent = None
            self._is_spoilt = True
        if answer.has_head or answer.reason:
            self._wake()

    def eof_received(self) -> None:
        """The instance sends no more: nobody waits until it has taken what is still to be sent to it."""
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

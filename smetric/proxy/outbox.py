"""What a client is sent: each write within a deadline, and a half-read request answered so that the answer arrives."""

from __future__ import annotations

from smetric.proxy.asgi import Message, Send
from smetric.proxy.headers import Headers
from smetric.proxy.inbox import Inbox
from smetric.proxy.transaction import Transaction


class Outbox:
    """An ASGI `send` that bounds each write in time and closes the connection behind an answer to a half-read request.

    Such an answer must reach a client that is still sending, so the rest of the body is read and dropped meanwhile; our
    own server does that by itself.
    """

    __slots__ = ("_inbox", "_lingers", "_send", "_send_timeout_s", "_transaction", "_watchdog", "is_last", "status")

    def __init__(self, send: Send, inbox: Inbox, send_timeout_s: float) -> None:
        self._send = send
        self._inbox = inbox
        self._transaction = inbox.transaction
        self._watchdog = inbox.watchdog
        self._send_timeout_s = send_timeout_s
        self._lingers = False
        #: Of the answer, once its head has been handed to the server; 0 until then.
        self.status = 0
        #: The connection ends with this answer.
        self.is_last = False

    async def begin(self, status: int, headers: Headers, piece: bytes = b"", *, is_last: bool = False) -> None:
        """Send the head of an answer, and its first piece if there is one already: one write for both, where it can be.

        Args:
            status: of the answer.
            headers: its fields.
            piece: the first of its body; empty if that is still to come.
            is_last: nothing follows *piece*.
        """
        transaction = self._transaction
        if transaction is None:
            await self({"type": "http.response.start", "status": status, "headers": headers})
            if piece or is_last:
                await self.pass_on(piece, is_last=is_last)
            return
        self.status = status
        if self.is_last:
            headers = [*headers, (b"connection", b"close")]
        is_held = bool(piece) or is_last
        transaction.start(status, headers, is_held=is_held)
        if is_held:
            self._write(transaction, piece, is_last)
        if transaction.is_full:
            await self._drained(transaction)

    async def pass_on(self, piece: bytes, *, is_last: bool = False) -> None:
        """Send *piece* of an answer that has begun; *is_last*: nothing follows."""
        transaction = self._transaction
        if transaction is None:
            await self({"type": "http.response.body", "body": piece, "more_body": not is_last})
            return
        self._write(transaction, piece, is_last)
        if transaction.is_full:
            await self._drained(transaction)

    def _write(self, transaction: Transaction, piece: bytes, is_last: bool) -> None:
        if is_last:
            self._inbox.answered = True
        transaction.write(piece, is_last=is_last)

    async def _drained(self, transaction: Transaction) -> None:
        """A write to our own server takes time only where the client is slow to read."""
        self._watchdog.arm(self._send_timeout_s, "send")
        await transaction.drained()

    async def __call__(self, message: Message) -> None:
        """Send one ASGI message."""
        self._watchdog.arm(self._send_timeout_s, "send")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._inbox.must_drain:
                self._lingers = self.is_last = True
                self._inbox.drain()
            if self.is_last:
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        elif not message.get("more_body", False):
            if self._lingers:
                if message.get("body"):
                    await self._send({"type": "http.response.body", "body": message["body"], "more_body": True})
                await self._inbox.linger()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            self._inbox.answered = True
        await self._send(message)

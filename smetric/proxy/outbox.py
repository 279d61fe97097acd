"""What a client is sent: each write within a deadline, and a half-read request answered so that the answer arrives."""

from __future__ import annotations

from smetric.proxy.asgi import Message, Send
from smetric.proxy.inbox import Inbox


class Outbox:
    """An ASGI `send` that bounds each write in time and closes the connection behind an answer to a half-read request.

    Such an answer must reach a client that is still sending, so the rest of the body is read and dropped meanwhile; our
    own server does that by itself.
    """

    __slots__ = ("_inbox", "_lingers", "_send", "_send_timeout_s", "_watchdog", "is_last", "started")

    def __init__(self, send: Send, inbox: Inbox, send_timeout_s: float) -> None:
        self._send = send
        self._inbox = inbox
        self._watchdog = inbox.watchdog
        self._send_timeout_s = send_timeout_s
        self._lingers = False
        #: The answer's head has been handed to the server.
        self.started = False
        #: The connection ends with this answer.
        self.is_last = False

    async def __call__(self, message: Message) -> None:
        """Send one ASGI message."""
        self._watchdog.arm(self._send_timeout_s, "send")
        if message["type"] == "http.response.start":
            self.started = True
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

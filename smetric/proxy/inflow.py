"""What a client sends, read or left with the system for now; the system says meanwhile whether the client has left.

When to read is `http1.py`'s, and the end of a connection that is read.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

#: Seconds between two looks.
EVERY_S = 0.05
#: The other side has closed its own; where the system has no word for that, only that the connection is gone.
_CLOSED = getattr(select, "POLLRDHUP", 0)


def polled(transport: asyncio.BaseTransport, event: int) -> bool:
    """Whether the system says *event* of a connection, such as `select.POLLIN`, or that it is gone."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), event)
    return bool(poll.poll(0))


class Inflow:
    """Pauses and resumes the reading of one connection, and looks for its client's departure while it is not read.

    Args:
        transport: the connection, which is read.
        left: called once, when the client has left.
    """

    __slots__ = ("_left", "_loop", "_timer", "_transport", "is_paused")

    def __init__(self, transport: asyncio.Transport, left: Callable[[], object]) -> None:
        self._transport = transport
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.is_paused = False

    def pause(self, is_paused: bool) -> None:
        """Whether to leave with the system what comes; nothing is left once the connection closes."""
        if is_paused is self.is_paused or self._transport.is_closing():
            return
        self.is_paused = is_paused
        if is_paused:
            self._transport.pause_reading()
            self._watch()
        else:
            self._transport.resume_reading()

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self.is_paused or self._transport.is_closing():
            return
        if polled(self._transport, _CLOSED):
            self._left()
        else:
            self._watch()

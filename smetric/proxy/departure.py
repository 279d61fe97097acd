"""Word of a client's departure while nothing of its connection is read: the system knows of it all the same.

Where a connection is read its end is read too, which is `http1.py`'s.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable

#: Seconds between two looks.
EVERY_S = 0.05
#: The other side has closed its own; where the system has no word for that, only that the connection is gone.
_CLOSED = getattr(select, "POLLRDHUP", 0)


class Departure:
    """Looks for the departure of one client as long as its connection is not read.

    Args:
        transport: the connection.
        left: called once, when the client has left.
    """

    __slots__ = ("_left", "_loop", "_poll", "_timer", "_transport", "is_read")

    def __init__(self, transport: asyncio.BaseTransport, left: Callable[[], object]) -> None:
        self._transport = transport
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), _CLOSED)
        self._timer: asyncio.TimerHandle | None = None
        #: The connection is read again: there is nothing to look for.
        self.is_read = True

    def watch(self) -> None:
        """From now on nothing is read."""
        self.is_read = False
        if self._timer is None:
            self._timer = self._loop.call_later(EVERY_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if self.is_read or self._transport.is_closing():
            return
        if self._poll.poll(0):
            self._left()
        else:
            self.watch()

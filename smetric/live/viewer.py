"""One who watches the stream: which decisions of it he gets, and a short queue before his connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from smetric.live.row import ending
from smetric.live.wish import Wish
from smetric.telemetry import names

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord

#: Messages that may wait for a connection: some ten seconds of them. Who is slower is sent away and may come again.
MOST_WAITING = 48
#: Decisions shown whose requests have not ended.
_MOST_OPEN = 512


class Viewer:
    """Gets messages as server-sent events.

    Args:
        wish: which decisions.
    """

    def __init__(self, wish: Wish) -> None:
        self.wish = wish
        self._messages: deque[bytes] = deque()
        self._changed = asyncio.Event()
        #: Nothing more is sent.
        self.is_over = False
        #: Ids of decisions shown whose end has not been.
        self._open: dict[str, None] = {}

    def show(
        self,
        decided: Sequence[DecisionRecord],
        ended: Sequence[DecisionRecord],
        most: int,
        row_of: Callable[[DecisionRecord], dict[str, Any]],
    ) -> None:
        """Send *most* of the decisions that fit, and how those shown before have ended."""
        fitting = [record for record in decided if self.wish.fits(record)]
        shown = sample(fitting, most)
        if fitting:
            self.send("decisions", {"matched": len(fitting), "rows": [row_of(record) for record in shown]})
        for record in shown:
            if record.duration_s is None and not record.followed_by:
                self._open[record.id] = None
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        ends = [ending(record) for record in ended if record.id in self._open]
        if ends:
            for end in ends:
                del self._open[end["id"]]
            self.send("ended", ends)

    def send(self, event: str, data: Any) -> None:
        """Send one message."""
        self.put(encoded(event, data))

    def put(self, message: bytes) -> None:
        """Send one encoded message; where too many wait already, the viewer is sent away."""
        if len(self._messages) >= MOST_WAITING:
            self._messages.clear()
            self.leave("slow")
        elif not self.is_over:
            self._messages.append(message)
            self._changed.set()

    def leave(self, why: str) -> None:
        """Say *why* it is over, and end."""
        if not self.is_over:
            self.is_over = True
            self._messages.append(encoded("over", {"why": why}))
            self._changed.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """All messages, as they come."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self.is_over:
                return
            self._changed.clear()
            await self._changed.wait()


def sample(records: Sequence[DecisionRecord], most: int) -> list[DecisionRecord]:
    """At most *most* of *records*, in their order: those out of the ordinary first, then others evenly spread."""
    if len(records) <= most:
        return list(records)
    taken = set(_spread([i for i, record in enumerate(records) if record.outcome not in names.ORDINARY], most))
    moved = [i for i, record in enumerate(records) if record.migration is not None and i not in taken]
    taken.update(_spread(moved, most - len(taken)))
    rest = [i for i in range(len(records)) if i not in taken]
    taken.update(_spread(rest, most - len(taken)))
    return [records[i] for i in sorted(taken)]


def _spread(places: Sequence[int], most: int) -> Sequence[int]:
    return places if len(places) <= most else [places[k * len(places) // most] for k in range(most)]


def encoded(event: str, data: Any) -> bytes:
    """A server-sent event; JSON holds no line break."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS))

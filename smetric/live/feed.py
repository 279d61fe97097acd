"""The feed of the live page: looks at what happened four times a second, and tells every viewer within bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from smetric.live.figures import Figures
from smetric.live.row import row
from smetric.live.viewer import Viewer, encoded
from smetric.live.wish import Wish
from smetric.telemetry.activity import Activity
from smetric.telemetry.decisions import DecisionLog

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord

#: Looks a second while somebody watches.
LOOKS = 4
#: Decisions that one viewer is shown a second, at most.
MOST_A_SECOND = 20
#: Who may watch at the same time.
MOST_VIEWERS = 16
#: Decisions of before that a new viewer is shown.
BEFORE = 40

log = structlog.get_logger("smetric.live")


class TooManyViewers(Exception):
    """There are as many as there may be."""


class Feed:
    """Tells viewers what happens.

    Args:
        activity: what happened.
        figures: the figures it adds to.
        decisions: the last decisions.
        about: what is true of the router as a whole, such as its policy; asked once a second.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        activity: Activity,
        figures: Figures,
        decisions: DecisionLog,
        about: Callable[[], dict[str, Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.figures = figures
        self._activity = activity
        self._decisions = decisions
        self._about = about
        self._clock = clock
        self._viewers: list[Viewer] = []
        self._came = asyncio.Event()
        self._next_second = clock() + 1.0
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    async def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="live-feed")

    async def stop(self) -> None:
        """Send the viewers away, and those who come yet, and end."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for viewer in self._viewers:
            viewer.leave("ending")

    def state(self) -> dict[str, Any]:
        """What is true of the router, and the figures of the last second."""
        return {**self._about(), **self.figures.state()}

    def join(self, wish: Wish, *, history: bool) -> Viewer:
        """Someone wants to watch; with *history*, beginning with the last ten minutes.

        Raises:
            TooManyViewers: there are enough.
        """
        if len(self._viewers) >= MOST_VIEWERS:
            raise TooManyViewers(f"{MOST_VIEWERS} watch already")
        self.look()  # so that what happened until now is not told twice
        viewer = Viewer(wish)
        if history:
            viewer.send("history", self.figures.history())
        viewer.send("state", self.state())
        before = [record for record in self._decisions.recent(len(self._decisions)) if wish.fits(record)][:BEFORE]
        viewer.show(before[::-1], (), BEFORE, row)
        if self._is_over:
            viewer.leave("ending")
            return viewer
        self._viewers.append(viewer)
        self._came.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """*viewer* has gone."""
        if viewer in self._viewers:
            self._viewers.remove(viewer)

    def look(self) -> None:
        """Tell everyone what happened since the last look."""
        decided, ended = self._activity.take()
        self.figures.add(decided, ended)
        now = self._clock()
        is_second = now >= self._next_second
        if is_second:
            self._next_second = max(self._next_second + 1.0, now)
            self.figures.close_second()
        self._viewers = [viewer for viewer in self._viewers if not viewer.is_over]
        if not self._viewers:
            return
        rows: dict[str, dict[str, Any]] = {}

        def row_of(record: DecisionRecord) -> dict[str, Any]:
            if record.id not in rows:
                rows[record.id] = row(record)
            return rows[record.id]

        state = encoded("state", self.state()) if is_second else b""
        for viewer in self._viewers:
            viewer.show(decided, ended, MOST_A_SECOND // LOOKS, row_of)
            if state:
                viewer.put(state)

    async def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                log.exception("smetric.live.failed")
            wait_s = 1.0 / LOOKS
            if self._viewers:
                await asyncio.sleep(wait_s)
                continue
            # Nobody watches: once a second is enough, until somebody comes.
            self._came.clear()
            try:
                async with asyncio.timeout(max(wait_s, self._next_second - self._clock())):
                    await self._came.wait()
            except TimeoutError:
                continue

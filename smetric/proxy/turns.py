"""The task in which an app answers the requests of one connection, one after the other: a task for each costs more.

Which request comes next, and when, is `http1.py`'s.
"""

from __future__ import annotations

import asyncio
from typing import cast

from smetric.proxy.asgi import App
from smetric.proxy.transaction import Transaction
from smetric.proxy.watchdog import Timer, Watchdog


class Turns:
    """Whose turn it is to be answered.

    Args:
        app: what answers.
        timer: of deadlines.
        loop: where the task runs.
    """

    __slots__ = ("_app", "_is_over", "_loop", "_next", "_timer", "_turn", "task")

    def __init__(self, app: App, timer: Timer, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._timer = timer
        self._loop = loop
        self._is_over = False
        #: What the task is to take up, and what it waits on for that.
        self._turn: Transaction | None = None
        self._next: asyncio.Future[None] | None = None
        #: None before the first request.
        self.task: asyncio.Task[None] | None = None

    def take(self, turn: Transaction) -> None:
        """*turn* is next, and the one before has been answered."""
        self._turn = turn
        if self.task is None or self.task.done():
            self.task = self._loop.create_task(self._serve())
        elif self._next is not None and not self._next.done():
            self._next.set_result(None)

    def end(self) -> None:
        """The client has left: end once the app has."""
        self._is_over = True
        if self._next is not None and not self._next.done():
            self._next.set_result(None)

    async def _serve(self) -> None:
        task = cast("asyncio.Task[None]", self.task)
        watchdog = Watchdog(task, self._timer)
        try:
            while True:
                turn, self._turn = self._turn, None
                if turn is not None:
                    await turn.run(self._app, task, watchdog)
                elif self._is_over:
                    break
                else:
                    self._next = self._loop.create_future()
                    await self._next
        finally:
            if self._turn is not None:  # cancelled behind an answer, with another request at hand
                self.task = self._loop.create_task(self._serve())

"""Overload of the router itself."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from statistics import median

import structlog

from smetric.http import footprint

#: Seconds between two looks at the loop; memory and files are looked at every tenth time.
LOOK_S = 0.1
_EVERY = 10
#: Looks of which the middle one counts: one long step, such as a collection of garbage, is no overload.
_LOOKS = 5
#: Seconds between two times that free memory is given back to the system.
GIVE_BACK_S = 10.0

log = structlog.get_logger("smetric.overload")


class Level(IntEnum):
    """How much there is to do about it."""

    #: Nothing.
    CALM = 0
    #: Take no more than is under way, and nothing that a client sends again.
    SOFT = 1
    #: Take nothing new.
    HARD = 2


@dataclass(frozen=True, slots=True)
class Thresholds:
    """From which value on there is something to do: the soft level, and the hard one."""

    soft: float
    hard: float

    def level(self, value: float) -> Level:
        """Of *value*."""
        return Level.HARD if value >= self.hard else Level.SOFT if value >= self.soft else Level.CALM


class Overload:
    """Looks at the router from `start` to `stop`.

    Args:
        lag: seconds by which the event loop is late.
        share: of memory and of open files, 0..1.
        memory_bytes: what the process may take; None: its container's limit, if it has one.
        on_lag: told each time how late the loop was.
        resident_bytes: memory the process takes.
        open_files: files it has open.
        give_back: returns free memory to the system.
    """

    def __init__(
        self,
        lag: Thresholds,
        share: Thresholds,
        *,
        memory_bytes: int | None = None,
        on_lag: Callable[[float], object] = lambda _: None,
        resident_bytes: Callable[[], int | None] = footprint.resident_bytes,
        open_files: Callable[[], int | None] = footprint.open_files,
        give_back: Callable[[], None] = footprint.give_back,
    ) -> None:
        self._thresholds = {"lag": lag, "memory": share, "files": share}
        #: What the process may take; None where nobody says.
        self.memory_bytes = memory_bytes or footprint.memory_limit()
        self._on_lag = on_lag
        self._resident_bytes = resident_bytes
        self._open_files = open_files
        self._give_back = give_back
        self._lags: deque[float] = deque(maxlen=_LOOKS)
        self._looks = 0
        self._given_back_at = -GIVE_BACK_S
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        #: The level of each resource, and its value as a share of the soft threshold: from 1 on requests are refused.
        self.levels = dict.fromkeys(self._thresholds, Level.CALM)
        self.shares = dict.fromkeys(self._thresholds, 0.0)
        #: The highest level, whose it is, and how many times it has risen from calm.
        self.level = Level.CALM
        self.resource = ""
        self.times = 0

    async def start(self) -> None:
        """Begin to look."""
        self._look_at(asyncio.get_running_loop().time() + LOOK_S)

    async def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, due: float) -> None:
        self._due = due
        self._timer = asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        self.looked(max(0.0, now - self._due))
        self._look_at(max(self._due + LOOK_S, now))

    def looked(self, lag_s: float) -> None:
        """A look that was due came *lag_s* seconds late: judge."""
        self._on_lag(lag_s)
        self._lags.append(lag_s)
        self._judge("lag", median(self._lags) if len(self._lags) == _LOOKS else 0.0)
        if self._looks % _EVERY == 0:
            resident, files = self._resident_bytes(), self._open_files()
            if self.memory_bytes is not None and resident is not None:
                self._judge("memory", resident / self.memory_bytes)
            if files is not None:
                self._judge("files", files / footprint.most_files())
            self._spare_memory()
        self._looks += 1

    def _judge(self, resource: str, value: float) -> None:
        thresholds = self._thresholds[resource]
        self.shares[resource] = value / thresholds.soft
        level = thresholds.level(value)
        if level is not self.levels[resource]:
            tell = log.info if level is Level.CALM else log.warning
            tell("smetric.overload.changed", resource=resource, state=level.name.lower(), value=round(value, 3))
            self.levels[resource] = level
            self.resource = max(self.levels, key=lambda each: self.levels[each])
            if self.level is Level.CALM and level is not Level.CALM:
                self.times += 1
            self.level = self.levels[self.resource]

    def _spare_memory(self) -> None:
        """Give free memory back while there is too little: otherwise what was taken once would count for ever."""
        if self.levels["memory"] is not Level.CALM and time.monotonic() - self._given_back_at >= GIVE_BACK_S:
            self._given_back_at = time.monotonic()
            self._give_back()

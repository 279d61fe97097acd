"""Overload of the router itself: lateness of its event loop, memory, open files."""

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

#: Interval of measurements, seconds. Memory and files are measured every tenth time.
INTERVAL_S = 0.1
_EVERY = 10
#: Number of measurements of which the median counts: one long step, such as a garbage collection, is no overload.
_MEDIAN_OF = 5
#: Shortest time between two calls that return free memory to the system, seconds.
GIVE_BACK_S = 10.0

log = structlog.get_logger("smetric.overload")


class Level(IntEnum):
    """Level of overload."""

    CALM = 0
    #: Admit no more requests than are under way, and no retries of clients.
    SOFT = 1
    #: Admit no new requests.
    HARD = 2


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Values from which on the soft and the hard level begin."""

    soft: float
    hard: float

    def level(self, value: float) -> Level:
        """Return the level of *value*."""
        return Level.HARD if value >= self.hard else Level.SOFT if value >= self.soft else Level.CALM


class Overload:
    """Overload of the router, measured from `start` to `stop`.

    Args:
        lag: thresholds of the lateness of the event loop, seconds.
        share: thresholds of the shares of memory and of open files, 0 to 1.
        memory_bytes: memory that the process may take; None for the limit of its container, if it has one.
        on_lag: called with each lateness of the loop, seconds.
        resident_bytes: returns the memory that the process takes.
        open_files: returns the number of files that it has open.
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
        #: Memory that the process may take; None for no limit.
        self.memory_bytes = memory_bytes or footprint.memory_limit()
        self._on_lag = on_lag
        self._resident_bytes = resident_bytes
        self._open_files = open_files
        self._give_back = give_back
        self._lags: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._measurements = 0
        self._given_back_at = -GIVE_BACK_S
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        #: Level of each resource, and its value as a share of the soft threshold: requests are refused from 1 on.
        self.levels = dict.fromkeys(self._thresholds, Level.CALM)
        self.shares = dict.fromkeys(self._thresholds, 0.0)
        #: The highest level, its resource, and the number of times that it has risen from calm.
        self.level = Level.CALM
        self.resource = ""
        self.times = 0

    async def start(self) -> None:
        """Start to measure."""
        self._schedule(asyncio.get_running_loop().time() + INTERVAL_S)

    async def stop(self) -> None:
        """Stop to measure."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, due: float) -> None:
        self._due = due
        self._timer = asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        now = asyncio.get_running_loop().time()
        self.measure(max(0.0, now - self._due))
        self._schedule(max(self._due + INTERVAL_S, now))

    def measure(self, lag_s: float) -> None:
        """Determine the levels; the timer of this measurement fired *lag_s* seconds late."""
        self._on_lag(lag_s)
        self._lags.append(lag_s)
        self._judge("lag", median(self._lags) if len(self._lags) == _MEDIAN_OF else 0.0)
        if self._measurements % _EVERY == 0:
            resident, files = self._resident_bytes(), self._open_files()
            if self.memory_bytes is not None and resident is not None:
                self._judge("memory", resident / self.memory_bytes)
            if files is not None:
                self._judge("files", files / footprint.most_files())
            self._give_memory_back()
        self._measurements += 1

    def _judge(self, resource: str, value: float) -> None:
        thresholds = self._thresholds[resource]
        self.shares[resource] = value / thresholds.soft
        level = thresholds.level(value)
        if level is not self.levels[resource]:
            write = log.info if level is Level.CALM else log.warning
            write("smetric.overload.changed", resource=resource, state=level.name.lower(), value=round(value, 3))
            self.levels[resource] = level
            self.resource = max(self.levels, key=lambda each: self.levels[each])
            if self.level is Level.CALM and level is not Level.CALM:
                self.times += 1
            self.level = self.levels[self.resource]

    def _give_memory_back(self) -> None:
        """Return free memory to the system while memory is short: a peak would otherwise count for ever."""
        if self.levels["memory"] is not Level.CALM and time.monotonic() - self._given_back_at >= GIVE_BACK_S:
            self._given_back_at = time.monotonic()
            self._give_back()

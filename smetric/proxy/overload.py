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
#: The median of the lags of so many seconds counts, and of as many measurements at least: one long step of the event
#: loop, such as a garbage collection, is no overload.
SUSTAINED_S = 0.95  # ten measurements, however their sum is rounded
_MEDIAN_OF = 5
#: Means of the load are taken over about so many seconds.
MEAN_S = 10.0
#: Factors of the pace after a second in which the loop was late, and after another one. A pace that exceeds the load
#: by `UNBOUND` binds no longer.
SLOWER, FASTER = 0.9, 1.1
UNBOUND = 1.5
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


class AdmittedRequests:
    """Admitted requests: their number, its recent mean, and their bounds in an overload.

    A late event loop is busy with work that has not been forwarded: reading, deciding, connecting. Open streams cost
    little, so the bound is on new requests a second. It begins at their recent mean. Each second in which the loop
    stays late lowers it by a tenth, to half of that mean at least. Afterwards it rises until it binds no longer.
    """

    def __init__(self) -> None:
        #: Requests admitted and not ended, and those admitted since the last turn.
        self.under_way = 0
        self.admitted = 0
        #: Most requests under way while memory or files are short.
        self.most_under_way = 1.0
        #: Most requests until the next turn; None for no bound.
        self.pace: float | None = None
        self._least_pace = 1.0
        self._mean_under_way = self._mean_rate = 0.0
        self._turns = 0

    @property
    def has_pace(self) -> bool:
        """Whether one more request is within the pace."""
        return self.pace is None or self.admitted < self.pace

    def turn(self, seconds: float, *, is_late: bool) -> None:
        """Adapt pace and means to the last *seconds*; *is_late*: the loop stayed late in them."""
        rate, self.admitted = self.admitted / seconds, 0
        if is_late and self.pace is None:
            self._least_pace = max(1.0, self._mean_rate / 2)
            self.pace = max(1.0, self._mean_rate)
        elif is_late:
            self.pace = max(self._least_pace, SLOWER * min(self.pace or 0.0, rate))
        elif self.pace is not None:
            self.pace *= FASTER
            if self.pace > UNBOUND * max(rate, self._mean_rate):
                self.pace = None
        self._turns += 1
        share = min(1.0, max(1 / self._turns, seconds / MEAN_S))
        self._mean_rate += share * (rate - self._mean_rate)
        self._mean_under_way += share * (self.under_way - self._mean_under_way)

    def bound(self) -> None:
        """Bound the requests under way, as memory or files are short: to their number, or its recent mean."""
        self.most_under_way = max(1.0, self.under_way, self._mean_under_way)


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
        self.load = AdmittedRequests()
        #: Latest lags, the seconds that they cover, and the seconds since the last turn of the load.
        self._lags: deque[float] = deque()
        self._covered_s = 0.0
        self._since_turn_s = 0.0
        self._measurements = 0
        self._given_back_at = -GIVE_BACK_S
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        #: Level of each resource, and its value as a share of the soft threshold: requests are refused from 1 on.
        self.levels = dict.fromkeys(self._thresholds, Level.CALM)
        self.shares = dict.fromkeys(self._thresholds, 0.0)
        #: The highest level, and the resources that are not calm, those of the highest level first.
        self.level = Level.CALM
        self.resources: list[str] = []

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
        self._measure_lag(lag_s)
        if self._measurements % _EVERY == 0:
            resident, files = self._resident_bytes(), self._open_files()
            if self.memory_bytes is not None and resident is not None:
                self._judge("memory", resident / self.memory_bytes)
            if files is not None:
                self._judge("files", files / footprint.most_files())
            self._give_memory_back()
        self._measurements += 1

    def _measure_lag(self, lag_s: float) -> None:
        """Judge the lag by its median, and adapt the load once a second, or as soon as the loop is late."""
        seconds = max(INTERVAL_S, lag_s)
        lags, load = self._lags, self.load
        lags.append(lag_s)
        self._covered_s += seconds
        while len(lags) > _MEDIAN_OF and self._covered_s - max(INTERVAL_S, lags[0]) >= SUSTAINED_S:
            self._covered_s -= max(INTERVAL_S, lags.popleft())
        lag = median(lags) if len(lags) >= _MEDIAN_OF and self._covered_s >= SUSTAINED_S else 0.0
        is_late = lag >= self._thresholds["lag"].soft
        self._since_turn_s += seconds
        if self._since_turn_s >= SUSTAINED_S or (is_late and load.pace is None):
            load.turn(self._since_turn_s, is_late=is_late)
            self._since_turn_s = 0.0
        self._judge("lag", lag, Level.CALM if load.pace is None else Level.SOFT)

    def _judge(self, resource: str, value: float, least: Level = Level.CALM) -> None:
        thresholds = self._thresholds[resource]
        self.shares[resource] = value / thresholds.soft
        level = max(least, thresholds.level(value))
        if level is not self.levels[resource]:
            write = log.info if level is Level.CALM else log.warning
            write("smetric.overload.changed", resource=resource, state=level.name.lower(), value=round(value, 3))
            if resource != "lag" and self.levels[resource] is Level.CALM:
                self.load.bound()
            self.levels[resource] = level
            self.level = max(self.levels.values())
            short = [each for each, one in self.levels.items() if one is not Level.CALM]
            self.resources = sorted(short, key=self.levels.__getitem__, reverse=True)

    def _give_memory_back(self) -> None:
        """Return free memory to the system while memory is short: a peak would otherwise count for ever."""
        if self.levels["memory"] is not Level.CALM and time.monotonic() - self._given_back_at >= GIVE_BACK_S:
            self._given_back_at = time.monotonic()
            self._give_back()

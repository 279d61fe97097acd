from __future__ import annotations

import asyncio

import pytest

from smetric.http import footprint
from smetric.proxy.overload import Level, Overload, Thresholds
from tests.fakes import until

LAG = Thresholds(0.25, 1.0)
SHARE = Thresholds(0.85, 0.95)


class Machine:
    """Measured values as a test sets them."""

    def __init__(self) -> None:
        self.resident = 0
        self.files = 10
        self.given_back = 0

    def watch(self, memory_bytes: int | None = 1000) -> Overload:
        return Overload(
            LAG,
            SHARE,
            memory_bytes=memory_bytes,
            resident_bytes=lambda: self.resident,
            open_files=lambda: self.files,
            give_back=self.give_back,
        )

    def give_back(self) -> None:
        self.given_back += 1


def look(overload: Overload, lag_s: float = 0.0, times: int = 10) -> None:
    for _ in range(times):
        overload.measure(lag_s)


@pytest.mark.parametrize(
    ("lag_s", "level"), [(0.0, Level.CALM), (0.2, Level.CALM), (0.25, Level.SOFT), (0.9, Level.SOFT), (1.0, Level.HARD)]
)
def test_overload_follows_a_loop_that_stays_late(lag_s: float, level: Level) -> None:
    overload = Machine().watch()
    look(overload, lag_s)
    assert (overload.level, overload.levels["lag"]) == (level, level)
    assert overload.shares["lag"] == pytest.approx(lag_s / 0.25)
    look(overload, times=20)
    assert overload.level is Level.CALM


@pytest.mark.parametrize("steps", [[5.0], [5.0, 5.0], [0.54, 0.3], [0.2, 0.0, 0.9, 0.0, 0.9, 0.0]])
def test_overload_ignores_a_hiccup_of_the_loop(steps: list[float]) -> None:
    overload = Machine().watch()
    look(overload)
    overload.load.admitted = 8  # all at once, after an idle time
    for lag_s in steps:
        overload.measure(lag_s)
        assert (overload.level, overload.load.has_pace) == (Level.CALM, True)


def test_overload_slows_admissions_while_the_loop_stays_late_and_lets_them_rise_again() -> None:
    overload = Machine().watch()
    load = overload.load

    def turn(lag_s: float, offered: int) -> int:
        """Return how many of the requests that are offered until the next turn are admitted."""
        while load.has_pace and load.admitted < offered:
            load.admitted += 1
        admitted = load.admitted
        while load.admitted == admitted and admitted:
            overload.measure(lag_s)
        return admitted

    assert [turn(0.0, 100) for _ in range(10)] == [100] * 10
    look(overload, 0.5, times=5)
    late = [turn(0.5, 200) for _ in range(12)]
    assert late == sorted(late, reverse=True)
    assert 45 <= late[-1] <= 55, "half of what was usual"
    assert overload.level is Level.SOFT
    assert turn(0.5, 10) == 10, "below the bound all are admitted"
    recovering = [turn(0.0, 200) for _ in range(20)]
    assert recovering == sorted(recovering)
    assert (recovering[-1], overload.level) == (200, Level.CALM)


@pytest.mark.parametrize(("resident", "level"), [(849, Level.CALM), (850, Level.SOFT), (950, Level.HARD)])
def test_overload_of_memory_has_two_levels_and_gives_free_memory_back(resident: int, level: Level) -> None:
    machine = Machine()
    machine.resident = resident
    overload = machine.watch()
    look(overload, times=1)
    assert (overload.level, overload.resources) == (level, ["memory"] if level else [])
    assert machine.given_back == (level is not Level.CALM)
    look(overload, times=100)
    assert machine.given_back <= 1, "at most once in ten seconds"
    machine.resident = 0
    look(overload)
    assert overload.level is Level.CALM


def test_overload_ignores_memory_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "memory_limit", lambda: None)
    machine = Machine()
    machine.resident = 1 << 50
    overload = machine.watch(memory_bytes=None)
    look(overload)
    assert overload.level is Level.CALM


def test_overload_names_the_resources_that_are_not_calm_the_worst_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "most_files", lambda: 100)
    machine = Machine()
    machine.files, machine.resident = 96, 860
    overload = machine.watch()
    look(overload, times=1)
    assert (overload.level, overload.resources) == (Level.HARD, ["files", "memory"])
    machine.files = 10
    look(overload, lag_s=0.3)
    assert (overload.level, overload.resources) == (Level.SOFT, ["lag", "memory"])


async def test_overload_measures_between_start_and_stop() -> None:
    lags: list[float] = []
    overload = Overload(LAG, SHARE, on_lag=lags.append)
    await overload.start()
    await until(lambda: len(lags) >= 2)
    await overload.stop()
    seen = len(lags)
    assert all(lag >= 0.0 for lag in lags)
    await asyncio.sleep(0.15)
    assert len(lags) == seen

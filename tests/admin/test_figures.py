"""Figures of the live page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from smetric import names
from smetric.admin.figures import KEPT_S, MOST_CELLS, SERIES, WINDOW_S, Figures, imbalance, percentile
from smetric.fleet.instance import Instance, PrefixTokens, Scrape
from smetric.fleet.record import DecisionRecord
from smetric.request.request import Usage
from tests.telemetry import samples


class Board:
    """Figures of *count* instances with a manual clock."""

    def __init__(self, count: int = 2) -> None:
        self.instances = samples.fleet(count)
        self.now = 100.0
        for instance in self.instances:
            instance.scrape = Scrape(99.5, 2.0, 1.0, 0.25, 0)
        self.figures = Figures(lambda: self.instances, lambda: self.now, lambda: int(self.now * 1000))

    def second(self, decided: Sequence[DecisionRecord] = (), ended: Sequence[DecisionRecord] = ()) -> dict[str, Any]:
        """Add the records to a second, close it, and return the state."""
        self.figures.add(decided, ended)
        self.now += 1.0
        self.figures.close_second()
        return self.figures.state()


def test_figures_show_instances_before_the_first_second() -> None:
    state = Board().figures.state()
    assert [row["id"] for row in state["instances"]] == ["gpu-0", "gpu-1"]
    assert state["instances"][0] == {
        "id": "gpu-0",
        "state": "well",
        "requests": 3.0,
        "running": 2.0,
        "waiting": 1.0,
        "kv_usage": 0.25,
        "hit_rate": None,
        "age_s": 0.5,
        "rate": 0.0,
    }
    assert (state["up"], state["rate"], state["ttft_p50_s"], state["predicted"]) == (2, 0.0, None, None)


def test_unscraped_load_is_unknown() -> None:
    board = Board(1)
    board.instances[0].scrape = None
    (row,) = board.figures.state()["instances"]
    assert [row[name] for name in ("running", "waiting", "kv_usage", "age_s")] == [None] * 4
    assert board.figures.state()["age_s"] is None


def test_rates_cover_the_last_seconds() -> None:
    board = Board()
    for _ in range(WINDOW_S + 3):
        state = board.second([samples.record(instances=board.instances, hits=(0, 9), loads=(1, 1)) for _ in range(4)])
    assert state["rate"] == 4.0
    assert [row["rate"] for row in state["instances"]] == [0.0, 4.0]
    for _ in range(WINDOW_S):
        state = board.second()
    assert state["rate"] == 0.0


def test_outcomes_are_shares() -> None:
    decided = [samples.record(), samples.record(), samples.record(), samples.record(names.REJECTED)]
    assert Board().second(decided)["outcomes"] == {"rejected": 0.25, "routed": 0.75}


def test_predicted_and_actual_hits_cover_the_same_requests() -> None:
    counted, uncounted = samples.record(hits=(0, 880, 0)), samples.record(hits=(0, 880, 0))
    blind = samples.record(names.PINNED)
    counted.usage = Usage(1000, 10, 800)
    uncounted.usage = Usage(1000, 10, None)
    blind.usage = Usage(1000, 10, 1000)
    state = Board().second(ended=[counted, uncounted, blind])
    assert (state["predicted"], state["actual"]) == (0.88, 0.8)


def test_predicted_hit_is_bounded_by_an_estimated_prompt() -> None:
    record = samples.record(hits=(0, 1000, 0))  # all of a prompt estimated at 1,000 tokens
    record.usage = Usage(800, 10, 784)
    state = Board().second(ended=[record])
    assert (state["predicted"], state["actual"]) == (1.0, 0.98)


def test_ttft_percentiles_cover_answered_requests() -> None:
    ended = [samples.record() for _ in range(101)]
    for i, record in enumerate(ended[:100]):
        record.ttft_s = (i + 1) / 100
    state = Board().second(ended=ended)
    assert (state["ttft_p50_s"], state["ttft_p99_s"]) == (0.51, 1.0)


def test_engine_hit_rate_covers_a_minute_of_one_process() -> None:
    board = Board(1)
    (instance,) = board.instances

    def hit_rate(tokens: PrefixTokens) -> float | None:
        instance.prefix_tokens = tokens
        rate: float | None = board.second()["instances"][0]["hit_rate"]
        return rate

    assert hit_rate(PrefixTokens(1000, 0, 9000)) is None
    assert hit_rate(PrefixTokens(1600, 200, 9200)) == 0.8
    assert hit_rate(PrefixTokens(0, 0, 10)) is None
    assert hit_rate(PrefixTokens(90, 0, 20)) == 0.9


def test_history_has_a_cell_for_each_second_and_instance() -> None:
    board = Board()
    board.second()
    late = Instance("gpu-9", "http://10.0.0.9:8000")
    board.instances.append(late)
    board.second()
    history = board.figures.history()
    assert history["times_ms"] == [101000, 102000]
    assert history["loads"] == {"gpu-0": [3.0, 3.0], "gpu-1": [3.0, 3.0], "gpu-9": [None, 0.0]}
    assert set(history["series"]) == set(SERIES)
    assert all(len(values) == 2 for values in history["series"].values())
    del board.instances[0]
    board.second()
    assert board.figures.history()["loads"] == {"gpu-1": [3.0, 3.0, 3.0], "gpu-9": [None, 0.0, 0.0]}


@pytest.mark.parametrize(("count", "kept"), [(2, KEPT_S), (512, MOST_CELLS // 512)])
def test_history_is_bounded_in_seconds_and_in_cells(count: int, kept: int) -> None:
    board = Board(2)
    for _ in range(KEPT_S):
        board.second()
    board.instances[:] = samples.fleet(count)
    for _ in range(3):
        board.second()
    assert len(board.figures.history()["times_ms"]) == kept


def test_imbalance_compares_instances_of_the_same_models() -> None:
    small, large = samples.fleet(2), samples.fleet(2, id="large-{}")
    for instance in large:
        instance.models = frozenset({"large"})
    large[0].models, large[0].adapters = frozenset({"large", "tuned"}), frozenset({"tuned"})
    for instance, load in zip([*small, *large], (1, 1, 30, 10), strict=True):
        instance.scrape = Scrape(0.0, load, 0.0, None, 0)
    assert imbalance([*small, *large]) == 1.5
    small[0].draining = True
    assert imbalance(small) == 1.0
    assert imbalance(Board(0).instances) is None


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0

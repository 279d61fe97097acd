from __future__ import annotations

import pytest

from smetric import names
from smetric.admin.feed import DecisionFilter, margin_of
from smetric.fleet.record import Migration
from tests.telemetry import samples


def test_nothing_asked_for_is_everything() -> None:
    assert DecisionFilter.from_query({}).fits(samples.record())
    assert DecisionFilter.from_query({"text": "", "outcome": "", "migrated": "0"}).fits(samples.record(names.ERROR))


@pytest.mark.parametrize(
    ("query", "fits"),
    [
        ({"outcome": "routed"}, True),
        ({"outcome": "rejected"}, False),
        ({"outcome": "odd"}, False),
        ({"rule": "stick"}, True),
        ({"rule": "balance"}, False),
        ({"instance": "gpu-1"}, True),
        ({"instance": "gpu-2"}, False),
        ({"text": "STICK"}, True),
        ({"text": "gpu-1"}, True),
        ({"text": "gpu-2"}, False),
        ({"rule": "stick", "instance": "gpu-2"}, False),
        ({"migrated": "1"}, False),
        ({"margin": "0.05"}, False),
        ({"margin": "1"}, True),
    ],
)
def test_each_filter_chooses(query: dict[str, str], fits: bool) -> None:
    assert DecisionFilter.from_query(query).fits(samples.record(hits=(0, 880, 0), loads=(2, 3, 1))) is fits


def test_the_text_finds_ids_models_and_the_guard_that_failed() -> None:
    record = samples.record(hits=(0, 880, 0), loads=(0, 30, 1), model="Qwen3")
    record.trace_id = "0af7651916cd43dd8448eb211c80319c"
    for text in (record.id[4:12], "0af7", "qwen", "not_overloaded"):
        assert DecisionFilter.from_query({"text": text}).fits(record), text


def test_odd_is_what_is_neither_routed_nor_pinned() -> None:
    odd = DecisionFilter.from_query({"outcome": "odd"})
    assert [odd.fits(samples.record(outcome)) for outcome in names.OUTCOMES] == [False, False, True, True, True, True]


def test_migrated_is_what_telemetry_says_has_migrated() -> None:
    record = samples.record()
    record.migration = Migration("gpu-0", "not_overloaded", 100)
    assert DecisionFilter.from_query({"migrated": "1"}).fits(record)


def test_the_margin_is_a_share_of_the_larger_score() -> None:
    assert margin_of(samples.record(hits=(0, 880, 440))) == 0.5
    assert margin_of(samples.record(hits=(0, 0, 0))) == 0.0
    assert margin_of(samples.record(hits=(880,), loads=(1,))) is None
    assert margin_of(samples.record(names.PINNED)) is None

"""A decision in words, also where no policy ran."""

from __future__ import annotations

import pytest

from smetric import names
from smetric.fleet.record import Forecast, Migration
from smetric.telemetry.decision_text import notes_of, summary_of
from tests.telemetry.samples import fleet, record


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (names.ROUTED, "stick: gpu-1 has the highest hit_len (880)"),
        (names.REJECTED, "full: rejected with 429"),
        (names.PINNED, "pinned: gpu-0 holds the response this request continues"),
        (names.ERROR, "the policy failed to evaluate"),
        (names.NO_CANDIDATE, "no instance may serve this request"),
    ],
)
def test_every_outcome_has_a_sentence(outcome: str, said: str) -> None:
    assert summary_of(record(outcome)).startswith(said)


def test_where_no_policy_ran_for_it_an_instance_is_named() -> None:
    made = record(names.NO_CANDIDATE)
    made.outcome, made.instance = names.ROUTED, fleet()[0]
    assert summary_of(made).startswith("gpu-0: no inference")


def test_whom_a_turn_left_and_what_was_expected_are_noted() -> None:
    made = record()
    assert notes_of(made) == []
    made.migration = Migration("gpu-2", "not_overloaded", 20)
    made.forecast = Forecast(1.0, "gpu-2", 2.0, 3)
    moved, expected = notes_of(made)
    assert moved == "moved    from gpu-2, which keeps 20 tokens more: not_overloaded"
    assert expected == "expected 1 s to the first token, 2 s on gpu-2"

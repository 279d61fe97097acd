from __future__ import annotations

from smetric import names
from tests.telemetry import samples


def test_the_hits_of_a_decision_are_those_that_were_known() -> None:
    made = samples.record(hits=(0, 880, 0), loads=(2, 1, 3), known=[True, True, False])
    assert made.instance is not None
    assert (made.instance.id, made.hit, made.best_hit) == ("gpu-1", (880, "prefix_index"), 880)
    elsewhere = samples.record(hits=(0, 880, 0), loads=(2, 30, 1), known=[True, True, False])
    assert elsewhere.instance is not None
    assert (elsewhere.instance.id, elsewhere.hit, elsewhere.best_hit) == ("gpu-2", None, 880)
    assert samples.record(known=[False] * 3).best_hit is None


def test_where_nobody_was_chosen_only_the_best_hit_is_known_and_without_a_policy_none() -> None:
    rejected, pinned = samples.record(names.REJECTED), samples.record(names.PINNED)
    assert (rejected.hit, rejected.best_hit) == (None, 880)
    assert (pinned.hit, pinned.best_hit) == (None, None)


def test_a_share_of_an_estimated_prompt_is_the_same_share_of_the_counted_one() -> None:
    made = samples.record()  # of 1,000 tokens
    assert made.as_counted(880, 500) == 440
    made.tokens_source = "exact"
    assert made.as_counted(880, 500) == 880

"""A model whose ids are not as many as engines count is not believed."""

from __future__ import annotations

from smetric.sources.tokens.request_tokens import DISTRUST_S, MOST_DIFFERENT, Trust


def test_models_are_believed_until_several_answers_in_a_row_contradict() -> None:
    trust = Trust(clock=lambda: 0.0)
    for _ in range(MOST_DIFFERENT - 1):
        assert not trust.compare("m", 10, 11)
        assert trust.believes("m")
    trust.compare("m", 10, 11)
    assert not trust.believes("m")
    assert trust.believes("another")


def test_one_more_contradiction_after_that_time_is_enough_and_one_agreement_mends_it() -> None:
    now = 0.0
    trust = Trust(clock=lambda: now)
    for _ in range(MOST_DIFFERENT):
        trust.compare("m", 10, 11)
    now += DISTRUST_S
    assert trust.believes("m")
    trust.compare("m", 10, 11)
    assert not trust.believes("m")
    now += DISTRUST_S
    assert trust.compare("m", 10, 10)
    trust.compare("m", 10, 11)
    assert trust.believes("m")


def test_answers_that_were_under_way_do_not_prolong_it() -> None:
    now = 0.0
    trust = Trust(clock=lambda: now)
    for _ in range(MOST_DIFFERENT):
        trust.compare("m", 10, 11)
    now += DISTRUST_S - 1
    trust.compare("m", 10, 11)
    now += 1
    assert trust.believes("m")

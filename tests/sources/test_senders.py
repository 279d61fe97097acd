"""What is missing of the batches that sidecars send."""

from __future__ import annotations

from smetric.sources.shared.peers import GONE_S, MAX_SENDERS, Senders
from tests.clock import Clock

SILENCE_S = 6.0


def made() -> tuple[Senders, Clock]:
    clock = Clock()
    return Senders(silence_s=SILENCE_S, clock=clock), clock


def test_numbers_in_a_row_miss_nothing_and_a_jump_misses_something_once() -> None:
    senders, _ = made()
    assert [senders.heard("s", number, is_last=False) for number in (0, 1, 3, 4)] == [False, False, True, False]


def test_who_is_first_heard_in_the_middle_has_sent_what_is_missing() -> None:
    senders, _ = made()
    assert senders.heard("s", 7, is_last=False)
    assert not senders.heard("t", 0, is_last=False)


def test_a_batch_that_comes_again_changes_nothing() -> None:
    senders, _ = made()
    assert [senders.heard("s", number, is_last=False) for number in (0, 1, 0, 2)] == [False] * 4


def test_silence_is_noticed_once_and_lasts_until_the_sender_is_heard_or_gone() -> None:
    senders, clock = made()
    senders.heard("s", 0, is_last=False)
    clock.now += 1
    senders.heard("t", 0, is_last=False)
    clock.now += SILENCE_S - 1
    assert senders.fallen_silent() == ["s"]
    assert senders.fallen_silent() == []
    assert senders.is_any_silent()
    senders.heard("s", 1, is_last=False)
    assert not senders.is_any_silent()
    clock.now += SILENCE_S
    assert senders.fallen_silent() == ["t", "s"]
    clock.now += GONE_S
    assert not senders.is_any_silent()


def test_who_has_said_goodbye_is_not_missed_but_what_came_before_may_be() -> None:
    senders, clock = made()
    senders.heard("s", 0, is_last=False)
    assert not senders.heard("s", 1, is_last=True)
    senders.heard("t", 0, is_last=False)
    assert senders.heard("t", 2, is_last=True)
    clock.now += SILENCE_S
    assert not senders.is_any_silent()


def test_only_so_many_senders_are_remembered() -> None:
    senders, clock = made()
    for number in range(MAX_SENDERS + 5):
        senders.heard(f"s{number}", 0, is_last=False)
    clock.now += SILENCE_S
    assert senders.fallen_silent() == [f"s{number}" for number in range(5, MAX_SENDERS + 5)]

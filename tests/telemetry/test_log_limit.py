"""A failure that repeats is one line a minute."""

from __future__ import annotations

from smetric.log_limit import EVERY_S, MOST_KEYS, LogLimit
from tests.clock import Clock


def test_one_line_a_minute_says_how_many_were_kept_back() -> None:
    clock = Clock()
    limit = LogLimit(clock)
    assert [limit.passes("a") for _ in range(4)] == [0, None, None, None]
    clock.now += EVERY_S
    assert [limit.passes("a"), limit.passes("a")] == [3, None]


def test_some_lines_a_minute_where_each_says_something_new() -> None:
    clock = Clock()
    limit = LogLimit(clock, lines=2)
    assert [limit.passes("a") for _ in range(4)] == [0, 0, None, None]
    clock.now += EVERY_S
    assert [limit.passes("a") for _ in range(3)] == [2, 0, None]


def test_each_thing_that_fails_has_lines_of_its_own() -> None:
    limit = LogLimit(Clock())
    assert [limit.passes(key) for key in ("a", "b", "a")] == [0, 0, None]


def test_what_is_told_apart_is_bounded() -> None:
    limit = LogLimit(Clock())
    for number in range(10 * MOST_KEYS):
        assert limit.passes(number) == 0
    assert len(limit._seen) <= MOST_KEYS


def test_a_thousand_instances_that_fail_by_turns_have_one_line_a_minute_each() -> None:
    clock = Clock()
    limit = LogLimit(clock)
    for minute in range(3):
        said = [limit.passes(f"vllm-{number}") for _ in range(5) for number in range(1000)]
        assert said == [4 if minute else 0] * 1000 + [None] * 4000
        clock.now += EVERY_S

from __future__ import annotations

from smetric.log_limit import EVERY_S, MAX_KEYS, LogLimit
from tests.clock import Clock


def test_limit_passes_one_line_a_minute_with_the_number_suppressed() -> None:
    clock = Clock()
    limit = LogLimit(clock)
    assert [limit.passes("a") for _ in range(4)] == [0, None, None, None]
    clock.now += EVERY_S
    assert [limit.passes("a"), limit.passes("a")] == [3, None]


def test_limit_passes_several_lines_a_minute_where_asked() -> None:
    clock = Clock()
    limit = LogLimit(clock, lines=2)
    assert [limit.passes("a") for _ in range(4)] == [0, 0, None, None]
    clock.now += EVERY_S
    assert [limit.passes("a") for _ in range(3)] == [2, 0, None]


def test_limit_bounds_its_keys_and_forgets_the_oldest() -> None:
    limit = LogLimit(Clock())
    for number in range(MAX_KEYS + 1):
        assert limit.passes(number) == 0
    assert [limit.passes(MAX_KEYS), limit.passes(1)] == [None, None]
    assert limit.passes(0) == 0


def test_limit_counts_each_of_a_thousand_keys_apart() -> None:
    clock = Clock()
    limit = LogLimit(clock)
    for minute in range(3):
        said = [limit.passes(f"vllm-{number}") for _ in range(5) for number in range(1000)]
        assert said == [4 if minute else 0] * 1000 + [None] * 4000
        clock.now += EVERY_S

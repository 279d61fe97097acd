from __future__ import annotations

import pytest

from tests.policy.verdict import checked, errors


def _test(body: str) -> str:
    return (
        "param N = 2 in 1..8\nroute argmin(requests) when req.turn != 0 and any(kv_usage < 1 / N) as busy\n"
        f'route rr_argmin(0) as rest\ntest "t"\n{body}'
    )


def test_sound_test_blocks_pass() -> None:
    body = (
        "with N = 3 given turn = ?, last = b, prompt_len = 10 tokens\ninstance | kv_usage | age(hit_len) | role\n"
        'a | 0.5 | 2s | "x|y"\nb | ? | 3 | "z"\nexpect a or b as busy failing "req.turn != 0"'
    )
    assert checked(_test(body)).warnings == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("with M = 3 instance | requests\na | 1\nexpect a", "this policy declares no `M`"),
        ("with N = 9 instance | requests\na | 1\nexpect a", "this test sets `N` to 9, outside 1..8"),
        (
            "with N = 2 tokens instance | requests\na | 1\nexpect a",
            "this test sets `N` to 2 tokens, but its unit is a plain number",
        ),
        ("given trun = 3 instance | requests\na | 1\nexpect a", "a request has no `trun`"),
        ("given waiting = 3 instance | requests\na | 1\nexpect a", "a request has no `waiting`"),
        ("given turn = true instance | requests\na | 1\nexpect a", "`turn` is a number"),
        ("given prompt_len = ? instance | requests\na | 1\nexpect a", "`prompt_len` is never unknown"),
        (
            "given prompt_len = 5 requests instance | requests\na | 1\nexpect a",
            "`prompt_len` is in tokens, not requests",
        ),
        ("given last = c instance | requests\na | 1\nexpect a", "`c` is not in the table"),
        ("given turn = 1, turn = 2 instance | requests\na | 1\nexpect a", "`turn` is given twice"),
        ("with N = 1, N = 2 instance | requests\na | 1\nexpect a", "`N` is given twice"),
        ("instance | requests\na | 5m\nexpect a", "`requests` is in requests, not seconds"),
        ("instance | kv_usage | age(hit_len)\na | 1s | 1s\nexpect a", "`kv_usage` is in plain numbers, not seconds"),
        ("instance | role\na | 1s\nexpect a", "`role` is a string"),
        ("given tenant = 5s instance | requests\na | 1\nexpect a", "`tenant` is a string"),
        ("instance | kv_usage\na | 5m\nexpect a", "`kv_usage` is in plain numbers, not seconds"),
        ("instance | requests | requests\na | 1 | 2\nexpect a", "this column is there already"),
        ("instance | requests\na | 1\na | 2\nexpect a", "`a` is in the table already"),
        ("instance | requests\na | true\nexpect a", "`requests` is a number"),
        ("instance | kv_usage\na | 1.5\nexpect a", "`kv_usage` lies in 0..1"),
        ("instance | known(hit_len)\na | 1\nexpect a", "unknown feature `known(hit_len)`"),
        ("instance | requests\na | 1\nexpect a failing nothing", "no guard is called `nothing`"),
        ("instance | requests\na | 1\nexpect a failing held", "no guard is called `held`"),
        ('instance | requests\na | 1\nexpect a failing "req.turn == 0"', "no guard is called `req.turn == 0`"),
        ("instance | requests\na | 1\nexpect reject 200", "200 is not an error status"),
        ("instance | requests\na | 1\nexpect reject 429.5", "429.5 is not an error status"),
    ],
)
def test_test_blocks_are_held_against_the_file(body: str, message: str) -> None:
    assert errors(_test(body)) == [message]


def test_a_row_goes_on_below_a_comment_with_a_bar() -> None:
    body = "instance | requests | waiting\na | 1 # two | three\n | 2\nb | 3 | 1.5 # |\nexpect a or b"
    assert checked(_test(body)).warnings == ()

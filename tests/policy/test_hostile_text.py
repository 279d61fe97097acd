"""Whatever the text: a policy, or a `PolicyError`, and soon."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.policy.check import check_text
from smetric.policy.diagnostic import PolicyError
from smetric.policy.parser import MAX_BYTES
from tests.policy.words import WORDS

_SOUND = """## Everything once.
policy everything
param OVERLOAD = 2.0 in 1.0..
param LOAD = requests in {requests, unprefilled}
param FLOOR = 0 LOAD in 0..
param RATE = 15928 tokens per second in 1..
param MODE = "a" in {"a", "b"}
keep healthy and not draining
keep role in {"decode", "both"} as serves
prefer kv_usage < 0.95 when req.turn > 0 as room
let l = LOAD
let s = argmax(hit_len, then: l)
let t = ratio(unprefilled, RATE, default: 2s) if MODE == "a" else 250ms
def calm(s, l) = l[s] <= greatest(OVERLOAD * mean(l where healthy, default: 0), FLOOR)
reject 429 "all full" retry 2s when all(waiting >= 16 requests) and not calm(s, l) as shed
route s when req.turn != 0 and (calm(s, l) or min(t) < 1s) as stick
route first(argmin(l where fresh(l, 2s)), rr_argmin(norm(l) - kv_usage)) as rest
test "a case"
  with OVERLOAD = 3, LOAD = unprefilled
  given turn = 3, last = a
  instance | hit_len | age(hit_len) | role
  a | ? | 2s | "both"
  b | 900 | 0.5 | "decode"
  expect a or b as rest failing held
"""
_TOKEN = re.compile(r'"[^"\n]*"|[A-Za-z_]\w*|[\d.]+|\s+|[^\w\s]')
_STRANGE = (
    "\x00",
    "\ud800",
    "é",
    "!",
    '"',
    "..",
    "1e999",
    "9" * 400,
    "(",
    "}",
    "not",
    "if",
    "-",
    "per",
    "req",
    "##",
    "\r\n",
)


def _survives(text: str, configured: dict[str, float | str | bool] | None = None) -> bool:
    """Whether *text* is a sound policy; anything raised but `PolicyError` fails the test."""
    try:
        check_text(text, WORDS, configured)
    except PolicyError as error:
        found = error
    else:
        return True
    assert found.diagnostics
    assert str(found).startswith("error: ")
    return False


def _mutated(pieces: list[str], chance: random.Random) -> str:
    pieces = list(pieces)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(pieces))
        match chance.randrange(6):
            case 0:
                del pieces[at]
            case 1:
                pieces.insert(at, chance.choice(pieces))
            case 2:
                pieces[at] = chance.choice(pieces)
            case 3:
                pieces.insert(at, chance.choice(_STRANGE))
            case 4:
                other = chance.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case _:
                end = chance.randrange(at, len(pieces)) + 1
                pieces[at:end] = pieces[at:end] * 2 if chance.random() < 0.5 else []
        if not pieces:
            return ""
    return "".join(pieces)


def test_the_text_that_is_mutated_is_sound() -> None:
    assert _survives(_SOUND)


@pytest.mark.parametrize("seed", range(6))
def test_mutations_raise_nothing_but_policy_errors(seed: int) -> None:
    chance = random.Random(seed)
    pieces = _TOKEN.findall(_SOUND)
    verdicts = [_survives(_mutated(pieces, chance)) for _ in range(40)]
    assert not all(verdicts)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=80))
def test_any_text_raises_nothing_but_policy_errors(text: str) -> None:
    _survives(f"policy p\nroute argmin({text})\n")


@settings(max_examples=15, deadline=None)
@given(st.one_of(st.floats(), st.text(max_size=20), st.booleans(), st.integers()))
def test_any_configured_value_raises_nothing_but_policy_errors(value: float | str | bool) -> None:
    _survives(_SOUND, {"OVERLOAD": value, "LOAD": value, "MODE": value, "RATE": value})


@pytest.mark.parametrize("unit", ["(", "!a", "let x = 1\n", "a + ", "not ", '"', "| ", "def f(x) = x\n", "1 per "])
def test_the_largest_texts_are_refused(unit: str) -> None:
    body = unit * ((MAX_BYTES - 40) // len(unit))
    assert not _survives(f"policy p\nlet x = {body}")


def test_a_text_that_is_no_utf_8_is_refused() -> None:
    with pytest.raises(PolicyError, match="is no UTF-8"):
        check_text("policy p # \ud800\nroute rr_argmin(0)", WORDS)


def test_a_byte_order_mark_is_named() -> None:
    with pytest.raises(PolicyError) as caught:
        check_text("\ufeffpolicy p\nroute argmin(requests)", WORDS, {}, "p.policy")
    first = caught.value.diagnostics[0]
    assert (first.message, first.help) == (
        "unexpected character `U+FEFF`",
        "save the file as UTF-8 without a byte order mark",
    )

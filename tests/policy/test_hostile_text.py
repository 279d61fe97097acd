"""Any text is a policy or raises `PolicyError`, in bounded time."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.policy import PolicyText
from smetric.policy.check import check_text
from smetric.policy.diagnostic import PolicyError
from smetric.policy.parser import MAX_BYTES
from smetric.policy.policy import compiled
from tests.policy.words import WORDS

pytestmark = pytest.mark.slow

#: A sound policy that has every statement, and much of what expressions can be.
SOUND = """## Everything once.
policy everything
use common (near, FAR)
param OVERLOAD = 2.0 in 1.0..
param LOAD = requests in {requests, unprefilled}
param FLOOR = 0 LOAD in 0..
param RATE = 15928 tokens per second in 1..
param MODE = "a" in {"a", "b"}
keep healthy and not draining
keep role in {"decode", "both"} as serves
keep top(hrw(req.session), 8, then: kv_usage) or draw(2)
prefer kv_usage < 0.95 when req.turn > 0 as room
let l = LOAD
let s = argmax(hit_len, then: l)
let t = ratio(unprefilled, RATE, default: 2s) if MODE == "a" else 250ms
let q = quantile(kv_usage where healthy, 0.9, default: 1) + std(share(l)) + rank(l)[s]
def calm(s, l) = l[s] <= greatest(OVERLOAD * mean(l where healthy, default: 0), FLOOR)
reject 429 "all full" retry 2s when all(waiting >= 16 requests) and not calm(s, l) as shed
hold for 500ms when any(near(kv_usage) > FAR) and chance(0.5) and bucket(req.session) < 0.5 as wait
route s when req.turn != 0 and (calm(s, l) or min(t) < 1s) as stick
route softmin(norm(l) where l < 9 and q < 2, temperature: 0.5) as soft
route first(argmin(l where fresh(l, 2s)), rr_argmin(norm(l) - kv_usage, within: 0.1)) as rest
test "a case"
  with OVERLOAD = 3, LOAD = unprefilled
  given turn = 3, last = a
  instance | hit_len | age(hit_len) | role
  a | ? | 2s | "both"
  b | 900 | 0.5 | "decode"
  expect a or b as rest failing held
"""
#: The library it uses.
COMMON = "library common\nparam FAR = 0.9 in 0..1\ndef near(x) = 1 - x\n"

PIECES = re.findall(r'"[^"\n]*"|[A-Za-z_]\w*|[\d.]+|\s+|[^\w\s]', SOUND)
STRANGE = ["\x00", "\ud800", "é", "!", '"', "..", "1e999", "9" * 400, "(", "}", "not", "if", "-", "per", "req", "##"]
STRANGE += ["# a | (\n", "\r\n", "use", "library", "where", "then:"]


def mutated(chance: random.Random) -> str:
    """The sound policy with up to four changes: pieces are removed, doubled, swapped or replaced."""
    pieces = list(PIECES)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(pieces))
        end = start + chance.choice([0, 1, 1, 1, chance.randint(1, len(pieces))])
        other = chance.randrange(len(pieces))
        pieces[start:end] = chance.choice(
            [[], pieces[start:end] * 2, [chance.choice(PIECES)], [chance.choice(STRANGE)], pieces[other : other + 1]]
        )
        if not pieces:
            return ""
    return "".join(pieces)


def _libraries(name: str) -> PolicyText | None:
    return PolicyText(COMMON, "common.policy") if name == "common" else None


def _survives(text: str, configured: dict[str, float | str | bool] | None = None) -> bool:
    """Whether *text* is a sound policy; anything raised but `PolicyError` fails the test."""
    try:
        file, checked = check_text(text, WORDS, configured, libraries=_libraries)
        compiled(file, checked, WORDS)
    except PolicyError as error:
        found = error
    else:
        return True
    assert found.diagnostics
    assert str(found).startswith("error: ")
    return False


def _survive(count: int, seed: int) -> int:
    """How many of *count* mutated policies are sound."""
    chance = random.Random(seed)
    return sum(_survives(mutated(chance)) for _ in range(count))


def test_mutated_text_is_sound_before_mutation() -> None:
    assert _survives(SOUND)


@pytest.mark.parametrize("seed", range(5))
def test_mutations_raise_only_policy_errors(seed: int) -> None:
    assert _survive(60, seed) < 60


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_hundred_thousand_mutations_raise_only_policy_errors(seed: int) -> None:
    assert _survive(1000, seed) < 1000


@settings(max_examples=30)
@given(st.text(max_size=80))
def test_random_text_raises_only_policy_errors(text: str) -> None:
    _survives(f"policy p\nroute argmin({text})\n")


@settings(max_examples=15)
@given(st.one_of(st.floats(), st.text(max_size=20), st.booleans(), st.integers()))
def test_random_configured_value_raises_only_policy_errors(value: float | str | bool) -> None:
    _survives(SOUND, {"OVERLOAD": value, "LOAD": value, "MODE": value, "RATE": value, "FAR": value})


@pytest.mark.parametrize("start", ["let x =", "route argmin(0) when"])
@pytest.mark.parametrize(
    "unit",
    [
        "(",
        "!a",
        "let x = 1\n",
        "a + ",
        "a and ",
        "a if b else ",
        "not ",
        '"',
        "| ",
        "def f(x) = x\n",
        "1 per ",
        "let .5\n",
    ],
)
def test_largest_texts_are_refused(start: str, unit: str) -> None:
    body = unit * ((MAX_BYTES - 40) // len(unit))
    assert not _survives(f"policy p\n{start} {body}a")

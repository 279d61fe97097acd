"""Any text is a policy or raises `PolicyError`, in bounded time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.policy import Source
from smetric.policy.check import check_text
from smetric.policy.diagnostic import PolicyError
from smetric.policy.parser import MAX_BYTES
from smetric.policy.policy import compiled
from tests.policy.mutation import COMMON, PIECES, SOUND, mutated
from tests.policy.words import WORDS

pytestmark = pytest.mark.slow


def _libraries(name: str) -> Source | None:
    return Source(COMMON, "common.policy") if name == "common" else None


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
    return sum(_survives(mutated(PIECES, chance)) for _ in range(count))


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
def test_any_text_raises_only_policy_errors(text: str) -> None:
    _survives(f"policy p\nroute argmin({text})\n")


@settings(max_examples=15)
@given(st.one_of(st.floats(), st.text(max_size=20), st.booleans(), st.integers()))
def test_any_configured_value_raises_only_policy_errors(value: float | str | bool) -> None:
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

"""Request: known tokens, end of an exchange, learned token ratio."""

from __future__ import annotations

import json
from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import INITIAL, LEAST, MAX_MODELS, MOST, Api, InferenceRequest, TokenRatio


def read(api: Api, **body: Any) -> InferenceRequest:
    return parse(api, json.dumps(body).encode(), [], TokenRatio(), ReaderSettings())


def test_request_count_by_replaces_estimates_except_of_batch() -> None:
    request = read(Api.CHAT, messages=[{"role": role, "content": "x" * 400} for role in ("user", "assistant", "user")])
    assert request.est_hit is not None
    assert 0 < request.est_hit < request.prompt_len
    request.count_by(array("I", range(90)), 16)
    assert (request.prompt_len, request.est_hit) == (90, 48)
    batch = read(Api.COMPLETIONS, prompt=["x" * 400, "y" * 400])
    batch.count_by(array("I", range(90)), 16)
    assert batch.prompt_len == 200
    assert batch.token_ids is not None


def test_request_count_by_expects_no_hit_on_first_turn() -> None:
    request = read(Api.CHAT, messages=[{"role": "user", "content": "x" * 400}])
    request.count_by(array("I", range(90)), 16)
    assert (request.prompt_len, request.est_hit) == (90, 0)


def test_request_let_go_keeps_no_text() -> None:
    request = read(Api.CHAT, messages=[{"role": "user", "content": "secret"}])
    kept = request.body
    assert kept is not None
    request.count_by(array("I", [1]), 16)
    request.let_go()
    assert (request.body, request.prompt, request.token_ids) == (None, None, None)
    assert "secret" not in repr(request)


def test_token_ratio_learns_per_model() -> None:
    ratio = TokenRatio()
    for size in range(1000, 3000, 100):
        ratio.learn("m", size * 3, size)
    assert abs(ratio["m"] - 3.0) < 0.01
    assert "other" not in ratio


def test_token_ratio_clips_absurd_report() -> None:
    ratio = TokenRatio()
    for _ in range(50):
        ratio.learn("m", 3500, 1000)
    ratio.learn("m", 3500, 1_000_000)
    assert 3.5 * 0.95 < ratio["m"] <= 3.5


def test_token_ratio_ignores_short_prompts() -> None:
    ratio = TokenRatio()
    ratio.learn("m", 20, 30)
    ratio.learn("m", 0, 1000)
    ratio.learn("m", 1000, 0)
    assert not ratio


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9))))
def test_token_ratio_stays_in_bounds(reports: list[tuple[int, int]]) -> None:
    ratio = TokenRatio()
    for size, tokens in reports:
        ratio.learn("m", size, tokens)
    assert LEAST <= ratio.get("m", INITIAL) <= MOST


def test_token_ratio_bounds_models_and_evicts_stalest() -> None:
    ratio = TokenRatio()
    for i in range(MAX_MODELS):
        ratio.learn(f"m{i}", 3000, 1000)
    ratio.learn("m0", 3000, 1000)
    ratio.learn("new", 3000, 1000)
    assert ratio["m0"] == ratio["new"] == 3.0
    assert "m1" not in ratio

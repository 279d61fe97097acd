"""A request once it was read: what becomes of it when its tokens are known, and when it has been answered."""

from __future__ import annotations

import json
from array import array
from typing import Any

from smetric.request.reader import Reading, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio


def read(api: Api, **body: Any) -> InferenceRequest:
    return parse(api, json.dumps(body).encode(), [], TokenRatio(), Reading())


def test_ids_once_known_replace_the_estimates_of_one_prompt_but_not_of_a_batch() -> None:
    request = read(Api.CHAT, messages=[{"role": role, "content": "x" * 400} for role in ("user", "assistant", "user")])
    assert request.est_hit is not None
    assert 0 < request.est_hit < request.prompt_len
    request.count_by(array("I", range(90)), 16)
    assert (request.prompt_len, request.est_hit) == (90, 48)
    batch = read(Api.COMPLETIONS, prompt=["x" * 400, "y" * 400])
    batch.count_by(array("I", range(90)), 16)
    assert batch.prompt_len == 200
    assert batch.token_ids is not None


def test_a_first_turn_expects_nothing_however_its_tokens_are_counted() -> None:
    request = read(Api.CHAT, messages=[{"role": "user", "content": "x" * 400}])
    request.count_by(array("I", range(90)), 16)
    assert (request.prompt_len, request.est_hit) == (90, 0)


def test_a_request_that_is_let_go_keeps_no_text() -> None:
    request = read(Api.CHAT, messages=[{"role": "user", "content": "secret"}])
    kept = request.body
    assert kept is not None
    request.count_by(array("I", [1]), 16)
    request.let_go()
    assert (request.body, request.prompt, request.token_ids) == (None, None, None)
    assert "secret" not in repr(request)

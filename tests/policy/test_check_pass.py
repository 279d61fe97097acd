from __future__ import annotations

from tests.policy.verdict import errors


def test_an_error_of_every_choice_of_features_is_reported_once_and_plain() -> None:
    code = "param LOAD = requests in {requests, waiting}\nroute argmin(LOAD + hit_len)"
    assert errors(code) == ["cannot add requests and tokens"]

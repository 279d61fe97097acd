from __future__ import annotations

import pytest

from tests.policy.verdict import checked, errors


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("let a = 3", "this policy decides nothing"),
        ("keep req.turn == 0\nroute rr_argmin(0)", "`keep` needs a truth value per instance, found one for all"),
        ('reject 429.5 "no" when any(healthy)\nroute rr_argmin(0)', "429.5 is not an error status"),
        ('reject 429 "no" retry 5 when any(healthy)\nroute rr_argmin(0)', "expected a duration, found a plain number"),
        ("let mean = 3\nroute rr_argmin(0)", "`mean` is a built-in; a name cannot hide it"),
        ("let top = 3\nroute rr_argmin(0)", "`top` is a built-in; a name cannot hide it"),
        ("let req = 3\nroute rr_argmin(0)", "`req` is the request; a name cannot hide it"),
        ("def f(x, x) = x\nroute argmin(f(requests, requests))", "`x` is an argument already"),
        ("let a = b\nlet b = 3\nroute argmin(a)", "unknown name `b`"),
    ],
)
def test_statements_that_cannot_stand_are_refused(code: str, message: str) -> None:
    assert message in errors(code)


def test_a_rejection_of_everything_may_end_a_policy() -> None:
    assert checked('route argmin(requests where healthy)\nreject 503 "nobody is well"').warnings == ()


def test_a_name_whose_definition_failed_is_accepted_in_silence() -> None:
    assert errors("let x = requets\nlet y = x + 1\nroute argmin(y * x)") == ["unknown name `requets`"]
    assert len(errors("let x = = 3\nroute argmin(x)")) == 1

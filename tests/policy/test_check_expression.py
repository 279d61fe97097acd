from __future__ import annotations

import pytest

from smetric.policy.diagnostic import PolicyError
from tests.policy.verdict import checked, errors


@pytest.mark.parametrize(
    "code",
    [
        "route argmin(norm(requests) + norm(hit_len))",
        "route argmin(hit_len / req.prompt_len)",
        "route argmin((req.prompt_len - hit_len) * (requests + 1))",
        "route argmin(unprefilled / prefill_rate + 250ms)",
        "route argmin(ratio(requests, max(requests), default: 0))",
        "route argmin(clamp(requests, 1, 8 requests) / count())",
        'route argmin(requests where role in {"decode", req.model} and not draining)\nroute rr_argmin(0)',
        "route first(argmin(requests where healthy), argmin(requests))",
        "let s = first(argmin(requests where healthy), argmin(requests))\nroute s when kv_usage[s] < 0.5\nroute s",
        "route argmin(requests) when min(waiting where healthy, default: 0) < 4\nroute rr_argmin(0)",
        "route argmax(hit_len where known(hit_len) and fresh(requests, 2s) and age(requests) < 1m)\nroute rr_argmin(0)",
        'keep req.lora in loras when req.lora != ""\nroute argmin(requests)',
        'reject 429 "full" retry 2s when all(waiting > 3)\nroute argmin(requests)',
        "param SLOPE = 62us per token\nroute argmin(SLOPE * hit_len + 1s)",
        "def f(x, k) = x > k\nroute argmin(requests) when any(f(requests, "
        "5)) and any(f(hit_len, 5))\nroute rr_argmin(0)",
    ],
)
def test_sound_policies_pass(code: str) -> None:
    assert checked(code).warnings == ()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("argmin(least(requests, hit_len))", "`least` takes values of one unit, not requests and tokens"),
        (
            "argmin(requests if healthy else hit_len)",
            "both sides of `if` are of one kind, not requests per instance and tokens per instance",
        ),
        ("argmin(hit_len - requests)", "cannot subtract requests from tokens"),
        ("argmin(role)", "`argmin` needs a number, found string per instance"),
        ("argmin(requests, then: role)", "`then:` of `argmin` needs a number, found string per instance"),
        ("argmin(requests, default: 3)", "`argmin` has no `default:`"),
        ("argmin(requests, within: 3)", "`argmin` has no `within:`"),
        ("rr_argmin(requests, within: 3 tokens)", "`within:` has the unit of the score, requests, not tokens"),
        ("rr_argmin(requests, within: -3)", "`within:` may be below 0"),
        (
            "rr_argmin(requests, within: running)",
            "`within:` of `rr_argmin` needs a number, found requests per instance",
        ),
        ("softmin(requests)", "`softmin` needs `temperature:`"),
        ("softmin(requests, temperature: mean(running) - 1)", "the temperature may be below 0"),
        ("softmax(healthy, temperature: 1)", "`softmax` needs a number, found bool per instance"),
        ("sample(role)", "`sample` needs a number, found string per instance"),
        ("argmin(share(requests - 3))", "what `share` divides may be below 0"),
        ("argmin(requests + quantile(running, 2))", "`quantile` needs a share in 0..1, and this is 2"),
        ("argmin(requests + quantile(running, 1 token))", "`quantile` needs a plain number, found tokens"),
        ("argmin(requests + quantile(running))", "`quantile` takes 2 arguments, not 1"),
        (
            "argmin(requests + quantile(running where healthy, 0.5))",
            "`where` may leave nobody, and `quantile` of nobody is not a number",
        ),
        ("argmin(requests where draw(2 requests))", "`draw` needs a plain number, found requests"),
        ("argmin(requests where draw(requests))", "`draw` needs a number, found requests per instance"),
        ("argmin(requests where top(5, 2))", "`top` needs a number per instance, found number"),
        (
            "argmin(requests where top(running, 2, then: role))",
            "`then:` of `top` needs a number, found string per instance",
        ),
        ("argmax(hrw(role))", "`hrw` needs a string, found string per instance"),
        ("argmax(hrw(3))", "`hrw` needs a string, found number"),
        (
            "argmin(0) when chance(req.turn)\nroute argmin(0)",
            "`chance` needs a share in 0..1, and this lies in 0..1e+15",
        ),
        ("argmin(mean(3))", "`mean` needs a number per instance, found number"),
        ("argmin(mean(requests, default: 0))", "`default:` is for `where`: without it there is always somebody"),
        (
            "argmin(mean(requests where healthy, default: 1 token))",
            "`default:` has the unit of the result, requests, not tokens",
        ),
        ("argmin(ratio(requests, waiting))", "`ratio` needs `default:`"),
        ("argmin(clamp(requests, 1))", "`clamp` takes 3 arguments, not 2"),
        ("argmin(requests[3])", "a value is looked up by an instance, not by number"),
        ("argmin(req.turn[argmin(requests)])", "only a value per instance can be looked up, and this is number"),
        ("argmin(requests where req.turn == 0)", "`where` needs a truth value per instance, found bool"),
        ("first(argmin(requests), 3)", "`first` needs an instance, found number"),
        ("argmin(known(3))", "`known` asks about a value per instance, found number"),
        ("argmin(mean)", "`mean` is a function"),
        ("argmin(self.turn)", "`self` has no fields"),
        ("argmin(not requests)", "`not` takes a truth value, found requests per instance"),
        ("argmin(healthy + 1)", "`+` takes numbers, found bool per instance"),
        ("argmin(requests / waiting)", "this divisor may be 0"),
        ("argmin(req.prompt_len / (req.prompt_len - hit_len))", "this divisor may be 0"),
        ("argmin(" + " * ".join(["unprefilled"] * 21) + ")", "this may grow past 1e300"),
        ("argmin(role in pool)", "`in` looks in a set, not in string per instance"),
        ("argmin(fresh(requests, 2))", "expected a duration, found a plain number"),
    ],
)
def test_what_means_nothing_is_refused(code: str, message: str) -> None:
    assert message in errors(f"route {code}")[0]


def test_an_error_of_a_definition_is_shown_at_each_outermost_call_with_its_own_line() -> None:
    code = "def add(a, b) = a + b\ndef twice(x) = add(x, hit_len)\nroute argmin(twice(requests))"
    with pytest.raises(PolicyError) as caught:
        checked(code)
    (found,) = caught.value.diagnostics
    assert found.help.startswith("in `twice`, in `add`, line 2: ")
    assert caught.value.text[found.span.start : found.span.end] == "twice(requests)"


def test_a_definition_sees_only_names_above_it() -> None:
    assert errors("def f(x) = x + later\nlet later = 3\nroute argmin(f(requests))") == ["unknown name `later`"]


def test_a_definition_that_nothing_calls_is_looked_into() -> None:
    assert errors("def f(x) = x + nothing\nroute rr_argmin(0)") == ["unknown name `nothing`"]

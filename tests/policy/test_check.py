from __future__ import annotations

import pytest

from smetric.policy.check import check
from smetric.policy.diagnostic import PolicyError
from smetric.policy.parser import parse
from smetric.policy.policy import load
from tests.policy.verdict import checked, errors
from tests.policy.words import WORDS

_SMETRIC = """
policy smetric
param OVERLOAD = 2.0 in 1.0..
param HIT_RATIO = 0.5 in 0.0..1.0
## What load means.
param LOAD = requests in {requests, unprefilled}
param FLOOR = 0 LOAD in 0..
let c = hit_len
let l = LOAD
let s = argmax(c, then: l)
def not_overloaded(s, l) = l[s] <= greatest(OVERLOAD * mean(l), FLOOR)
def session_not_evicted(s, c) = c[s] > HIT_RATIO * req.est_hit
route s when req.turn != 0 and not_overloaded(s, l) and session_not_evicted(s, c) as stick
route rr_argmin(l) as balance
"""


def test_parsing_first_gives_the_same_as_both_at_once() -> None:
    found, both = check(parse(_SMETRIC), WORDS), checked(_SMETRIC[16:])
    assert (found.params, found.reads) == (both.params, both.reads)
    assert found.warnings == ()


# ── reads ──


def test_smetric_spares_the_lookup_of_a_first_turn() -> None:
    assert check(parse(_SMETRIC), WORDS).reads == {"hit_len": "req.turn != 0", "requests": "always"}


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("route rr_argmin(0)", {}),
        ("route argmin(requests, then: waiting)", {"requests": "always", "waiting": "argmin(requests, then: waiting)"}),
        ("let unused = hit_len\nroute argmin(requests)", {"requests": "always"}),
        (
            "route argmax(hit_len) when req.turn != 0\nroute argmin(requests)",
            {"hit_len": "req.turn != 0", "requests": "req.turn != 0"},
        ),
        (
            "route argmax(hit_len) when max(requests) - min(requests) < 3\nroute argmin(requests)",
            {"hit_len": "max(requests) - min(requests) < 3", "requests": "always"},
        ),
        (
            "route argmax(hit_len) when max(requests) < 3\nroute argmax(hit_len, then: requests)",
            {"hit_len": "always", "requests": "always"},
        ),
        (
            "keep healthy when req.turn == 0\nroute argmin(running)",
            {"healthy": "req.turn == 0", "running": "req.turn == 0"},
        ),
        ("keep healthy\nroute argmin(kv_usage)", {"healthy": "always", "kv_usage": "healthy"}),
        ("prefer healthy\nroute argmin(kv_usage)", {"healthy": "always", "kv_usage": "always"}),
        (
            "route argmin(running where healthy)\nroute argmin(waiting)",
            {"healthy": "always", "running": "always", "waiting": "argmin(running where healthy)"},
        ),
        (
            "let l = unprefilled if req.turn == 0 else hit_len\nroute argmin(l)",
            {"hit_len": "argmin(l)", "unprefilled": "argmin(l)"},
        ),
        ("param Q = false\nroute argmin(unprefilled if Q else hit_len)", {"hit_len": "always"}),
        # A guard that reads an unknown number of the request fails before it looks anything up.
        (
            "route argmin(requests) when max(hit_len) > req.est_hit\nroute argmin(requests)",
            {"hit_len": "max(hit_len) > req.est_hit", "requests": "always"},
        ),
        # Where one divisor for all is 0, the dividend is not looked at.
        (
            "route argmin(requests * ratio(max(hit_len), sum(hit_len) - 5, default: 1))",
            {"hit_len": "always", "requests": "always"},
        ),
        (
            "let f = requests * ratio(max(hit_len), max(requests), default: 1)\nroute argmin(f)",
            {"hit_len": "argmin(f)", "requests": "always"},
        ),
        ("route argmin(ratio(hit_len, requests, default: 1))", {"hit_len": "always", "requests": "always"}),
    ],
)
def test_a_feature_is_read_always_or_behind_the_guard_that_spares_it(code: str, reads: dict[str, str]) -> None:
    assert checked(code).reads == reads


def test_a_configured_feature_is_the_one_read() -> None:
    assert "unprefilled" in check(parse(_SMETRIC), WORDS, {"LOAD": "unprefilled"}).reads


def test_the_checker_and_the_compiled_policy_agree_on_what_is_always_looked_up() -> None:
    for code in (
        _SMETRIC[16:],
        "route argmax(hit_len) when max(requests) < 3\nroute argmax(hit_len, then: requests)",
        "route argmax(hit_len) when max(requests) < 3\nroute argmin(requests, then: hit_len)",
        "keep hit_len > 3 when req.turn == 0\nroute argmin(host_hit_len)",
        "let l = hit_len if req.turn == 0 else host_hit_len\nroute argmin(l)",
    ):
        policy = load(f"policy p\n{code}", WORDS)
        reads = checked(code).reads
        assert policy.reads == reads.keys()
        assert {name for name in policy.lookups if reads[name] == "always"} == set(policy.lookups_always)


# ── expressions ──


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


# ── statements ──


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


def test_an_error_of_every_choice_of_features_is_reported_once_and_plain() -> None:
    code = "param LOAD = requests in {requests, waiting}\nroute argmin(LOAD + hit_len)"
    assert errors(code) == ["cannot add requests and tokens"]


# ── warnings ──


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("let a = 3\nroute rr_argmin(0)", "value `a` is never used"),
        ("def f(x) = x\nroute rr_argmin(0)", "definition `f` is never used"),
        (
            "route argmin(requests) when count() >= 1\nroute rr_argmin(0)",
            "this condition is the same in every decision",
        ),
        ("## Nothing.\n\nroute rr_argmin(0)", "this `##` documents nothing"),
        ("route rr_argmin(0) ## Nothing.", "this `##` documents nothing"),
        (
            "route argmax(hit_len) when max(hit_len) > 3 and req.turn != 0\nroute rr_argmin(0)",
            "every decision looks up hit_len before it asks this, which could spare it",
        ),
    ],
)
def test_what_does_no_harm_is_a_warning(code: str, message: str) -> None:
    assert [warning.message for warning in checked(code).warnings] == [message]


def test_a_switch_by_parameter_is_no_constant_condition() -> None:
    assert checked("param ON = true\nroute argmin(requests) when ON\nroute rr_argmin(0)").warnings == ()


# ── test blocks ──


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
        ("instance | requests | requests\na | 1 | 2\nexpect a", "this column is there already"),
        ("instance | requests\na | 1\na | 2\nexpect a", "`a` is in the table already"),
        ("instance | requests\na | true\nexpect a", "`requests` is a number"),
        ("instance | kv_usage\na | 1.5\nexpect a", "`kv_usage` lies in 0..1"),
        ("instance | known(hit_len)\na | 1\nexpect a", "unknown feature `known(hit_len)`"),
        ("instance | requests\na | 1\nexpect a failing nothing", "no guard is called `nothing`"),
        ("instance | requests\na | 1\nexpect a failing held", "no guard is called `held`"),
        ('instance | requests\na | 1\nexpect a failing "req.turn == 0"', "no guard is called `req.turn == 0`"),
        ("instance | requests\na | 1\nexpect reject 200", "200 is not an error status"),
    ],
)
def test_test_blocks_are_held_against_the_file(body: str, message: str) -> None:
    assert errors(_test(body)) == [message]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("param A = 1\nroute argmin(requests / A)", "this divisor may be 0"),
        ("param A = 1 in {0, 1}\nroute argmin(requests / A)", "this divisor may be 0"),
        (
            "param A = 1\nkeep draw(A)\nroute argmin(requests)",
            "`draw` takes 1, 2, 3, … of the instances, and this is 0",
        ),
        (
            "param A = 1\nroute argmin(clamp(norm(requests), 1, A))",
            "the lower bound of `clamp` is always above the upper one",
        ),
    ],
)
def test_a_policy_is_sound_with_what_its_tests_set_too(rules: str, message: str) -> None:
    case = '{}\ntest "{}" {} instance | requests\na | 1\nexpect a'
    assert checked(case.format(rules, "as it is", "")).warnings == ()
    assert checked(case.format(rules, "as it is", "with A = 1")).warnings == ()
    assert errors(case.format(case.format(rules, "one", "with A = 0"), "two", "with A = 0")) == [
        f'{message}, with what the test "one" sets'
    ]


# ── bounds ──


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("route argmin(" + " + ".join(["requests"] * 90) + ")", ""),
        ("route argmin(" + " + ".join(["requests"] * 200) + ")", "nests deeper than 100 operators"),
        ("\n".join(f"let a{i} = {i}" for i in range(600)) + "\nroute rr_argmin(0)", "more than 500 parts"),
        (
            "def f0(x) = x + x\n"
            + "\n".join(f"def f{i}(x) = f{i - 1}(x) + f{i - 1}(x)" for i in range(1, 30))
            + "\nroute argmin(f29(requests))",
            "more than 500 parts",
        ),
        (
            "\n".join(f"param P{i} = requests in {{requests, waiting}}" for i in range(12))
            + "\nroute argmin("
            + " + ".join(f"P{i}" for i in range(12))
            + ")",
            "choose among more than 16 combinations",
        ),
    ],
)
def test_the_size_of_a_policy_is_bounded(code: str, message: str) -> None:
    if message:
        assert any(message in found for found in errors(code))
    else:
        assert checked(code).warnings == ()

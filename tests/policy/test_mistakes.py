"""Every mistake of the language reference, with its caret, code, message and help."""

from __future__ import annotations

import re

import pytest

from smetric.policy.check import check_text
from smetric.policy.diagnostic import Diagnostic, PolicyError
from tests.policy.words import WORDS

#: What follows `policy p`, configured values, the text under the caret, code, message, help.
_ROWS: list[tuple[str, dict[str, float], str, str, str, str]] = [
    ("let l = requets", {}, "requets", "unknown-name", "unknown name `requets`", "did you mean `requests`?"),
    (
        "route argmin(requests) when req.waiting > 3",
        {},
        "waiting",
        "unknown-field",
        "a request has no `waiting`",
        "`waiting` belongs to the instances: write it without `req.`",
    ),
    (
        "route argmin(requests) when turn == 0",
        {},
        "turn",
        "unknown-name",
        "unknown name `turn`",
        "request fields are written `req.turn`",
    ),
    (
        "let f = requests + hit_len",
        {},
        "requests + hit_len",
        "units",
        "cannot add requests and tokens",
        "put both on one scale first, e.g. norm(...) of each, or divide by a rate",
    ),
    (
        "param MAX = 16\nroute argmin(requests) when min(waiting) < MAX",
        {},
        "min(waiting) < MAX",
        "units",
        "cannot compare requests with a plain number",
        "give `MAX` its unit where it is defined: `param MAX = … requests`",
    ),
    (
        "let few = 5\nroute argmin(requests) when min(waiting) < few",
        {},
        "min(waiting) < few",
        "units",
        "cannot compare requests with a plain number",
        "give `few` its unit where it is defined: `let few = … requests`",
    ),
    ("param T = 16 reqs", {}, "reqs", "unit", "unknown unit `reqs`", "did you mean `requests`?"),
    (
        "param T = 5 ms",
        {},
        "ms",
        "unit",
        "unknown unit `ms`",
        "durations are written 500ms, 2s, 5m, 1h, without a space",
    ),
    (
        "route argmin(requests) when waiting > 3 requests",
        {},
        "waiting > 3 requests",
        "condition",
        "a condition is one truth value, but this is bool per instance",
        "wrap it in any(...) or all(...)",
    ),
    (
        "route requests",
        {},
        "requests",
        "route",
        "`route` needs an instance, found requests per instance",
        "pick one: route argmin(…)",
    ),
    (
        "let s = argmin(requests)\nlet q = argmax(hit_len)\nroute s if waiting > 3 else q",
        {},
        "waiting > 3",
        "condition",
        "an instance is chosen by one truth value, but this is bool per instance",
        "wrap it in any(...) or all(...)",
    ),
    (
        "route argmin(requests) when req.turn == 0",
        {},
        "route argmin(requests) when req.turn == 0",
        "undecided",
        "this may decide nothing",
        "end with an unconditional `route …` whose pick has no `where`",
    ),
    (
        "route argmin(requests where healthy)",
        {},
        "route argmin(requests where healthy)",
        "undecided",
        "this may decide nothing",
        "end with an unconditional `route …` whose pick has no `where`",
    ),
    (
        "let s = argmax(hit_len where healthy)\nroute s when requests[s] < 3",
        {},
        "s",
        "maybe",
        "this instance may be absent",
        "give it a second choice: first(…, …)",
    ),
    (
        "route argmin(requests)\nroute argmax(hit_len)",
        {},
        "route argmax(hit_len)",
        "unreachable",
        "nothing can reach this: the rule above always applies",
        "",
    ),
    (
        "let s = argmax(hit_len)\nkeep healthy\nroute s",
        {},
        "keep healthy",
        "filter-order",
        "filters come before picks, and `s` is already picked",
        "move this line above it",
    ),
    (
        "route argmin(kv_usage / (1 - kv_usage))",
        {},
        "1 - kv_usage",
        "divisor",
        "this divisor may be 0",
        "keep it above 0: greatest(1 - kv_usage, 0.01); or say what x / 0 is: ratio(x, 1 - kv_usage, default: …)",
    ),
    (
        "route argmin(requests) when min(waiting where healthy) < 4",
        {},
        "min(waiting where healthy)",
        "nobody",
        "`where` may leave nobody, and `min` of nobody is not a number",
        "say what it is then: min(… where …, default: 0)",
    ),
    (
        "route argmin(norm(requests where healthy))",
        {},
        "requests where healthy",
        "where",
        "`norm` does not take `where`",
        "restrict the pick or the reduction instead: argmin(norm(…) where …)",
    ),
    (
        "route argmin(requests) when req.turn = 0",
        {},
        "=",
        "syntax",
        "did not expect `=` here",
        "compare with `==`; `=` only follows a name being defined",
    ),
    (
        "route argmin(requests) when 1 < req.turn < 3",
        {},
        "<",
        "chain",
        "comparisons do not chain",
        "write `a < b and b < c`",
    ),
    (
        "gaurd healthy",
        {},
        "gaurd",
        "statement",
        "a statement cannot start with `gaurd`",
        "a statement starts with use, param, let, def, keep, prefer, route, reject, hold or test",
    ),
    (
        "let x = 5 requests\ngaurd healthy",
        {},
        "gaurd",
        "statement",
        "a statement cannot start with `gaurd`",
        "a statement starts with use, param, let, def, keep, prefer, route, reject, hold or test",
    ),
    (
        "if req.turn == 0: route rr_argmin(0)",
        {},
        "if",
        "statement",
        "a statement cannot start with `if`",
        "a condition stands behind what it decides: `route … when …`",
    ),
    ("route ranks(requests)", {}, "ranks", "unknown-function", "unknown function `ranks`", "did you mean `rank`?"),
    (
        "route softmin(hit_len, temperature: 5 requests)",
        {},
        "5 requests",
        "units",
        "the temperature has the unit of the score, tokens, not requests",
        "for a scale-free one use norm(v)",
    ),
    (
        "route softmin(requests, temprature: 0)",
        {},
        "temprature",
        "arguments",
        "`softmin` has no `temprature:`",
        "did you mean `temperature`?",
    ),
    (
        "route argmin(requests) when req.model == gpt",
        {},
        "gpt",
        "unknown-name",
        "unknown name `gpt`",
        'define it above, or quote it if it is a string: "gpt"',
    ),
    (
        "let x = 5\ny = 3",
        {},
        "y",
        "statement",
        "a statement cannot start with `y`",
        "to name a value write `let y = …`",
    ),
    ("let x = mean(requests\nlet y = 3", {}, "(", "bracket", "`(` is not closed", ""),
    (
        'reject 429 "full when any(healthy)',
        {},
        '"full when any(healthy)',
        "unclosed-string",
        "this string is not closed",
        'end it with `"` on the same line',
    ),
    ("let hold = waiting", {}, "hold", "reserved", "`hold` is a reserved word", "choose another name"),
    ("param A = 1\nlet A = 2", {}, "A", "redefined", "`A` is already defined on line 2", "names are never redefined"),
    (
        "let mean = mean(requests)\nkeep requests < mean",
        {},
        "mean",
        "hidden",
        "`mean` is a built-in; a name cannot hide it",
        "",
    ),
    (
        "def calm(l) = min(l) < 3\nroute argmin(requests) when calmm(requests)\nroute rr_argmin(requests)\n"
        'test "t"\n  instance | requests\n  a | 4\n  expect a failing calm',
        {},
        "calmm",
        "unknown-function",
        "unknown function `calmm`",
        "did you mean `calm`?",
    ),
    ("let requests = running", {}, "requests", "hidden", "`requests` is a feature; a name cannot hide it", ""),
    (
        "route argmin(requests) when req.turn == 0 as a\nroute argmin(requests) when req.turn == 1 as a",
        {},
        "a",
        "label",
        "`a` already labels line 2",
        "",
    ),
    (
        "route argmin(requests) when req.turn == 0\nroute argmin(requests) as route_1",
        {},
        "route_1",
        "label",
        "`route_1` already labels line 2",
        "",
    ),
    (
        "keep healthy as keep_2\nkeep requests < 5\nroute argmin(requests)",
        {},
        "keep requests < 5",
        "label",
        "`keep_2` already labels line 2",
        "",
    ),
    (
        "param OVERLOAD = 0.5 in 1.0..",
        {},
        "0.5",
        "default",
        "the default of `OVERLOAD` is outside its own range 1..",
        "",
    ),
    (
        "param OVERLOAD = 2.0 in 1.0..\nroute argmin(requests * OVERLOAD)",
        {"OVERLOAD": 0.5},
        "OVERLOAD",
        "setting",
        "configuration sets `OVERLOAD` to 0.5, outside 1..",
        "",
    ),
    (
        "param OVERLOAD = 2.0 in 1.0..\nroute argmin(requests * OVERLOAD)",
        {"OVERLAOD": 3.0},
        "p",
        "setting",
        "configuration sets `OVERLAOD`, which this policy does not declare",
        "did you mean `OVERLOAD`?",
    ),
    (
        "param LOAD = requests\nroute argmin(LOAD)",
        {},
        "requests",
        "choices",
        "`LOAD` may be any feature",
        "list the choices: `param LOAD = requests in {requests, …}`",
    ),
    (
        "def sum_up(a, b) = a + b\nroute argmin(sum_up(requests, hit_len))",
        {},
        "sum_up(requests, hit_len)",
        "units",
        "cannot add requests and tokens",
        "in `sum_up`, line 2: put both on one scale first, e.g. norm(...) of each, or divide by a rate",
    ),
    (
        "def f(a, b) = a + b\nroute argmin(f(requests))",
        {},
        "f(requests)",
        "arguments",
        "`f` takes 2 argument(s) (a, b), not 1",
        "",
    ),
    (
        "def f(x) = f(x) + 1\nroute argmin(f(requests))",
        {},
        "f(requests)",
        "unknown-function",
        "unknown function `f`",
        "in `f`, line 2: define it above this line; a definition cannot use itself",
    ),
    (
        "let s = argmin(requests)\nroute s when s == s",
        {},
        "s == s",
        "operand",
        "`==` does not compare instances",
        "compare its values: `l[s]`",
    ),
    (
        "hold for 2s",
        {},
        "hold for 2s",
        "hold",
        "this would hold every request until its time is up",
        "give it a `when`",
    ),
    (
        "hold for 500 when any(healthy)",
        {},
        "500",
        "duration",
        "expected a duration, found a plain number",
        "e.g. 500ms or 2s",
    ),
    (
        'reject 200 "no" when any(healthy)',
        {},
        "200",
        "status",
        "200 is not an error status",
        "use 429 to shed and 503 when nobody can serve",
    ),
    (
        "route argmin(requests) when !(req.turn == 0)",
        {},
        "!",
        "character",
        "unexpected character `!`",
        "not equal is `!=`; negation is `not`",
    ),
    ("route argmin(requests * 1e999)", {}, "1e999", "too-large", "`1e999` is too large", "numbers are at most 1e15"),
    (
        'route argmin(requests)\ntest "t"\n  instance | requests | waiting\n  a | 1\n  expect a',
        {},
        "a | 1",
        "row",
        "this row has 1 cells for 2 columns",
        "write `?` where nobody knows the value",
    ),
    (
        'route argmin(requests)\ntest "t"\n  instance | turn\n  a | 1\n  expect a',
        {},
        "turn",
        "unknown-feature",
        "unknown feature `turn`",
        "request fields go into `given turn = …`",
    ),
    (
        'route argmin(requests)\ntest "t"\n  instance | requests\n  a | 1\n  expect b',
        {},
        "b",
        "expect",
        "`b` is not in the table",
        "",
    ),
    (
        'route argmin(requests) as least\ntest "t"\n  instance | requests\n  a | 1\n  expect a as leest',
        {},
        "leest",
        "expect",
        "no rule is labelled `leest`",
        "did you mean `least`?",
    ),
    (
        "param LOAD = requests in {requests, unprefilled}\n"
        "param FLOOR = 2 requests\nroute argmin(LOAD) when max(LOAD) <= FLOOR",
        {},
        "max(LOAD) <= FLOOR",
        "units",
        "cannot compare tokens with requests, if LOAD = unprefilled",
        "a unit may be the parameter itself: `0 LOAD`",
    ),
    (
        "param FLOOR = 0 LOAD in 0..\nparam LOAD = requests in {requests, unprefilled}\n"
        "route argmin(LOAD) when max(LOAD) > FLOOR",
        {},
        "LOAD",
        "unit",
        "unknown unit `LOAD`",
        "define it above this line",
    ),
    ("param RATE = 5 per second", {}, "per", "unit", "a unit is missing before `per`", "e.g. 5 requests per second"),
    (
        "def f(requests) = requests\nroute argmin(f(running))",
        {},
        "requests",
        "hidden",
        "`requests` is a feature; an argument cannot hide it",
        "",
    ),
    ("route argmim(requests)", {}, "argmim", "unknown-function", "unknown function `argmim`", "did you mean `argmin`?"),
    (
        "def f() = 3",
        {},
        ")",
        "arguments",
        "a definition takes at least one argument",
        "a value without arguments is a `let`",
    ),
    ("param A = .5", {}, ".", "bare-fraction", "a number starts with a digit", "write `0.5`"),
    ('keep role in {"a", 3}', {}, "3", "set", "a set holds strings, not number", ""),
    ("keep model < role", {}, "model < role", "operand", "`<` does not compare strings", ""),
    (
        "route argmin(requests) when req.turn",
        {},
        "req.turn",
        "condition",
        "a condition is a truth value, but this is number",
        "compare it with something, e.g. `> 0`",
    ),
    (
        "keep requests",
        {},
        "requests",
        "mask",
        "`keep` needs a truth value, found requests per instance",
        "compare it with something, e.g. `> 0`",
    ),
    (
        "keep healthy and pool",
        {},
        "pool",
        "operand",
        "`and` takes truth values, found string per instance",
        'compare it with something, e.g. `== "…"`',
    ),
    (
        "keep not pool",
        {},
        "pool",
        "operand",
        "`not` takes a truth value, found string per instance",
        'compare it with something, e.g. `== "…"`',
    ),
    (
        "let x = 1 if req.turn else 2",
        {},
        "req.turn",
        "condition",
        "a condition is a truth value, but this is number",
        "compare it with something, e.g. `> 0`",
    ),
    (
        "let l = requets\nkeep healty\nroute argmin(l) whn any(healthy)",
        {},
        "requets",
        "unknown-name",
        "unknown name `requets`",
        "did you mean `requests`?",
    ),
    (
        "let l = requets\nkeep healty\nroute argmin(l) whn any(healthy)",
        {},
        "healty",
        "unknown-name",
        "unknown name `healty`",
        "did you mean `healthy`?",
    ),
    (
        "let l = requets\nkeep healty\nroute argmin(l) whn any(healthy)",
        {},
        "whn",
        "syntax",
        "did not expect `whn` here",
        "did you mean `when`?",
    ),
    (
        "route argmin(requests) when any(healthy) || any(draining)",
        {},
        "|",
        "syntax",
        "did not expect `|` here",
        "write `or`",
    ),
    (
        "route argmin(requests) // the shortest",
        {},
        "/",
        "syntax",
        "did not expect `/` here",
        "comments start with `#`",
    ),
    (
        "let x = mean(requests) ** 2\nroute argmin(requests)",
        {},
        "*",
        "syntax",
        "did not expect `*` here",
        "write a product: x * x",
    ),
    (
        "let x = req.turn == 0 ? 1 : 2\nroute argmin(requests)",
        {},
        "?",
        "syntax",
        "did not expect `?` here",
        "write `x if c else y`",
    ),
    (
        "route argmin(requests) when req.turn is 0",
        {},
        "is",
        "syntax",
        "did not expect `is` here",
        "compare with `==`",
    ),
    (
        "route argmin(requests) when True",
        {},
        "True",
        "unknown-name",
        "unknown name `True`",
        "did you mean `true`?",
    ),
    (
        "route argmax(hrw(id))",
        {},
        "id",
        "arguments",
        "`hrw` needs a string, found string per instance",
        "look one up: v[s]",
    ),
    (
        "hold for -2s when any(healthy)\nroute argmin(requests)",
        {},
        "-2s",
        "duration",
        "this duration is always below 0",
        "e.g. 500ms or 2s",
    ),
    (
        "use p (x)\nroute argmin(requests)",
        {},
        "p",
        "use",
        "these files use each other: p → p",
        "move what they share into a library of its own",
    ),
    (
        "route argmin(clamp(requests, 5, 3))",
        {},
        "clamp(requests, 5, 3)",
        "range",
        "the lower bound of `clamp` is always above the upper one",
        "write the smaller one first: clamp(x, lo, hi)",
    ),
    *(
        (
            f"keep {mask}\nroute argmin(requests)",
            {},
            amount,
            "range",
            f"`{name}` takes 1, 2, 3, … of the instances, and this is {amount}",
            "write a whole number, 1 at least",
        )
        for name, mask, amount in (
            ("draw", "draw(0)", "0"),
            ("draw", "draw(2.5)", "2.5"),
            ("top", "top(requests, -1)", "-1"),
        )
    ),
    (
        "param N = 0 in 0..0\nkeep draw(N)\nroute argmin(requests)",
        {},
        "N",
        "range",
        "`draw` takes 1, 2, 3, … of the instances, and this is 0",
        "write a whole number, 1 at least",
    ),
    (
        "route argmin(ratio(requests, 0, default: 1))",
        {},
        "0",
        "divisor",
        "this divisor is always 0",
        "write the default alone",
    ),
    (
        'param POOL = "a" in {"a", "b", "a"}\nroute argmin(requests)',
        {},
        '"a"',
        "domain",
        "this choice is listed twice",
        "take one of them out",
    ),
    (
        "param LOAD = requests in {requests, running, requests}\nroute argmin(LOAD)",
        {},
        "requests",
        "domain",
        "this choice is listed twice",
        "take one of them out",
    ),
    *(
        (f"{code}\nroute argmin(requests)", {}, caret, "syntax", f"did not expect `{caret}` here", help_text)
        for code, caret, help_text in (
            ("param X = 3 in [0, 5]", "[", "a range is written `0..5` or `0..`, choices `{a, b}`"),
            ("let x = 1,000", ",", "numbers have no separators: write 1000"),
            ("keep healthy when req.turn =< 2", "=", "write `<=`"),
            ("keep healthy when req.turn <> 2", ">", "write `!=`"),
            ("/* all */ keep healthy", "/", "comments start with `#`"),
            ("-- all", "-", "comments start with `#`"),
        )
    ),
    *(
        (
            f'route argmin(requests)\ntest "t"\n{body}',
            {},
            caret,
            "syntax",
            f"did not expect `{caret}` here",
            help_text,
        )
        for body, caret, help_text in (
            ("instance | requests |\na | 1 |\nexpect a", "|", "a row ends with its last cell, without a `|`"),
            (
                "| instance | requests |\n| a | 1 |\nexpect a",
                "|",
                "a row starts with the name of its instance, without a `|`",
            ),
            ("instance | requests\na | 1\nexpected a", "expected", "did you mean `expect`?"),
            ("instance | requests\n--- | ---\na | 1\nexpect a", "-", "expected `(`, `|` or a name"),
            (
                "instance | requests\na | 1 requests\nexpect a",
                "requests",
                "cells carry no unit: a column has that of its feature",
            ),
            (
                "given req.turn = 1\ninstance | requests\na | 1\nexpect a",
                ".",
                "`given` is of the request, so write `turn = …`",
            ),
        )
    ),
    *(
        (f"{code}\nroute argmin(requests)", {}, caret, "unfinished", f"this `{word}` is not finished", help_text)
        for code, word, caret, help_text in (
            ("use common", "use", "common", "say what it takes: use common (a, b)"),
            (
                "keep healthy if req.turn == 0",
                "keep",
                "0",
                "expected `else`; the condition of a rule or a filter follows `when`",
            ),
        )
    ),
    *(
        (f"{code}\nroute argmin(requests)", {}, caret, "syntax", f"did not expect `{caret}` here", help_text)
        for code, caret, help_text in (
            ("keep kv_usage < 0,9", ",", "decimals follow a dot: write 0.9"),
            ("keep requests < 12,5", ",", "decimals follow a dot: write 12.5"),
            ("keep requests < 1,000,000", ",", "numbers have no separators: write 1000000"),
            ("param X = 1 in 0...5", ".", "a range has two dots: `0..5`"),
            ('keep role in ["a", "b"]', "[", 'a set is written {"a", "b"}'),
            ('keep role not in ("a", "b")', ",", 'a set is written {"a", "b"}'),
            ("keep healthy as up when req.turn > 0", "when", "the label comes last: … when … as …"),
            (
                'reject 429 "full" when any(healthy) retry 2s',
                "retry",
                'the condition follows it: reject 429 "…" retry … when … as …',
            ),
            ("let x = 2*norm(requests) + 3norm(hit_len)", "norm", "a product needs its sign: 3 * norm(…)"),
            ("param X = 5 in 0-10", "-", "expected `..`"),
            ("keep healthy as is-up", "-", "names have letters, digits and `_` only"),
            ('keep healthy as "up"', '"up"', "a name is written without quotes"),
            ("route softmin(requests, temperature = 1)", "=", "an argument is named with a colon: `temperature: …`"),
            (
                "route argmin(requests) when any(healthy) else argmax(hit_len)",
                "else",
                "a condition stands behind what it decides: `route … when …`",
            ),
        )
    ),
    *(
        (
            f'param A = 1 in 0..2\nroute argmin(requests * A)\ntest "t"\n{case}\n  expect a',
            {},
            caret,
            kind,
            message,
            help_text,
        )
        for case, caret, kind, message, help_text in (
            (
                "  instance | role\n  a | prefill",
                "prefill",
                "syntax",
                "did not expect `prefill` here",
                'quote it if it is a string, "prefill"; what nobody knows is `?`',
            ),
            (
                "  instance | loras\n  a | {x}",
                "x",
                "syntax",
                "did not expect `x` here",
                'quote it if it is a string, "x"; what nobody knows is `?`',
            ),
            (
                "  given A = 2\n  instance | requests\n  a | 1",
                "A",
                "unknown-field",
                "a request has no `A`",
                "a parameter is set by `with A = …`",
            ),
            (
                "  with turn = 2\n  instance | requests\n  a | 1",
                "turn",
                "setting",
                "this policy declares no `turn`",
                "request fields go into `given turn = …`",
            ),
            (
                "  given tenant = gold\n  instance | requests\n  a | 1",
                "tenant = gold",
                "value",
                "`tenant` is a string",
                'quote it: "gold"',
            ),
        )
    ),
    (
        "route argmin(requests)\nelse:\n  route argmax(hit_len)",
        {},
        "else",
        "statement",
        "a statement cannot start with `else`",
        "a condition stands behind what it decides: `route … when …`",
    ),
    (
        "route argmin(requests) when req.model == 'gpt'\nroute argmin(requests)",
        {},
        "'gpt'",
        "character",
        "unexpected character `'`",
        'strings are written "…"',
    ),
    (
        "keep req.prompt_len > 4k tokens",
        {},
        "k",
        "unit",
        "unknown unit `k`",
        "numbers have no separators and no letters: e.g. 5000 or 5e3",
    ),
    (
        "keep prefill_rate > 1000 tokens/second",
        {},
        "second",
        "unknown-name",
        "unknown name `second`",
        "a unit stands right behind a number: 16 requests, 5 tokens per second",
    ),
    (
        'route argmin(requests) when req["turn"] > 0',
        {},
        "req",
        "unknown-name",
        "unknown name `req`",
        "name one of its fields: req.turn, req.prompt_len, …",
    ),
    (
        "route argmin(requests) or argmax(hit_len)",
        {},
        "argmin(requests) or argmax(hit_len)",
        "operand",
        "`or` takes truth values, found two instances",
        "the first that is somebody: first(…, …)",
    ),
    (
        'keep role == {"both"}\nroute argmin(requests)',
        {},
        'role == {"both"}',
        "operand",
        "`==` does not compare sets",
        'ask for a member: "a" in …',
    ),
    (
        "param MODE = fast in {fast}",
        {},
        "fast",
        "unknown-feature",
        "`fast` is no feature",
        'quote it if it is a string: "fast"',
    ),
    *(
        (f"route {pick}", {}, name, "unknown-function", f"unknown function `{name}`", help_text)
        for pick, name, help_text in (
            ("argmin(hit_len(requests))", "hit_len", "of one instance, picked as s, it is `hit_len[s]`"),
            ("argmin(abs(requests - median(requests)))", "median", "write `quantile(…, 0.5)`"),
            ("round_robin()", "round_robin", "write `rr_argmin(0)`"),
        )
    ),
    (
        "let s = argmin(requests)\nroute s when s.hit_len > 5\nroute s",
        {},
        "s",
        "unknown-name",
        "`s` has no fields",
        "a feature of one instance is looked up: `hit_len[s]`",
    ),
    (
        "route argmin(max(requests, waiting))",
        {},
        "max(requests, waiting)",
        "arguments",
        "`max` takes 1 argument, not 2",
        "of two values it is greatest(x, y); max(v [where m, default: x])",
    ),
    (
        "hold for 500 ms when any(healthy)\nroute argmin(requests)",
        {},
        "ms",
        "unit",
        "unknown unit `ms`",
        "durations are written 500ms, 2s, 5m, 1h, without a space",
    ),
    (
        "let x = 5k\nroute argmin(requests * x)",
        {},
        "k",
        "unit",
        "unknown unit `k`",
        "numbers have no separators and no letters: e.g. 5000 or 5e3",
    ),
    *(
        (f"{code}\nroute argmin(requests)", {}, caret, kind, message, help_text)
        for code, caret, kind, message, help_text in (
            ('keep pool is not "a"', "is", "syntax", "did not expect `is` here", "compare with `!=`"),
            (
                "let x = if any(healthy) then 1 else 2",
                "if",
                "syntax",
                "did not expect `if` here",
                "write `x if c else y`",
            ),
            (
                "keep hit_len == ?",
                "?",
                "syntax",
                "did not expect `?` here",
                "whether it is known is asked with `known(…)`",
            ),
            (
                "route argmin(hit_len, then requests) when any(healthy)",
                "requests",
                "syntax",
                "did not expect `requests` here",
                "an argument is named with a colon: `then: …`",
            ),
            (
                "keep 2 kv_usage < 1",
                "kv_usage",
                "unit",
                "unknown unit `kv_usage`",
                "a product needs its sign: … * kv_usage",
            ),
            ("let x = 1.", ".", "syntax", "did not expect `.` here", "a digit follows the dot: write 1.0, or 1"),
            (
                "param X = 5 tokens/s",
                "/",
                "syntax",
                "did not expect `/` here",
                "units divide with `per`: 5 tokens per second",
            ),
            (
                "param X = 5 tokens per s",
                "s",
                "unit",
                "unknown unit `s`",
                "behind `per` time is in seconds: per second",
            ),
            (
                "hold for 1e6s when any(healthy)",
                "s",
                "unit",
                "unknown unit `s`",
                "durations have no exponent: 500ms, 2s, 5m, 1h",
            ),
            ("keep req.turn > 3 annd healthy", "annd", "unit", "unknown unit `annd`", "did you mean `and`?"),
            (
                "keep requests > 3\nAnd healthy",
                "And",
                "statement",
                "a statement cannot start with `And`",
                "did you mean `and`?",
            ),
            ("keep Not healthy", "Not", "syntax", "did not expect `Not` here", "did you mean `not`?"),
            ("keep request > 3", "request", "unknown-name", "unknown name `request`", "did you mean `requests`?"),
            (
                "keep role == decode",
                "decode",
                "unknown-name",
                "unknown name `decode`",
                'define it above, or quote it if it is a string: "decode"',
            ),
            ("param ON = True", "True", "unknown-feature", "`True` is no feature", "did you mean `true`?"),
            (
                'param POOL = a in {"a", "b"}\nkeep pool == POOL',
                "a",
                "unknown-feature",
                "`a` is no feature",
                'quote it if it is a string: "a"',
            ),
            (
                'param LOAD = requests in {"requests", "running"}\nkeep LOAD > 1',
                '"requests"',
                "unknown-feature",
                "this is no feature",
                "features are written without quotes",
            ),
            (
                "keep healthy\n  when req.turn > 0\n  when req.held > 1s",
                "when",
                "syntax",
                "did not expect `when` here",
                "conditions are joined by `and`",
            ),
            (
                "let x = 1\nwhen req.turn > 0",
                "when",
                "statement",
                "a statement cannot start with `when`",
                "a condition stands behind what it decides: `route … when …`",
            ),
            (
                "route argmax(hit_len) when req.turn > 0\notherwise",
                "otherwise",
                "statement",
                "a statement cannot start with `otherwise`",
                "the last `route`, without a `when`, is what applies otherwise",
            ),
            ("keep requests ≤ 5", "≤", "character", "unexpected character `≤`", "write `<=`"),
            ("keep requests – 1 > 5", "–", "character", "unexpected character `–`", "write `-`"),
            ("keep pool == “a b”", "“a b”", "character", "unexpected character `“`", 'strings are written "…"'),
            (
                "keep größe > 5",
                "öße",
                "character",
                "unexpected character `ö`",
                "names have the letters a to z, digits and `_` only",
            ),
            (
                "keep requests % 2 == 0",
                "%",
                "character",
                "unexpected character `%`",
                "shares are plain numbers: write 0.5 for 50%; there is no remainder",
            ),
            (
                "keep kv_usage < 50 percent",
                "percent",
                "unit",
                "unknown unit `percent`",
                "shares are plain numbers: write 0.5 for 50%",
            ),
            (
                "let x = mean(healthy)",
                "healthy",
                "arguments",
                "`mean` needs a number per instance, found bool per instance",
                "for how many it holds says count(…)",
            ),
            (
                "keep healthy when known(req.turn)",
                "req.turn",
                "arguments",
                "`known` asks about a value per instance, found number",
                "a guard that reads an unknown number of the request fails",
            ),
            (
                "let s = argmin(requests)\nroute s when s == req.prefill",
                "s == req.prefill",
                "operand",
                "`==` does not compare instances",
                "compare its id: `id[s]`",
            ),
            ("let x = requests / 0", "0", "divisor", "this divisor is always 0", "divide by something else"),
            (
                "keep requests < quantile(requests, 90)",
                "90",
                "range",
                "`quantile` needs a share in 0..1, and this is 90",
                "write 0.9 for 90 %",
            ),
            (
                "keep draw(max(requests))",
                "max(requests)",
                "units",
                "`draw` needs a plain number, found requests",
                "take its unit away: … / 1 request",
            ),
            (
                "route argmin(requests, within: 2) when any(healthy)",
                "within",
                "arguments",
                "`argmin` has no `within:`",
                "`within:` is of rr_argmin, rr_argmax; argmin(v [where m], then: v…)",
            ),
            (
                'reject 429 "x" retry unprefilled / prefill_rate when any(healthy)',
                "unprefilled / prefill_rate",
                "duration",
                "expected one duration, found seconds per instance",
                "make one of it: min(…), mean(…) or max(…)",
            ),
            (
                "keep healthy when all(pool)",
                "pool",
                "arguments",
                "`all` needs a truth value per instance, found string per instance",
                'compare it with something, e.g. `== "…"`',
            ),
            (
                "let m = count(healthy where pool)",
                "pool",
                "where",
                "`where` needs a truth value per instance, found string per instance",
                'compare it with something, e.g. `== "…"`',
            ),
        )
    ),
    *(
        (
            f"{word} {rest}\n{use}\nroute argmin(requests)",
            {},
            word,
            "statement",
            f"a statement cannot start with `{word}`",
            help_text,
        )
        for word, rest, use, help_text in (
            (
                "if",
                "req.turn == 0:",
                "route argmax(hit_len)",
                "a condition stands behind what it decides: `route … when …`",
            ),
            (
                "when",
                "req.turn == 0",
                "route argmax(hit_len)",
                "a condition stands behind what it decides: `route … when …`",
            ),
            ("filter", "healthy", "keep pool != req.model", "write `keep` or `prefer`"),
            ("require", "healthy", "keep pool != req.model", "write `keep …`"),
            ("fn", "f(x) = x + 1", "keep f(requests) > 2", "write `def`"),
            ("function", "f(x) = x + 1", "keep f(requests) > 2", "write `def`"),
            ("const", "FEW = 2 requests", "keep requests > FEW", "write `param` or `let`"),
            ("few", ":= 2 requests", "keep requests > few", "to name a value write `let few = …`"),
            ("Param", "LOAD = requests in {requests, running}", "let few = 0 LOAD", "did you mean `param`?"),
        )
    ),
    *(
        (f"param T = 2\n{code}", {}, caret, kind, message, f"give `T` its unit where it is {where}")
        for code, caret, kind, message, where in (
            (
                "route rr_argmin(requests, within: T)",
                "T",
                "units",
                "`within:` has the unit of the score, requests, not a plain number",
                "defined: `param T = … requests`",
            ),
            (
                "route softmin(requests * hit_len, temperature: T)",
                "T",
                "units",
                "the temperature has the unit of the score, requests·tokens, not a plain number",
                "used: T * 1 request * 1 token",
            ),
            (
                "route argmin(least(requests, T))",
                "least(requests, T)",
                "units",
                "`least` takes values of one unit, not requests and a plain number",
                "defined: `param T = … requests`",
            ),
            (
                "route argmin(requests if req.turn > 0 else T)",
                "requests if req.turn > 0 else T",
                "branches",
                "both sides of `if` are of one kind, not requests per instance and number",
                "defined: `param T = … requests`",
            ),
            (
                "route argmin(mean(requests where healthy, default: T))",
                "T",
                "units",
                "`default:` has the unit of the result, requests, not a plain number",
                "defined: `param T = … requests`",
            ),
            (
                "route argmin(requests) when max(hit_len * requests) > T\nroute argmin(requests)",
                "max(hit_len * requests) > T",
                "units",
                "cannot compare requests·tokens with a plain number",
                "used: T * 1 request * 1 token",
            ),
        )
    ),
    *(
        (
            f'route argmin(requests)\ntest "t"\n  instance | requests\n{rest}',
            {},
            caret,
            "syntax",
            f"did not expect `{caret}` here",
            help_text,
        )
        for rest, caret, help_text in (
            ("  a | True\n  expect a", "True", "did you mean `true`?"),
            ("  a | 1\n  expect a failing req.turn > 0", ".", 'quote what is no name: failing "req.turn != 0"'),
            (
                '  a | 1\n  expect a\ntset "u"\n  instance | requests\n  a | 1\n  expect a',
                "tset",
                "did you mean `test`?",
            ),
        )
    ),
    (
        "param slo = 1 in 0..\nroute argmin(requests * slo)\n"
        'test "t"\n  with slo = 2 s\n  instance | requests\n  a | 1\n  expect a',
        {},
        "slo",
        "unit",
        "unknown unit `s`",
        "durations are written 500ms, 2s, 5m, 1h, without a space",
    ),
    ("param A = 1\nroute argmin(requests)", {}, "A", "unused", "parameter `A` is never used", ""),
    (
        "route argmin(requests) when 1 < 2\nroute argmax(hit_len)",
        {},
        "1 < 2",
        "constant",
        "this condition is the same in every decision",
        "",
    ),
    *(
        (f"{code}\nroute argmin(requests)", {}, caret, "constant", message, "")
        for code, caret, message in (
            ("route argmax(hit_len) when chance(0)", "chance(0)", "this condition is the same in every decision"),
            ("route argmax(hit_len) when chance(1)", "chance(1)", "this condition is the same in every decision"),
            ("keep requests >= 0", "requests >= 0", "this leaves everybody in every decision"),
            ("prefer kv_usage > 1", "kv_usage > 1", "this leaves nobody in every decision"),
            ("keep id not in {}", "id not in {}", "this leaves everybody in every decision"),
            (
                "route argmin(requests where kv_usage > 1)",
                "kv_usage > 1",
                "this `where` takes nobody in every decision",
            ),
            (
                "route first(argmin(requests where healthy), argmin(running), argmin(waiting)) when any(healthy)",
                "argmin(running)",
                "`first` always takes this, which is never absent",
            ),
            ("hold for 0s when any(healthy)", "0s", "this holds nothing: its time is up at once"),
            ("route sample(-requests) when any(healthy)", "-requests", "this is never above 0, so all are alike"),
            ('keep healthy when bucket("a") < 0.5', '"a"', "this key is the same for every request"),
            (
                "let l = requests if true else running\nkeep l < 5",
                "true",
                "this condition is the same in every decision",
            ),
        )
    ),
]

#: A file with three errors, where one must not hide another.
_SEVERAL = "let l = requets\nkeep healty\nroute argmin(l) whn any(healthy)"


def _found(code: str, settings: dict[str, float]) -> tuple[Diagnostic, ...]:
    try:
        return check_text(f"policy p\n{code}", WORDS, settings, "p.policy")[1].warnings
    except PolicyError as error:
        return error.diagnostics


@pytest.mark.parametrize(("code", "settings", "caret", "kind", "message", "help_text"), _ROWS)
def test_a_mistake_is_named_with_its_place_and_the_way_out_and_has_no_echo(
    code: str, settings: dict[str, float], caret: str, kind: str, message: str, help_text: str
) -> None:
    text = f"policy p\n{code}"
    # A row that is no whole policy decides nothing besides.
    found = [d for d in _found(code, settings) if d.code != "undecided" or d.message == message]
    hits = [(text[d.span.start : d.span.end], d.code, d.message, d.help) for d in found]
    assert (caret, kind, message, help_text) in hits
    assert len(found) == (3 if code == _SEVERAL else 1)


_MEANT = re.compile("did you mean `(.+)`")
#: Those whose way out is another word in place of the one under the caret.
_WORDS = [row for row in _ROWS if _MEANT.match(row[-1]) and row[2] != "p"]


@pytest.mark.parametrize(("code", "settings", "caret", "kind", "message", "help_text"), _WORDS)
def test_the_word_that_was_meant_mends_the_mistake(
    code: str, settings: dict[str, float], caret: str, kind: str, message: str, help_text: str
) -> None:
    before = _found(code, settings)
    fault = next(each for each in before if (each.code, each.message) == (kind, message))
    text, meant = f"policy p\n{code}", _MEANT.match(help_text)
    assert meant is not None
    after = _found((text[: fault.span.start] + meant[1] + text[fault.span.end :])[len("policy p\n") :], settings)
    assert (kind, message) not in [(each.code, each.message) for each in after]
    assert len(after) <= len(before)


@pytest.mark.parametrize("word", ["rout", "Route", "return"])
def test_a_mistyped_rule_below_the_header_is_not_missed_besides(word: str) -> None:
    assert [each.message for each in _found(f"{word} argmin(requests)", {})] == [
        f"a statement cannot start with `{word}`"
    ]


def test_a_keyword_behind_a_hyphen_starts_no_statement() -> None:
    with pytest.raises(PolicyError) as caught:
        check_text("policy my-policy\nroute argmin(requests)", WORDS)
    assert [(each.message, each.help) for each in caught.value.diagnostics] == [
        ("did not expect `-` here", "names have letters, digits and `_` only")
    ]


def test_a_report_shows_line_caret_and_help() -> None:
    with pytest.raises(PolicyError) as caught:
        check_text("policy p\nlet l = requets\nroute argmin(l)", WORDS, {}, "p.policy")
    assert str(caught.value) == (
        "error: unknown name `requets`\n"
        " --> p.policy:2:9\n"
        "  |\n"
        "2 | let l = requets\n"
        "  |         ^^^^^^^\n"
        "  = help: did you mean `requests`?"
    )

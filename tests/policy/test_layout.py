"""Canonical layout of policies."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.policy import PolicyError
from smetric.policy.layout import format_text
from smetric.policy.lexer import cut, tokenize
from smetric.policy.parser import parse
from smetric.policy.testing import suite_of
from tests.policy.author import Author

ROOT = Path(__file__).parents[2]
#: A statement of every kind, each optional part, every operator, and lines that have to be broken.
EVERYTHING = """\
# what this is for
## All there is.
policy everything  # the name

use common (overloaded, hit_ratio)

param A         = -1.5 in -2..2
## Documented.
param PATIENCE  = 500ms in 0s..10s  # seconds
param BY        = requests in {requests, unprefilled}
param RATE_OF_A = 15928 tokens per second in 1..

let a          = {"x", "y"}
let b          = 1 if any(healthy) else 2 if not all(healthy) else -requests[argmin(requests)] / 2
let long_names = greatest(unprefilled + req.prompt_len - hit_len, 1 token)
               * (mean(requests where healthy and role in {"decode", "both"}, default: 0) + 1)
               / RATE_OF_A
let weighted   = A * norm(hit_len)
               + 2 * (1 - norm(requests))
               - 3 * norm(kv_usage)

def f(x, y) = x[y] * 2 not in {"a"} or not x == -y and 3 < 4
def g(z)    = z

# hard ones first
keep   healthy and not draining
keep   role in {"decode", "both"}  as serves
prefer kv_usage < 0.95             as has_room

reject 429 "all instances are full, # no comment" retry 2s
  when all(full)
   and not urgent
   and min(waiting) > 2 * MAX_WAITING             as shed
hold for PATIENCE  when all(full) and not urgent  as wait_for_room
route s            when req.turn != 0
                    and f(s, l)  # a guard
                    # and another
                    and g(c)                      as stick
route first(argmin(requests where healthy, then: waiting), rr_argmin(0))

test "a sentence with # no comment"
  with A = 2, BY = unprefilled
  given turn = ?, loras = {"a", "b"}, prompt_len = 1000, last = a
  instance | hit_len | pool  | loras      | age(hit_len)
  # the busy one
  a        |     900 | "x"   | {"a", "b"} |        500ms
  bb       |       ? | "yyy" | {}         |            ?  # nobody knows
  expect a or bb as stick failing "req.turn != 0"

test "another"
  instance | requests
  a        |       -1
  expect reject 429
# the end
"""
#: Those whose layout is tried at random; the others are much alike.
VARIED = ("smetric", "lmetric", "two_pools")
SHIPPED = sorted([*ROOT.glob("policies/*.policy"), *ROOT.glob("examples/*/*.policy")])
TEXTS = [EVERYTHING, *(path.read_text() for path in SHIPPED if path.stem in VARIED)]
_COMMENT = re.compile(r'"[^"\n]*"|(#[^\n]*)')


def words(text: str) -> list[str]:
    return [str(token) for token in tokenize(text).tokens]


def comments(text: str) -> list[str]:
    return [match[1].rstrip() for match in _COMMENT.finditer(text) if match[1]]


def meaning(text: str) -> object:
    """All that a policy says, its documentation included."""
    file = parse(text)
    return file.name, file.doc, file.statements


def test_format_keeps_a_canonical_text() -> None:
    assert format_text(EVERYTHING) == EVERYTHING


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_format_keeps_shipped_policies_and_examples(path: Path) -> None:
    assert format_text(path.read_text()) == path.read_text(), f"run `smetric fmt {path.relative_to(ROOT)}`"


def test_format_keeps_the_policies_of_the_manual() -> None:
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("policies/*.md"), *ROOT.glob("examples/*/*.md")]
    blocks = [
        (page.name, block)
        for page in pages
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.M | re.S)
        if re.search(r"^(policy|library) \w+$", block, re.M) and not re.search(r"^error: ", block, re.M)
    ]
    assert blocks
    for page, block in blocks:
        assert format_text(block) == block, f"a policy in {page} is not laid out as `smetric fmt` does"


@pytest.mark.parametrize(
    ("written", "laid_out"),
    [
        ("let a=1let b=2", "let a = 1\nlet b = 2"),
        ("let x=-1-  -2", "let x = -1 - -2"),
        ("param A=0 in 0tokens .. 5tokens", "param A = 0 in 0 tokens..5 tokens"),
        ("let a = f ( x [ y ] , then : z )", "let a = f(x[y], then: z)"),
        ("keep not ( a )when b as c", "keep not (a)  when b  as c"),
        ("let a = 1 # one\nlet bcd = 20 # two", "let a   = 1   # one\nlet bcd = 20  # two"),
        ("let a = 1\n\n\n\nlet bcd = 2\n\n\n", "let a = 1\n\nlet bcd = 2"),
        ("let a = # why\n 1", "let a =  # why\n  1"),
        ("use b(c)", "use b (c)"),
        ("use b(c,d)use longer ( e )", "use b (c, d)\nuse longer (e)"),
        ("route a when b and c and d", "route a  when b\n          and c\n          and d"),
        ("keep a\n# says why\nprefer b", "keep   a\n# says why\nprefer b"),
        ("route a\nlet b = 1 ## no doc\n##doc\nlet c = 1", "route a\nlet b = 1  ## no doc\n##doc\nlet c = 1"),
    ],
)
def test_format_lays_out_statements(written: str, laid_out: str) -> None:
    assert format_text(f"policy p\n{written}") == f"policy p\n\n{laid_out}\n"


def test_format_lays_out_libraries() -> None:
    assert (
        format_text("library a\ndef f(x)=x\ndef longer(y)=y") == "library a\n\ndef f(x)      = x\ndef longer(y) = y\n"
    )


def test_format_writes_line_feeds() -> None:
    assert format_text("policy p\r\n\r\nroute rr_argmin(0)  # a\r\n") == "policy p\n\nroute rr_argmin(0)  # a\n"


def test_format_refuses_a_text_that_does_not_parse() -> None:
    with pytest.raises(PolicyError) as refused:
        format_text("policy p\nlet = 1\nroute rr_argmin(0", "mine.policy")
    assert len(refused.value.diagnostics) == 2
    assert "mine.policy:2:5" in str(refused.value)


def test_format_refuses_to_make_a_file_too_long() -> None:
    rows = f'a|"{"x" * 3000}"|1\n' + 'b|"y"|1\n' * 25
    text = f'policy p\nroute rr_argmin(0)\ntest "t"\ninstance|pool|requests\n{rows}expect a'
    with pytest.raises(PolicyError, match="laid out, this file would be too long: a policy has at most 65536 bytes"):
        format_text(text)


def test_format_keeps_lines_within_the_width() -> None:
    terms = " + ".join(f"weight_{i} * norm(requests)" for i in range(40))
    calls = "greatest(" * 12 + "requests" + "".join(f", unprefilled_{i} - hit_len + {i})" for i in range(12))
    guards = " and ".join(f"a_rather_long_name_{i} > {i}" for i in range(9))
    out = format_text(f"policy p let a = {terms} let b = {calls} route a when {guards} as c")
    assert max(map(len, out.splitlines())) <= 130
    assert [line for line in out.splitlines() if len(line) > 100 and "greatest" not in out] == []
    assert words(out) == words(f"policy p let a = {terms} let b = {calls} route a when {guards} as c")


class Scrambler:
    """Lays a text out anew at random: other spaces, other lines, and comments where none were."""

    def __init__(self, seed: int, added: float) -> None:
        self._random = random.Random(seed)
        self._added = added
        self._count = 0

    def scrambled(self, text: str) -> str:
        pieces = cut(tokenize(text))
        out, end = "", 0
        for piece in pieces:
            tokens = piece.tokens
            out += self._gap_between(text[end : tokens[0].start])
            for token, following in zip(tokens, [*tokens[1:], None], strict=True):
                out += str(token)
                end = token.end
                if following is not None:
                    unit = token.type == "NUMBER" and following.type == "NAME" and tokens[0].type != "TEST"
                    gap = text[end : following.start]
                    out += gap if "#" in gap else self._gap(" " if unit else "")
        return out + text[end:]

    def _gap_between(self, gap: str) -> str:
        """Between statements comments and empty lines stay."""
        return gap if gap.strip() or "\n\n" in gap else self._random.choice(["\n", " ", "\n  ", " \r\n\t"])

    def _gap(self, only: str) -> str:
        if only:
            return only * self._random.randint(1, 3)
        if self._random.random() < self._added:
            self._count += 1
            comment = self._random.choice([" # added {}\n", "\n\n  ## added {}\n", "#added {}\n # and\n\n"])
            return comment.format(self._count)
        return self._random.choice([" ", "  ", "\n", "\n\n    ", "\t", "\r\n "])


@settings(max_examples=40)
@given(st.sampled_from(TEXTS), st.integers(0, 2**32))
def test_format_restores_any_layout_of_a_policy(text: str, seed: int) -> None:
    assert format_text(Scrambler(seed, 0).scrambled(text)) == text


@pytest.mark.slow
@settings(max_examples=40)
@given(st.sampled_from(TEXTS), st.integers(0, 2**32), st.sampled_from([0.03, 0.3]))
def test_format_keeps_comments_and_meaning(text: str, seed: int, added: float) -> None:
    written = Scrambler(seed, added).scrambled(text)
    once = format_text(written)
    assert words(once) == words(written)
    assert comments(once) == comments(written)
    assert meaning(once) == meaning(written) == meaning(text)
    assert format_text(once) == once


@pytest.mark.parametrize("seed", range(20))
def test_format_keeps_the_meaning_of_random_policies(seed: int) -> None:
    written = Scrambler(seed, 0.1).scrambled(Author(random.Random(seed)).policy())
    once = format_text(written)
    assert (words(once), comments(once), meaning(once)) == (words(written), comments(written), meaning(written))
    assert format_text(once) == once


def test_format_keeps_the_names_of_guards() -> None:
    written = """policy p
route argmin(requests) when req.turn!=0 and max ( requests )<# two
  2 as calm
route rr_argmin(requests)
test "busy" given turn=1 instance|requests a|3 expect a failing "max(requests)  <2"
test "first" given turn=0 instance|requests a|3 expect a failing "req.turn != 0"
"""
    for text in (written, format_text(written)):
        assert [result.failure for result in suite_of(text, VOCABULARY).run()] == ["", ""]

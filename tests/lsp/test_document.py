"""What a text under way says to an editor; `|` in a text is where the cursor stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from smetric.features import VOCABULARY
from smetric.policy.builtin import BUILTINS
from smetric.policy.lexer import KEYWORDS, STATEMENTS
from smetric.tools.lsp import Document
from smetric.tools.reference import WordKind

TEXT = """\
policy mine

## How much is too much.
param OVERLOAD = 2.0 in 1.0..
param LIMIT    = 16 requests in 1..

let l = requests

def busy(s) = l[s] > OVERLOAD * mean(l)

route argmax(hit_len)  when req.turn != 0 and not busy(argmax(hit_len))  as stick
route rr_argmin(l)     when max(waiting) < LIMIT                         as calm
route rr_argmin(requests)

test "one"
  with OVERLOAD = 3
  given turn = 1, last = a
  instance | requests | age(hit_len)
  a        |        1 |           1s
  b        |        2 |           1s
  expect a as stick failing busy
"""


def at(place: str, *, text: str = TEXT) -> tuple[Document, int]:
    """The document, and the offset of the `|` in *place*, which is a piece of its text with a cursor in it."""
    offset = text.index(place.replace("‖", "")) + place.index("‖")
    return Document(text, "mine.policy"), offset


def hover(place: str) -> tuple[str, str] | None:
    document, offset = at(place)
    found = document.word_at(offset)
    return None if found is None else (found[0].form, found[0].doc)


def completed(text: str) -> dict[str, WordKind]:
    """What completes at the `‖` of *text*."""
    document = Document(text.replace("‖", ""), "mine.policy")
    return {word.text: word.kind for word in document.completions(text.index("‖"))}


def test_errors_come_all_at_once_and_with_their_places() -> None:
    document = Document("policy p\nlet a = reqests\nroute argmin(requests", "p.policy")
    found = document.diagnostics()
    assert [(each.code, each.severity.value) for each in found] == [("unknown-name", "error"), ("bracket", "error")]
    assert document.text[found[0].span.start : found[0].span.end] == "reqests"


def test_warnings_come_when_there_is_no_error() -> None:
    (found,) = Document("policy p\nparam A = 1\nroute rr_argmin(0)", "p.policy").diagnostics()
    assert (found.severity.value, "never used" in found.message) == ("warning", True)
    assert Document("policy p\nroute rr_argmin(0)", "p.policy").diagnostics() == ()


@pytest.mark.parametrize(
    "text", ["", "\n\n", "polic", '"', "policy p\nroute argmin(\x00)", "policy p #" + "x" * 70_000]
)
def test_any_text_is_answered(text: str) -> None:
    document = Document(text, "p.policy")
    assert document.diagnostics() != ()
    assert document.layout() is None
    for offset in (0, len(text) // 2, len(text)):
        assert isinstance(document.completions(offset), list)
        assert document.word_at(offset) is None or text.startswith("policy")


def test_a_text_is_answered_wherever_it_breaks_off() -> None:
    for end in range(0, len(TEXT), 23):
        document = Document(TEXT[:end], "p.policy")
        for offset in (end // 2, end):
            assert all(word.text for word in document.completions(offset))
            found = document.word_at(offset)
            assert found is None or found[0].text == TEXT[found[1].start : found[1].end]


def test_tests_whose_policy_is_not_there_say_which_is_missing(tmp_path: Path) -> None:
    (found,) = Document('policy p\ntest "t"\n', str(tmp_path / "p.test.policy")).diagnostics()
    assert found.message == "p.policy, whose tests these are: No such file or directory"


def test_the_layout_is_that_of_smetric_fmt() -> None:
    assert Document("policy p route rr_argmin( 0 )", "p.policy").layout() == "policy p\n\nroute rr_argmin(0)\n"
    assert Document(TEXT, "p.policy").layout() == TEXT


@pytest.mark.parametrize(
    ("place", "form", "doc"),
    [
        ("rr_arg‖min", BUILTINS["rr_argmin"].signature, BUILTINS["rr_argmin"].doc),
        ("‖route", KEYWORDS["route"].form, KEYWORDS["route"].doc),
        ("OVERLOAD‖ * mean", "param OVERLOAD = 2.0 in 1.0..", "How much is too much."),
        ("not b‖usy", "def busy(s) = l[s] > OVERLOAD * mean(l)", ""),
        ("max(wait‖ing)", "waiting: requests 0.. per instance", "Requests waiting in the instance's queue."),
        ("(hit_l‖en)  when", "hit_len: tokens 0..req.prompt_len per instance", "Where unknown, arithmetic sees `0`."),
        ("req.tu‖rn", "req.turn: 0..", "Assistant turns in the carried history"),
        ("given tu‖rn", "req.turn: 0..", "Assistant turns in the carried history"),
        ("16 req‖uests", "5 requests", "A unit."),
        ("la‖st = a", "last = a", "The last winner"),
        ("age(hit_‖len)", "hit_len: tokens 0..req.prompt_len per instance", "Looked up when evaluation reaches it."),
    ],
)
def test_hovers_say_what_a_word_is(place: str, form: str, doc: str) -> None:
    found = hover(place)
    assert found is not None
    assert found[0] == form
    assert doc in found[1]


@pytest.mark.parametrize("place", ["policy mi‖ne", "as sti‖ck\n", "2‖.0", "!‖=", "a ‖       |        1"])
def test_hovers_are_silent_where_nothing_is_known(place: str) -> None:
    assert hover(place) is None


def test_a_line_begins_with_a_statement() -> None:
    assert completed("‖") == {"policy": WordKind.KEYWORD, "library": WordKind.KEYWORD}
    assert list(completed("policy p\n\n‖")) == list(STATEMENTS)
    assert list(completed("policy p\n\nrou‖\nroute rr_argmin(0)")) == list(STATEMENTS)


def test_an_expression_takes_names_features_functions_and_operators() -> None:
    found = completed("policy p\nlet load = requests\ndef f(one, two) = lo‖\nlet later = 1")
    assert found["load"] is WordKind.NAME
    assert found["one"] is WordKind.NAME
    assert "later" not in found
    assert "f" not in found
    assert {found[name] for name in VOCABULARY.features} == {WordKind.FEATURE}
    assert {found[name] for name in BUILTINS} == {WordKind.FUNCTION}
    assert {"and", "if", "where", "when", "true"} <= set(found)
    assert "route" not in found


def test_after_req_come_its_fields_and_nothing_else() -> None:
    for text in ("policy p\nroute argmin(requests) when req.‖", "policy p\nroute argmin(requests) when req.tu‖ != 0"):
        assert set(completed(text)) == set(VOCABULARY.request)


def test_after_a_number_come_units() -> None:
    found = completed("policy p\nparam LOAD = requests in {requests}\nparam FLOOR = 0 ‖")
    assert found["tokens"] is WordKind.UNIT
    assert found["LOAD"] is WordKind.NAME
    assert "hit_len" not in found


NEW = ["let ‖", "param A‖", "route argmin(requests) as st‖", "let a = 1 # com‖", 'reject 429 "fu‖ll"', "let a = 1‖"]
NEW += ['reject 429 "fu‖', 'keep pool == "‖']


@pytest.mark.parametrize("text", NEW)
def test_nothing_is_proposed_for_new_names_and_in_comments_strings_and_numbers(text: str) -> None:
    assert completed(f"policy p\n{text}") == {}


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("  ‖", {"with", "given", "instance", "expect"}),
        ("  with ‖", {"OVERLOAD", "LIMIT"}),
        ("  with LIMIT = 3, O‖", {"OVERLOAD", "LIMIT"}),
        ("  given ‖", {"turn", "est_hit", "last"}),
        ("  given turn = 1, ‖", {"turn", "est_hit", "last"}),
        ("  instance | ‖", {"requests", "hit_len"}),
        ("  instance | requests\n  one | 1\n  two | 2\n  expect ‖", {"one", "two"}),
        ("  instance | requests\n  one | 1\n  two | 2\n  expect one or ‖", {"one", "two"}),
        ("  instance | requests\n  one | 1\n  expect one as ‖", {"stick", "calm"}),
        ("  instance | requests\n  one | 1\n  expect one failing ‖", {"busy"}),
    ],
)
def test_in_a_test_each_part_has_its_own_words(line: str, some: set[str]) -> None:
    found = set(completed(f'{TEXT}\ntest "two"\n{line}'))
    assert some <= found
    assert not found & {"argmin", "route"}


def test_names_that_are_taken_are_those_of_their_library(tmp_path: Path) -> None:
    (tmp_path / "common.policy").write_text(
        "library common\n## How much.\nparam FAR = 0.9 in 0..1\ndef near(x) = 1 - x\n"
    )
    text = 'policy p\nuse common (near, FAR, gone)\nroute argmin(near(kv_usage) - FAR - gone)\ntest "t"\n  with '
    document = Document(text, str(tmp_path / "p.policy"))
    for name, form in (("near(", "def near(x) = 1 - x"), ("FAR -", "param FAR = 0.9 in 0..1"), ("gone)", "use common")):
        found = document.word_at(text.rindex(name))
        assert found is not None
        assert found[0].form.startswith(form)
    assert [word.text for word in document.completions(len(text))] == ["FAR"]


def test_in_a_file_of_tests_the_names_are_those_of_its_policy(tmp_path: Path) -> None:
    (tmp_path / "mine.policy").write_text(TEXT)
    for line, some in (
        ("with ", {"OVERLOAD", "LIMIT"}),
        ("expect a failing ", {"busy"}),
        ("expect a as ", {"stick", "calm"}),
    ):
        text = f'policy mine\ntest "two"\n  instance | requests\n  a | 1\n  {line}'
        found = Document(text, str(tmp_path / "mine.test.policy")).completions(len(text))
        assert {word.text for word in found} == some

from __future__ import annotations

import pytest

from smetric.features import VOCABULARY
from smetric.policy import load, tree
from smetric.policy.check import check_text
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, PolicyError
from smetric.policy.parser import MAX_BYTES, parse, read


def _value(code: str) -> tree.Expr:
    (statement,) = parse(f"policy p let x = {code}").statements
    assert isinstance(statement, tree.Let)
    return statement.value


def _shape(expr: tree.Expr) -> str:
    """An expression with all its brackets."""
    match expr:
        case tree.Binary(op=op, left=left, right=right):
            return f"({_shape(left)} {op} {_shape(right)})"
        case tree.Unary(op=op, operand=operand):
            return f"({op} {_shape(operand)})"
        case tree.IfElse(then=then, condition=condition, otherwise=otherwise):
            return f"({_shape(then)} if {_shape(condition)} else {_shape(otherwise)})"
        case tree.At(vector=vector, pick=pick):
            return f"{_shape(vector)}[{_shape(pick)}]"
        case tree.Name(name=name):
            return name
        case tree.Number(value=value):
            return f"{value:g}"
    raise AssertionError(expr)


@pytest.mark.parametrize(
    ("code", "shape"),
    [
        ("a + b * c", "(a + (b * c))"),
        ("a - b - c", "((a - b) - c)"),
        ("(a - b) / -c[s]", "((a - b) / (- c[s]))"),
        ("not a == b and c or d", "(((not (a == b)) and c) or d)"),
        ("a if b else c if d else e", "(a if b else (c if d else e))"),
        ("a not in b or c in d", "((a not in b) or (c in d))"),
    ],
)
def test_operators_bind_as_the_reference_says(code: str, shape: str) -> None:
    assert _shape(_value(code)) == shape


@pytest.mark.parametrize(
    ("code", "value", "unit"),
    [
        ("8", 8.0, ""),
        ("1 request", 1.0, "requests"),
        ("15928 token per seconds", 15928.0, "tokens per second"),
        ("250ms", 0.25, "seconds"),
        ("2h", 7200.0, "seconds"),
        ("62us per token", 62e-6, "seconds per token"),
        ("0 LOAD", 0.0, "LOAD"),
    ],
)
def test_numbers_are_in_base_units(code: str, value: float, unit: str) -> None:
    number = _value(code)
    assert isinstance(number, tree.Number)
    assert number.value == pytest.approx(value)
    assert number.unit == unit


def test_layout_is_free() -> None:
    wrapped = parse("policy p\nlet x = a\n  + b # why\nroute\n  argmin(x)\n  as y")
    assert wrapped.statements == parse("policy p let x = a + b route argmin(x) as y").statements


def test_spans_are_the_source_of_what_they_mark() -> None:
    text = "policy p\nlet x = (a + b) * greatest(c, 1 token)"
    (statement,) = parse(text).statements
    assert isinstance(statement, tree.Let)
    product = statement.value
    assert isinstance(product, tree.Binary)
    spans = (product.span, product.left.span, product.op_span, product.right.span)
    shown = [text[span.start : span.end] for span in spans]
    assert shown == ["(a + b) * greatest(c, 1 token)", "a + b", "*", "greatest(c, 1 token)"]


def test_doc_comments_belong_to_the_statement_right_below() -> None:
    file = parse(
        "## A file.\n## Two lines.\npolicy p\n## Of x.\nlet x = 1\n## Apart.\n\nlet y = 2\nlet z = 3 ## behind\n"
    )
    assert file.doc == "A file.\nTwo lines."
    assert [statement.doc for statement in file.statements] == ["Of x.", "", ""]


def test_a_word_of_the_header_in_its_own_comment_is_no_header() -> None:
    file = parse("## A file.\npolicy # the policy\n  p\nroute rr_argmin(0)")
    assert (file.name, file.doc, file.stray) == ("p", "A file.", ())


def test_a_number_sign_in_a_string_is_no_comment() -> None:
    (statement,) = parse('policy p reject 503 "no ## room"').statements
    assert isinstance(statement, tree.Reject)
    assert statement.message.value == "no ## room"


def test_a_test_block_becomes_rows_cells_and_expectation() -> None:
    (statement,) = parse(
        'policy p test "t" with A = 2s, B = off given turn = ?, last = a\n'
        'instance | hit_len | age(hit_len) | role | loras\n a | ? | 1.5 | "x" | {"l"}\n b | 3 | 2s | "y" | {}\n'
        'expect a or b as r failing "x > 1"'
    ).statements
    assert isinstance(statement, tree.Test)
    assert next((s.name, s.value, s.unit) for s in statement.settings) == ("A", 2.0, "seconds")
    assert statement.given[0].value is tree.UNKNOWN
    assert [(c.feature, c.of_age) for c in statement.columns][1] == ("hit_len", True)
    assert [[cell.value for cell in row.cells] for row in statement.rows] == [
        [None, 1.5, "x", frozenset({"l"})],
        [3.0, 2.0, "y", frozenset()],
    ]
    assert [cell.unit for cell in statement.rows[1].cells] == ["", "seconds", "", ""]
    expect = statement.expect
    assert [name.name for name in expect.instances] == ["a", "b"]
    assert isinstance(expect.failing, tree.Text)


def test_a_statement_that_fails_leaves_the_others() -> None:
    file, errors = read("policy p\nlet x = = 1\nlet y = 2\nroute argmin(")
    assert [type(statement) for statement in file.statements] == [tree.Broken, tree.Let, tree.Broken]
    assert len(errors) == 2


def test_a_file_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(PolicyError, match="a policy has at most 65536"):
        parse("#" * (MAX_BYTES + 1))


def test_nesting_is_bounded_before_parsing() -> None:
    parse("policy p let x = " + "(" * 32 + "1" + ")" * 32)
    for opener in ("(", "not ", "-", "f(-"):
        with pytest.raises(PolicyError, match="nests deeper than 32"):
            parse("policy p let x = " + opener * 33 + "1")


def test_reports_are_bounded() -> None:
    with pytest.raises(PolicyError) as caught:
        parse("policy p\n" + "let x = ! 1\n" * 5000)
    assert len(caught.value.diagnostics) == MAX_DIAGNOSTICS + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a file starts with `policy NAME`"),
        ("let x = 1", "a file starts with `policy NAME`"),
        ("polcy p", "not with `polcy`"),
        ("policy my-p", "did not expect `-` here"),
        ("policy p policy q", "did not expect `policy` here"),
        ("policy p let x", "this `let` is not finished"),
        ("policy p let x = a)", "`)` closes nothing"),
        ("policy p def f(hold) = 3", "`hold` is a reserved word"),
        ("policy p keep a & b", "unexpected character `&`"),
        ("policy p let x = \x00", "unexpected character `U+0000`"),
    ],
)
def test_syntax_errors_name_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse(text)
    (found,) = caught.value.diagnostics
    assert message in found.message


def test_tests_can_be_skipped_with_whatever_is_wrong_in_them() -> None:
    text = (
        'policy p\n\n## Documents the test.\ntest "a"\n  instance | ! requests\n  a | \n  expect a b\n'
        'route rr_argmin(0) whn\ntest "b"\n'
    )
    file, errors = read(text, tests=False)
    assert [error.message for error in errors] == ["did not expect `whn` here"]
    assert (file.tests, file.stray) == ((), ())
    assert len(read(text)[1]) > 2


def test_a_policy_is_loaded_whatever_is_wrong_with_its_tests() -> None:
    text = 'policy p\nroute rr_argmin(0)\n## A test.\ntest "t"\n  instance | requets\n  a | 1\n  expect b\n'
    assert load(text, VOCABULARY).warnings == ()
    with pytest.raises(PolicyError):
        check_text(text, VOCABULARY)

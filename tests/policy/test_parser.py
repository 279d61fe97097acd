from __future__ import annotations

import re

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
        case tree.AtExpr(vector=vector, pick=pick):
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
def test_parse_binds_operators_by_precedence(code: str, shape: str) -> None:
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
def test_parse_converts_numbers_to_base_units(code: str, value: float, unit: str) -> None:
    number = _value(code)
    assert isinstance(number, tree.Number)
    assert number.value == pytest.approx(value)
    assert number.unit == unit


def test_parse_ignores_layout() -> None:
    wrapped = parse("policy p\nlet x = a\n  + b # why\nroute\n  argmin(x)\n  as y")
    assert wrapped.statements == parse("policy p let x = a + b route argmin(x) as y").statements


def test_parse_gives_nodes_the_span_of_their_source() -> None:
    text = "policy p\nlet x = (a + b) * greatest(c, 1 token)"
    (statement,) = parse(text).statements
    assert isinstance(statement, tree.Let)
    product = statement.value
    assert isinstance(product, tree.Binary)
    spans = (product.span, product.left.span, product.op_span, product.right.span)
    shown = [text[span.start : span.end] for span in spans]
    assert shown == ["(a + b) * greatest(c, 1 token)", "a + b", "*", "greatest(c, 1 token)"]


def test_parse_gives_doc_comments_to_the_statement_below() -> None:
    file = parse(
        "## A file.\n## Two lines.\npolicy p\n## Of x.\nlet x = 1\n## Apart.\n\nlet y = 2\nlet z = 3 ## behind\n"
    )
    assert file.doc == "A file.\nTwo lines."
    assert [statement.doc for statement in file.statements] == ["Of x.", "", ""]


def test_parse_ignores_keywords_in_comments() -> None:
    file = parse("## A file.\npolicy # the policy\n  p\nroute rr_argmin(0)")
    assert (file.name, file.doc, file.stray) == ("p", "A file.", ())


def test_parse_keeps_number_signs_in_strings() -> None:
    (statement,) = parse('policy p reject 503 "no ## room"').statements
    assert isinstance(statement, tree.Rule)
    assert statement.message is not None
    assert statement.message.value == "no ## room"


def test_parse_builds_test_blocks() -> None:
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


def test_read_keeps_sound_statements_beside_broken_ones() -> None:
    file, errors = read("policy p\nlet x = = 1\nlet y = 2\nroute argmin(")
    assert [type(statement) for statement in file.statements] == [tree.Broken, tree.Let, tree.Broken]
    assert len(errors) == 2


def test_parse_refuses_long_files() -> None:
    with pytest.raises(PolicyError, match="a policy has at most 65536"):
        parse("#" * (MAX_BYTES + 1))


def test_parse_bounds_nesting() -> None:
    parse("policy p let x = " + "(" * 32 + "1" + ")" * 32)
    for opener in ("(", "not ", "-", "f(-"):
        with pytest.raises(PolicyError, match="nests deeper than 32"):
            parse("policy p let x = " + opener * 33 + "1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a file starts with `policy NAME`"),
        ("policy p let x = \x00", "unexpected character `U+0000`"),
        ("\ufeffpolicy p", "unexpected character `U+FEFF`"),
        ("policy p # \ud800", "this character is not valid UTF-8"),
    ],
)
def test_parse_names_texts_that_no_editor_shows(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        parse(text)


def test_parse_bounds_diagnostics() -> None:
    with pytest.raises(PolicyError) as caught:
        parse("policy p\n" + "let x = ! 1\n" * 5000)
    assert len(caught.value.diagnostics) == MAX_DIAGNOSTICS + 1


def test_read_skips_test_blocks_and_their_errors() -> None:
    text = (
        'policy p\n\n## Documents the test.\ntest "a"\n  instance | ! requests\n  a | \n  expect a b\n'
        'route rr_argmin(0) whn\ntest "b"\n'
    )
    file, errors = read(text, tests=False)
    assert [error.message for error in errors] == ["did not expect `whn` here"]
    assert (file.tests, file.stray) == ((), ())
    assert len(read(text)[1]) > 2


def test_load_ignores_errors_of_test_blocks() -> None:
    text = 'policy p\nroute rr_argmin(0)\n## A test.\ntest "t"\n  instance | requets\n  a | 1\n  expect b\n'
    assert load(text, VOCABULARY).warnings == ()
    with pytest.raises(PolicyError):
        check_text(text, VOCABULARY)

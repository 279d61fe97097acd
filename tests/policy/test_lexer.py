"""Tokens of policy texts."""

from __future__ import annotations

import pytest

from smetric.policy.lexer import tokenize


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("route routes", ["ROUTE", "NAME"]),
        ("5ms 5 ms 5mss", ["DURATION", "NUMBER", "NAME", "NUMBER", "NAME"]),
        ("1e9 1e 0.5..1", ["NUMBER", "NUMBER", "NAME", "NUMBER", "RANGE", "NUMBER"]),
        ('"a # b" # "c"', ["STRING"]),
        ("< <= == =", ["COMPARE", "COMPARE", "COMPARE", "EQUAL"]),
    ],
)
def test_tokenize_prefers_the_longest_terminal(text: str, types: list[str]) -> None:
    assert [token.type for token in tokenize(text).tokens] == types


def test_tokenize_gives_places_of_the_whole_text_behind_an_error() -> None:
    text = "let a = !\nlet b = 2"
    found = tokenize(text)
    assert [(error.span.start, error.code) for error in found.errors] == [(8, "character")]
    assert found.skipped == [8]
    assert [text[token.start : token.end] for token in found.tokens] == ["let", "a", "=", "let", "b", "=", "2"]
    assert [token.line for token in found.tokens] == [1, 1, 1, 2, 2, 2, 2]


def test_tokenize_reads_endless_blank_space_once() -> None:
    text = " \t\n" * 20_000 + "!"
    found = tokenize(text)
    assert found.tokens == []
    assert [error.span.start for error in found.errors] == [len(text) - 1]

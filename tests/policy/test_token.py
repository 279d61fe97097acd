"""Words and marks of a policy text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lark import Lark
from lark.exceptions import UnexpectedCharacters

from smetric.files import shipped_policies
from smetric.policy.lexer import Scanner
from smetric.policy.parser import grammar_path

LARK = Lark(grammar_path().read_text("utf-8"), parser="lalr", lexer="basic", start=["header", "item"])
SCANNER = Scanner(LARK)
PIECES = (
    "route",
    "routes",
    "5ms",
    "5 ms",
    "0.5",
    "1e9",
    "1e",
    "..",
    ".",
    '"a # b"',
    '"',
    "# c\n",
    "\n",
    " ",
    "<=",
    "<",
    "é",
)

Seen = list[tuple[str, str, int, int]]


def by_lark(text: str) -> tuple[Seen, int | None]:
    """The tokens of a text as Lark divides it, and where it finds none."""
    found: Seen = []
    try:
        for token in LARK.lex(text):
            found.append((token.type, str(token), token.start_pos or 0, (token.line or 1) - 1))
    except UnexpectedCharacters as error:
        return found, error.pos_in_stream
    return found, None


def by_scanner(text: str) -> tuple[Seen, int | None]:
    tokens, end = SCANNER.scan(text, 0)
    return [(token.type, str(token), token.start, token.line) for token in tokens], None if end == len(text) else end


@pytest.mark.slow
@settings(max_examples=200)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join))
@example("5s # to the end")
@example("keep\n\n  healthy")
def test_texts_are_divided_as_lark_divides_them(text: str) -> None:
    assert by_scanner(text) == by_lark(text)


@pytest.mark.parametrize("path", shipped_policies().values(), ids=lambda path: path.stem)
def test_shipped_policies_are_divided_as_lark_divides_them(path: Path) -> None:
    text = path.read_text("utf-8")

    assert by_scanner(text) == by_lark(text)


def test_reading_can_begin_anywhere_and_places_are_those_of_the_whole_text() -> None:
    text = "let a = 1\nlet b = 2"

    tokens, end = SCANNER.scan(text, text.index("b"))

    assert [(token, token.line, text[token.start : token.end]) for token in tokens] == [
        ("b", 1, "b"),
        ("=", 1, "="),
        ("2", 1, "2"),
    ]
    assert end == len(text)


def test_endless_blank_space_is_read_once() -> None:
    text = " \t\n" * 20_000 + "!"

    assert SCANNER.scan(text, 0) == ([], len(text) - 1)

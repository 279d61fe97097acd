"""The grammar itself."""

from __future__ import annotations

from lark import Lark

from smetric.policy.lexer import grammar_path


def test_grammar_has_no_conflicts_in_strict_mode() -> None:
    Lark(
        grammar_path().read_text("utf-8"),
        parser="lalr",
        lexer="basic",
        start=["start", "header", "item"],
        strict=True,
    )

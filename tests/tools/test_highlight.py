"""Pygments lexer for policies."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from pygments.lexer import RegexLexer
from pygments.token import Comment, Error, Keyword, Name, Operator, String

from smetric.policy.builtin import BUILTINS
from smetric.policy.keywords import KEYWORDS

ROOT = Path(__file__).parents[2]
POLICIES = sorted([*ROOT.glob("policies/*.policy"), *ROOT.glob("examples/*/*.policy")])


@pytest.fixture(scope="module")
def lexer() -> RegexLexer:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["pygments.lexers"]["smetric"].partition(":")
    made = getattr(importlib.import_module(module), name)()
    assert isinstance(made, RegexLexer)
    return made


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_lexer_reads_policies_completely_and_without_an_error(lexer: RegexLexer, path: Path) -> None:
    tokens = list(lexer.get_tokens(path.read_text()))
    assert [text for kind, text in tokens if kind is Error] == []
    assert "".join(text for _, text in tokens) == path.read_text()
    assert {text for kind, text in tokens if kind is String.Double}.isdisjoint(KEYWORDS)


def test_lexer_classifies_words(lexer: RegexLexer) -> None:
    text = "## d\nlet x = argmin(hit_len) if f(x) else 1 token # c\n"
    kinds = {word: kind for kind, word in lexer.get_tokens(text)}
    assert kinds["## d"] is Comment.Special
    assert kinds["# c"] is Comment.Single
    assert kinds["let"] is Keyword.Declaration
    assert kinds["if"] is Operator.Word
    assert kinds["argmin"] is Name.Builtin
    assert kinds["f"] is Name.Function
    assert kinds["hit_len"] is Name.Variable.Instance
    assert kinds["token"] is Keyword.Type


@pytest.mark.parametrize("word", KEYWORDS)
def test_lexer_knows_every_reserved_word(lexer: RegexLexer, word: str) -> None:
    (kind,) = [kind for kind, text in lexer.get_tokens(word) if text == word]
    assert str(kind).startswith(("Token.Keyword", "Token.Operator.Word"))


@pytest.mark.parametrize("name", BUILTINS)
def test_lexer_knows_every_builtin(lexer: RegexLexer, name: str) -> None:
    assert (Name.Builtin, name) in lexer.get_tokens(f"let x = {name}(v)")

"""Symbols of policy texts: definitions, references and new names. `‖` in a text is the cursor."""

from __future__ import annotations

from pathlib import Path

import pytest

from smetric.policy.diagnostic import Span
from smetric.tools.symbols import Symbol, SymbolKind, Unrenamable, Workspace, occurrences

LIBRARY = """library common
param FAR = 0.9 in 0..1
def near(x) = FAR - x
"""
POLICY = """policy mine
use common (near)
param LIMIT = 16 requests in 1..
let l = requests
def busy(s, l) = l[s] > LIMIT
route argmax(hit_len, then: l)  when busy(argmax(l), l)  as stick
route argmin(near(kv_usage))                             as near
test "one"
  with LIMIT = 3
  given turn = 1, last = gpu-1
  instance | requests
  gpu-1    |        1
  stick    |        2
  expect gpu-1 or stick as stick failing busy
"""
TESTS = """policy mine
test "two"
  instance | requests
  l        |        1
  expect l as stick failing busy
"""
OTHER = """policy other
use common (near)
route argmin(near(norm(requests)))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = {"common": LIBRARY, "mine": POLICY, "mine.test": TESTS, "other": OTHER, "apart": "policy a\nlet near = 1\n"}
    for name, text in texts.items():
        (tmp_path / f"{name}.policy").write_text(text)
    return tmp_path


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def cursor(folder: Path, place: str, file: str = "mine") -> tuple[Workspace, int]:
    path = folder / f"{file}.policy"
    text = path.read_text()
    return Workspace(path, read), text.index(place.replace("‖", "")) + place.index("‖")


def found_at(folder: Path, place: str, file: str = "mine") -> tuple[Workspace, Symbol]:
    workspace, offset = cursor(folder, place, file)
    here = workspace.at(offset)
    assert here is not None
    return workspace, here.symbol


def line_of(path: Path, span: Span) -> str:
    return path.read_text()[: span.end].rsplit("\n", 1)[-1]


@pytest.mark.parametrize(
    ("place", "kind", "file", "line"),
    [
        ("> LIM‖IT", SymbolKind.NAME, "mine", "param LIMIT"),
        ("then: ‖l)", SymbolKind.NAME, "mine", "let l"),
        ("= l‖[s]", SymbolKind.ARGUMENT, "mine", "def busy(s, l"),
        ("when bu‖sy", SymbolKind.NAME, "mine", "def busy"),
        ("failing bu‖sy", SymbolKind.NAME, "mine", "def busy"),
        ("with LIM‖IT", SymbolKind.NAME, "mine", "param LIMIT"),
        ("or stick as sti‖ck", SymbolKind.LABEL, "mine", POLICY.splitlines()[5]),
        ("gpu-1 or sti‖ck", SymbolKind.INSTANCE, "mine", "  stick"),
        ("last = gp‖u-1", SymbolKind.INSTANCE, "mine", "  gpu-1"),
        ("argmin(ne‖ar(", SymbolKind.NAME, "common", "def near"),
        ("use com‖mon", SymbolKind.LIBRARY, "common", ""),
    ],
)
def test_definition_of_a_symbol(folder: Path, place: str, kind: SymbolKind, file: str, line: str) -> None:
    workspace, symbol = found_at(folder, place)
    assert symbol.kind is kind
    found = workspace.definition(symbol)
    assert found is not None
    assert (found[0].name, line_of(*found)) == (f"{file}.policy", line)


WORDS = ["instance | requ‖ests", "given tu‖rn", "policy mi‖ne", "hit_len, the‖n: l", "16 requ‖ests"]


@pytest.mark.parametrize("place", WORDS)
def test_definition_is_absent_for_words_of_the_language(folder: Path, place: str) -> None:
    workspace, offset = cursor(folder, place)
    here = workspace.at(offset)
    assert here is None or workspace.definition(here.symbol) is None


@pytest.mark.parametrize(
    ("place", "counts"),
    [
        ("param LIM‖IT", {"mine": 3}),
        ("let ‖l", {"mine": 4}),
        ("def busy(s, ‖l", {"mine": 2}),
        ("def bu‖sy", {"mine": 3, "mine.test": 1}),
        ("as sti‖ck\n", {"mine": 2, "mine.test": 1}),
        ("(ne‖ar)", {"common": 1, "mine": 2, "other": 2}),
    ],
)
def test_references_span_the_files_that_share_a_symbol(folder: Path, place: str, counts: dict[str, int]) -> None:
    workspace, symbol = found_at(folder, place)
    found = workspace.references(symbol)
    assert {path.name.removesuffix(".policy"): len(spans) for path, spans in found.items()} == counts
    assert found == workspace.renamed(symbol, "another")


def test_references_from_a_test_file_are_those_of_its_policy(folder: Path) -> None:
    workspace, symbol = found_at(folder, "failing bu‖sy", "mine.test")
    assert sorted(path.name for path in workspace.references(symbol)) == ["mine.policy", "mine.test.policy"]


@pytest.mark.parametrize(
    ("place", "name", "why"),
    [
        ("let ‖l", "busy", "`busy` is taken"),
        ("let ‖l", "s", "`s` is taken"),
        ("let ‖l", "route", "`route` is not a name"),
        ("let ‖l", "a-b", "`a-b` is not a name"),
        ("let ‖l", "running", "`running` is a feature"),
        ("as sti‖ck\n", "near", "`near` is taken"),
        ("argmax(hit_l‖en", "x", "no file here defines `hit_len`"),
        ("use com‖mon", "x", "no file here defines `common`"),
    ],
)
def test_new_name_is_refused_with_its_reason(folder: Path, place: str, name: str, why: str) -> None:
    workspace, symbol = found_at(folder, place)
    with pytest.raises(Unrenamable, match=why):
        workspace.renamed(symbol, name)


def test_label_may_have_the_name_of_a_value(folder: Path) -> None:
    workspace, symbol = found_at(folder, "as sti‖ck\n")
    assert workspace.renamed(symbol, "busy")


def test_symbols_of_any_text_are_read() -> None:
    for end in range(0, len(POLICY), 7):
        assert all(each.span.end <= end for each in occurrences(POLICY[:end]))
    assert occurrences("x" * 70_000) == []

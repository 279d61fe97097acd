"""Editors: the TextMate grammar, the VS Code extension around it, and the hooks for pre-commit."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from smetric.cli import main
from smetric.policy.keywords import KEYWORDS, Role
from smetric.policy.lexer import tokenize
from smetric.policy.types import BASES

ROOT = Path(__file__).parents[2]
GRAMMAR: dict[str, Any] = json.loads((ROOT / "grammar/smetric.tmLanguage.json").read_text())
SAMPLE = ROOT / "tests/data/editors/sample.policy"
POLICIES = sorted([*ROOT.glob("policies/*.policy"), *ROOT.glob("examples/*/*.policy")])
SCOPES = {
    Role.HEADER: "keyword.control",
    Role.STATEMENT: "keyword.control",
    Role.PART: "keyword.other",
    Role.OPERATOR: "keyword.operator.word",
    Role.LITERAL: "constant.language",
    Role.CASE: "keyword.other",
}


# TextMate grammar


def rules(patterns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """All patterns in the order in which they are tried."""
    for pattern in patterns:
        if "include" in pattern:
            yield from rules(GRAMMAR["repository"][pattern["include"].removeprefix("#")]["patterns"])
        else:
            yield pattern


RULES = [(re.compile(rule["match"]), rule) for rule in rules(GRAMMAR["patterns"])]


@dataclass(frozen=True)
class Scoped:
    """A piece of the text and its scope."""

    start: int
    text: str
    scope: str


def scoped(text: str) -> Iterator[Scoped]:
    """The pieces of *text* as TextMate finds them: line by line, the earliest match first, then the first rule."""
    offset = 0
    for line in text.split("\n"):
        at = 0
        while matches := [(match, rule) for regex, rule in RULES if (match := regex.search(line, at))]:
            match, rule = min(matches, key=lambda found: found[0].start())
            if "name" in rule:
                yield Scoped(offset + match.start(), match.group(), rule["name"])
            for group, capture in rule.get("captures", {}).items():
                if match[int(group)] is not None:
                    yield Scoped(offset + match.start(int(group)), match[int(group)], capture["name"])
            assert match.end() > at, f"{rule} matches nothing at all"
            at = match.end()
        offset += len(line) + 1


def scope_of(token: str, type_: str) -> str:
    """The beginning of the scope that a token of the parser must have."""
    if token in KEYWORDS:
        return SCOPES[KEYWORDS[token].role]
    return {
        "STRING": "string.quoted.double",
        "NUMBER": "constant.numeric",
        "DURATION": "constant.numeric.duration",
        "UNKNOWN": "constant.language.unknown",
        "COMPARE": "keyword.operator.comparison",
        "RANGE": "keyword.operator.range",
        "EQUAL": "keyword.operator.assignment",
        "MINUS": "keyword.operator.arithmetic",
        "PLUS": "keyword.operator.arithmetic",
        "STAR": "keyword.operator.arithmetic",
        "SLASH": "keyword.operator.arithmetic",
    }.get(type_, "")


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_grammar_scopes_each_token_of_a_policy_as_the_parser_reads_it(path: Path) -> None:
    text = path.read_text()
    pieces = {piece.start: piece for piece in scoped(text)}
    for token in tokenize(text).tokens:
        piece = pieces[token.start]
        assert piece.text == str(token)
        assert piece.scope.startswith(scope_of(str(token), token.type)), piece
    comments = [match for match in re.finditer(r'"[^"\n]*"|(#[^\n]*)', text) if match[1]]
    assert [pieces[match.start()].scope.split(".")[0] for match in comments] == ["comment"] * len(comments)


def test_grammar_knows_every_reserved_word_and_unit() -> None:
    for word, row in KEYWORDS.items():
        (piece,) = scoped(word)
        assert piece.scope.startswith(SCOPES[row.role]), word
    for unit in (*BASES, *BASES.values()):
        assert [piece.scope for piece in scoped(f"1 {unit} per {unit}")][1::2] == ["keyword.other.unit.smetric"] * 2


def test_grammar_scopes_of_the_sample_are_those_of_the_golden_file(pytestconfig: pytest.Config) -> None:
    lines = []
    text = SAMPLE.read_text()
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        lines += [f"{number}: {piece.text}  {piece.scope}" for piece in scoped(line)]
    golden = SAMPLE.with_suffix(".scopes")
    if pytestconfig.getoption("--update"):
        golden.write_text("\n".join(lines) + "\n")
    assert lines == golden.read_text().splitlines()


def test_grammar_uses_syntax_that_editors_and_python_share() -> None:
    for _, rule in RULES:
        syntax = re.findall(r"\(\?[^:=!]?|\\[^\W\d_]|\$|\^", rule["match"])
        assert set(syntax) <= {"(?", "\\b", "\\t", "$", "^"}, rule
        assert set(rule) <= {"name", "match", "captures"}, "the matcher of these tests knows no other keys"
        scopes = [rule.get("name"), *(capture["name"] for capture in rule.get("captures", {}).values())]
        assert all(scope is None or scope.endswith(".smetric") for scope in scopes)


def test_extension_for_vs_code_names_existing_files() -> None:
    folder = ROOT / "grammar"
    contributes = json.loads((folder / "package.json").read_text())["contributes"]
    (language,) = contributes["languages"]
    (grammar,) = contributes["grammars"]
    assert language["extensions"] == [".policy"]
    assert grammar["language"] == language["id"]
    assert grammar["scopeName"] == GRAMMAR["scopeName"]
    assert (folder / grammar["path"]).resolve() == folder / "smetric.tmLanguage.json"
    assert json.loads((folder / language["configuration"]).read_text())["comments"] == {"lineComment": "#"}


# Hooks for pre-commit

HOOKS: list[dict[str, str]] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


def hook(id_: str, *files: Path) -> int:
    """Run a hook as pre-commit does: its entry with the names of the files."""
    (entry,) = [hook["entry"] for hook in HOOKS if hook["id"] == id_]
    program, *arguments = shlex.split(entry)
    assert program == "smetric"
    return CliRunner().invoke(main, [*arguments, *map(str, files)]).exit_code


def test_hooks_take_policy_files_only() -> None:
    assert [hook["id"] for hook in HOOKS] == ["smetric-check", "smetric-fmt", "smetric-test"]
    for hook in HOOKS:
        assert hook["language"] == "python"
        assert re.search(hook["files"], "routing/mine.policy")
        assert not re.search(hook["files"], "mine.policy.md")


def test_hooks_are_those_of_the_manual() -> None:
    (shown,) = re.findall(r"```yaml\n(repos:.*?)```", (ROOT / "docs/guide/editors.md").read_text(), re.S)
    (repository,) = yaml.safe_load(shown)["repos"]
    assert [hook["id"] for hook in repository["hooks"]] == [hook["id"] for hook in HOOKS]


def test_hooks_pass_good_files_and_stop_wrong_ones(tmp_path: Path) -> None:
    good, bad, wrong = (tmp_path / f"{name}.policy" for name in ("good", "bad", "wrong"))
    good.write_text("policy good\n\nroute rr_argmin(requests)\n")
    bad.write_text("policy bad\nroute rr_argmin(reqests)\n")
    wrong.write_text('policy w\nroute rr_argmin(0)\ntest "t" instance | requests a | 1 b | 1 expect b\n')
    assert [hook(id_, good) for id_ in ("smetric-check", "smetric-fmt", "smetric-test")] == [0, 0, 0]
    library = tmp_path / "shared.policy"
    library.write_text("library shared\n\ndef double(x) = 2 * x\n")
    assert [hook(id_, good, library) for id_ in ("smetric-check", "smetric-fmt", "smetric-test")] == [0, 0, 0]
    assert hook("smetric-check", good, bad) == 1
    assert hook("smetric-test", good, wrong) == 1
    assert hook("smetric-fmt", wrong) == 0  # pre-commit itself stops at a file that a hook has changed
    assert wrong.read_text().startswith("policy w\n\nroute")


def test_hooks_page_names_a_revision_that_exists() -> None:
    (revision,) = re.findall(r"^    rev: (\S+)$", (ROOT / "docs" / "guide" / "editors.md").read_text(), re.M)
    tags = subprocess.run(["git", "tag"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert revision in ("main", *tags)

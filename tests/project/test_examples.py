"""Examples and recipes: configurations load, policies pass their tests, command lines parse."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from smetric.cli import main
from smetric.config import load_settings
from smetric.config.load import fields_of, stack
from smetric.config.settings import Settings
from tests.walkthrough import steps

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: Pages with walk-through tests of their own.
WALKED = {"first-policy.md", "recipes.md"}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(EXAMPLES.rglob("*.md"))]
#: Configurations of SMetric; those of gateways have another format.
CONFIGURATIONS = sorted(path for path in EXAMPLES.rglob("*.yaml") if path.parent.name != "gateways")

#: Words that end a command in a shell line.
SHELL = {"&", "&&", "|", ">", ">>", "<", ";"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each `smetric …` line in the shell blocks of a page."""
    for block in re.findall(r"^\s*```(?:sh|console)\n(.*?)^\s*```", text, re.M | re.S):
        begun = ""
        for line in block.replace("\\\n", " ").splitlines():
            begun += line.removeprefix("$ ")
            try:
                words = shlex.split(begun, comments=True)
            except ValueError:  # a quoted text continues on the next line
                begun += "\n"
                continue
            begun = ""
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words and Path(words[0]).name == "smetric":
                ends = [i for i, word in enumerate(words) if word in SHELL]
                yield words[1 : min(ends, default=None)]


def parse(words: list[str]) -> None:
    """Parse a command line without running it."""
    command: click.Command = main
    while isinstance(command, click.Group) and not words[0].startswith("-"):
        name, *words = words
        below = command.get_command(click.Context(command), name)
        if below is None:
            raise click.UsageError(f"no such command: {name}")
        command = below
    if not {"--help", "-h", "--version"} & set(words):
        command.make_context(command.name, words)


def test_manual_check_finds_invalid_command_line() -> None:
    page = "```sh\nTZ=UTC smetric serve --prot 1 \\\n  --host a  # why\nvllm serve '{\n  }'\nsmetric config shw\n```\n"
    lines = list(command_lines(page))
    assert lines == [["serve", "--prot", "1", "--host", "a"], ["config", "shw"]]
    for words in lines:
        with pytest.raises(click.UsageError):
            parse(words)


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_manual_command_lines_parse(path: Path) -> None:
    for words in command_lines(path.read_text()):
        try:
            parse(words)
        except click.UsageError as error:
            pytest.fail(f"{relative(path)}: smetric {shlex.join(words)}: {error.message}")


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=relative)
def test_examples_configurations_load(path: Path) -> None:
    settings = load_settings(path, {})
    assert settings.instances
    assert "/" not in settings.policy or Path(settings.policy).exists()


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_manual_settings_load(path: Path, tmp_path: Path) -> None:
    """Blocks for other programs begin with other words."""
    for number, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.M | re.S)):
        if any(text.startswith(f"{name}:") for name in fields_of(Settings)):
            file = tmp_path / f"{number}.yaml"
            file.write_text(text)
            load_settings(file, dict.fromkeys(re.findall(r"\$\{(\w+)\}", text), "x" * 20))


def test_examples_schema_is_current() -> None:
    shipped = (EXAMPLES / "smetric.schema.json").read_text()
    assert shipped == CliRunner().invoke(main, ["config", "schema"]).output, (
        "run `smetric config schema > examples/smetric.schema.json`"
    )


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.policy")), ids=relative)
def test_examples_policies_pass_their_tests(path: Path) -> None:
    result = CliRunner().invoke(main, ["test", str(path)])
    assert result.exit_code == 0, result.output
    assert not result.output.startswith("0 passed")


def test_examples_custom_policy_page_shows_result_of_its_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = f"examples{os.sep}custom-policy{os.sep}"
    explain = ["explain", f"{folder}two_pools.policy", "--snapshot", f"{folder}snapshot.json"]
    first = CliRunner().invoke(main, explain).output
    second = CliRunner().invoke(main, [*explain, "--set", "OVERLOAD=1.2"]).output
    assert "route to gpu-0" in first
    assert "→ stick" in first
    assert "route to gpu-1" in second
    assert "✗ not_overloaded" in second


def test_manual_policies_pass_their_tests(tmp_path: Path) -> None:
    found = 0
    for page in PAGES:
        for text in (
            ()
            if page.name in WALKED
            else re.findall(r"^```text\n((?:##.*\n)*policy .*?)^```", page.read_text(), re.M | re.S)
        ):
            path = tmp_path / f"{found}.policy"
            path.write_text(text)
            result = CliRunner().invoke(main, ["test", str(path)])
            assert result.exit_code == 0, f"{relative(page)}: {result.output}"
            found += 1
    assert found >= 2


def test_manual_variables_named_like_settings_exist() -> None:
    """A router does not start with any other variable."""
    named = {name for page in PAGES for name in re.findall(r"\bSMETRIC_\w*[A-Z]\b", page.read_text())}
    assert "SMETRIC_LISTEN__PORT" in named
    stack(None, dict.fromkeys(named, "set"), [])


RECIPES = Path(__file__).parents[2] / "docs" / "guide" / "recipes.md"


def run_smetric(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_recipes_check_pass_and_are_canonically_formatted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = list(steps(RECIPES.read_text(), tmp_path))
    assert len(written) >= 12
    names = [str(path) for path in written]
    assert run_smetric("check", *names) == ""
    assert run_smetric("fmt", "--check", *names) == ""
    assert ", 0 failed" in run_smetric("test", "--min-coverage", "100", *names)


def test_policies_page_names_exactly_the_shipped_policies() -> None:
    folder = Path(__file__).parents[2] / "policies"
    shipped = {path.name for path in folder.glob("*.policy")}
    linked = {part.split(")")[0] for part in (folder / "README.md").read_text().split("](")[1:]}
    assert [name for name in linked if not (folder / name).exists()] == []
    assert {name for name in linked if name.endswith(".policy")} == shipped

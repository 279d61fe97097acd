"""`smetric replay`."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from smetric.cli import main
from smetric.files import shipped_policies
from tests.records.drive import Fleet, policy, write

SHIPPED = {name: path.read_text() for name, path in shipped_policies().items()}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred decisions of SMetric on four instances."""
    path = tmp_path_factory.mktemp("record") / "decisions.jsonl.gz"
    fleet = Fleet(random.Random(11), 4)
    write(path, [fleet.decide(policy(SHIPPED["smetric"])) for _ in range(200)])
    return path


def test_replay_agrees_with_its_own_record(record: Path) -> None:
    result = run(record)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("the recorded policy agrees with what was recorded on 100 % of 200 decisions\n")
    assert run(record, "--against", "recorded").output == result.output


def test_replay_of_a_tampered_record_ends_with_1(record: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.jsonl"
    text = gzip.decompress(record.read_bytes())
    spoilt.write_bytes(text.replace(b'"instance":"gpu-0"', b'"instance":"gpu-1"'))
    result = run(spoilt)
    assert result.exit_code == 1
    assert re.match(
        r"the recorded policy agrees with what was recorded on 7\d\.\d\d % of 200 decisions;", result.output
    )


def test_replay_by_another_policy_lists_moves(record: Path) -> None:
    result = run(record, "--policy", "bailian", "--examples", "1")
    assert result.exit_code == 0, result.output
    text = result.output
    assert re.search(r"bailian agrees with what was recorded on \d\d\.\d\d % of \d+ decisions; \d+ go elsewhere", text)
    assert re.search(r"^\d+ not answerable: hit_len not read; name the policy in the setting `observe` to ", text, re.M)
    assert re.search(r"^  +\d+  (stick|balance) → route_1$", text, re.M)
    assert re.search(r"^  requests, max / mean +\d\.\d\d +\d\.\d\d$", text, re.M)
    assert re.search(r"^  prompt tokens found cached +\d+\.\d\d % +\d+\.\d\d %$", text, re.M)
    # One example, explained from both sides.
    assert text.count("smetric: route to") == text.count("bailian: route to") == 1
    assert "balance    always" in text


def test_replay_with_parameters(record: Path) -> None:
    result = run(record, "--set", "OVERLOAD=1")
    assert result.exit_code == 0
    assert result.output.startswith("the recorded policy with OVERLOAD=1 agrees with what was recorded on ")
    assert "stick → balance" in result.output


def test_replay_json_is_complete(record: Path) -> None:
    result = run(record, "--policy", "lmetric", "--against", "bailian", "--format", "json")
    found: dict[str, Any] = json.loads(result.output)
    assert (found["policy"], found["against"]) == ("lmetric", "bailian")
    counts = found["decisions"]
    assert counts["read"] == 200
    assert counts["compared"] + counts["not_answerable"]["not answerable: hit_len not read"] == 200
    assert found["agreement"] == found["agreed"] / counts["compared"]
    assert sum(move["count"] for move in found["moves"]) == found["moved"] == counts["compared"] - found["agreed"]
    for side in found["load"].values():
        assert sum(side["requests"].values()) == counts["compared"]
        assert side["requests"].keys() == {"gpu-0", "gpu-1", "gpu-2", "gpu-3"}
    example = found["examples"][0]
    assert example["before"]["explanation"].startswith("bailian: route to ")
    assert example["after"]["explanation"].startswith("lmetric: route to ")
    assert example["before"]["choice"] != example["after"]["choice"]


class Page(HTMLParser):
    """Parser that collects the elements of a page and their links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "xlink:href")]
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


def test_replay_html_is_self_contained(record: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    result = run(record, "--policy", "bailian", "--format", "html", "--output", output)
    assert (result.exit_code, result.output) == (0, "")
    text = output.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert not re.search(r"https?:|url\(|@import|<script", text)
    assert "prefers-color-scheme: dark" in text
    assert page.seen.count("rect") == 2 * 4
    assert page.seen.count("pre") == 2 * 2  # an example of each kind of move, from both sides
    assert "gpu-3" in text


def test_replay_html_escapes_names(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    fleet = Fleet(random.Random(1), 3)
    fleet.instances[0].id = '<img src="x">'
    write(path, [fleet.decide(policy(SHIPPED["bailian"])) for _ in range(100)])
    text = run(path, "--policy", "lmetric", "--format", "html").output
    assert "<img" not in text
    assert "&lt;img" in text


@pytest.mark.parametrize(("percent", "code"), [("10", 0), ("99.9", 1)])
def test_replay_fail_under(percent: str, code: int, record: Path) -> None:
    assert run(record, "--policy", "bailian", "--fail-under", percent).exit_code == code


def test_replay_without_comparison_ends_with_2(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    fleet = Fleet(random.Random(1), 3)
    write(path, [fleet.decide(policy(SHIPPED["load_only"])) for _ in range(5)])
    result = run(path, "--policy", "bailian")
    assert (result.exit_code, result.output.splitlines()[0]) == (
        2,
        "bailian: none of 5 decisions can be compared with what was recorded",
    )
    assert run(path, "--policy", "bailian", "--fail-under", "1").exit_code == 2


def test_replay_refuses_files_that_are_no_record(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    result = run(path)
    assert result.exit_code == 2
    assert "notes.txt:1: no line of a record" in result.output
    for name in ("absent.jsonl", "n" * 300):
        result = run(tmp_path / name)
        assert (result.exit_code, f"{name}: no such file" in result.output) == (2, True)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path):
        result = run(other)
        assert (result.exit_code, f"{other}: not a regular file" in result.output) == (2, True)
    path.write_text("")
    for arguments in ((), ("--policy", "bailian"), ("--fail-under", "1")):
        result = run(path, *arguments)
        assert (result.exit_code, "notes.txt: no decision in it" in result.output) == (2, True)
    explained = CliRunner().invoke(main, ["explain", "--record", str(path), "--decision", "01JDQ2M7Q0Z5T8F4C6R9K3W1XE"])
    assert explained.exit_code == 2


def test_replay_with_bad_policy_ends_with_1(record: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.policy"
    path.write_text("policy bad\nroute argmin(reqests)\n")
    result = run(record, "--policy", path)
    assert result.exit_code == 1
    assert "bad.policy" in result.output
    assert "reqests" in result.output
    for arguments in ((), ("--policy", "smetric")):
        wrong = run(record, *arguments, "--set", "NOPE=1")
        assert wrong.exit_code == 1
        assert "`--set` sets `NOPE`, which this policy does not declare" in wrong.output


def test_replay_output_that_cannot_be_written_ends_with_2(record: Path, tmp_path: Path) -> None:
    result = run(record, "--output", tmp_path / "absent" / "report.txt")
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in result.output


def test_replay_reads_a_truncated_record(record: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(record.read_bytes()[:-100])
    result = run(path)
    assert result.exit_code == 0
    assert re.search(r"100 % of 1\d\d decisions", result.stdout)
    assert "cut.jsonl.gz: ends in the middle of a line" in result.stderr

"""Rehearsal of a start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smetric.config import load_settings
from smetric.doctor.start import rehearse
from tests.cli.commands import run

BROKEN = """\
policy: smetric
params:
  OVERLOD: 3
  HIT_RATIO: 7
instances:
  - http://127.0.0.1:9101
  - http://127.0.0.1:8080
  - url: http://127.0.0.1:9103
    api_key_file: /nonexistent/key
  - url: http://127.0.0.1:9104
    api_key_file: /nonexistent/other
listen:
  cert_file: none.pem
admin:
  host: 0.0.0.0
shadow:
  - bad.policy
  - none.policy
lmcache:
  url: http://127.0.0.1:7000
tokenizer: {source: estimated}
"""
#: Line and beginning of each error of `BROKEN`.
ERRORS = (
    (3, "params.OVERLOD: configuration sets `OVERLOD`, which this policy does not declare; did you mean `OVERLOAD`?"),
    (4, "params.HIT_RATIO: configuration sets `HIT_RATIO` to 7, outside 0..1"),
    (17, "shadow[0].policy: it does not check"),
    (18, "shadow[1].policy: policy "),
    (8, "instances: 127.0.0.1:9103: api_key_file: cannot read /nonexistent/key"),
    (10, "instances: 127.0.0.1:9104: api_key_file: cannot read /nonexistent/other"),
    (20, "lmcache.url is set, but tokenizer.source is estimated"),
    (14, "admin.token: not set, but the admin port listens on 0.0.0.0"),
    (7, "instances: http://127.0.0.1:8080 is this router itself"),
    (13, "listen.cert_file: cannot be used (no such file or directory)"),
)


def check(folder: Path, text: str, *more: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines of `smetric config check`."""
    file = folder / "smetric.yaml"
    file.write_text(text)
    result = run("config", "check", str(file), *more)
    assert result.stdout == ""
    return result.exit_code, [line.removeprefix(f"{file}:") for line in result.stderr.splitlines()]


def test_config_check_reports_all_errors_at_their_lines(tmp_path: Path) -> None:
    (tmp_path / "bad.policy").write_text("policy bad\n\nroute argmin(requets)\n")
    code, lines = check(tmp_path, BROKEN)
    assert code == 2
    places = [line for line in lines if re.match(r"\d+: ", line)]
    assert [line[: len(f"{at}: {text}")] for line, (at, text) in zip(places, ERRORS, strict=True)] == [
        f"{at}: {text}" for at, text in ERRORS
    ]
    assert "error: unknown name `requets`" in lines


def test_config_check_reports_all_errors_of_one_reading(tmp_path: Path) -> None:
    text = "polcy: smetric\nscrape: {timeout: 2}\ninstances:\n  - {id: a}\n  - http://x/y\nlisten: {host: a..b}\n"
    code, lines = check(tmp_path, text)
    assert code == 2
    assert [line.removeprefix("Error: ").removeprefix(f"{tmp_path}/smetric.yaml:")[:2] for line in lines] == [
        "1:", "2:", "4:", "5:", "6:",
    ]  # fmt: skip
    _, lines = check(tmp_path, "a: ${NOT_SET}\nb: ${NOT_SET_EITHER}\nb: 2\n")
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("instances: [http://127.0.0.1:9101]", 0, None),
        ("policy: smetric", 2, "no instances to route to"),
        ("instances: [http://a:1]\nparams: {OVERLOAD: 0}", 1, "2: params.OVERLOAD: configuration sets"),
        (
            "instances: [http://a:1]\nlmcache:\n  url: http://b:1\ntokenizer: {source: estimated}",
            2,
            "3: lmcache.url is set, but tokenizer.source",
        ),
        ("instances: [http://a:1]\nprefix_index: {enabled: false}", 0, "policy: warning: "),
        ("instances: [http://a:1, http://a:2, http://a:3]\npolicy: smetric", 0, "2: params.FLOOR: hint: it is 0"),
        ("instances: [http://a:1, http://a:2, http://a:3]\nparams: {FLOOR: 2}", 0, None),
        ("instances: [http://a:1, http://a:2, http://a:3]\nparams: {FLOOR: 0}", 0, None),
        ("instances: [http://a:1, http://a:2, http://a:3]\npolicy: load_only", 0, None),
    ],
)
def test_config_check_ends_as_serve_would(tmp_path: Path, text: str, code: int, message: str | None) -> None:
    found, lines = check(tmp_path, text)
    assert (found, len(lines)) == (code, 0 if message is None else 1)
    assert message is None or message in lines[0]


def test_config_check_reads_environment_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "instances: [http://127.0.0.1:9101]"
    code, lines = check(tmp_path, text, "--set", "OVERLOAD=0")
    assert (code, lines[0].partition(":")[0]) == (1, "--set")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "sometimes")
    code, lines = check(tmp_path, text)
    assert code == 2
    assert "OTEL_TRACES_SAMPLER: unknown sampler 'sometimes'" in lines[0]


def test_rehearsal_leaves_no_files(tmp_path: Path) -> None:
    file = tmp_path / "smetric.yaml"
    file.write_text("instances: [http://a:1]\nrecord: record.jsonl\nstate_dir: state\nprefix_index: {folder: index}\n")
    problems, router = rehearse(load_settings(file, {}), environ={})
    assert problems == []
    assert router is not None
    assert [path.name for path in tmp_path.iterdir()] == ["smetric.yaml"]

"""How records are set: by a path alone or a section, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from smetric.config import load_settings
from smetric.config.settings import RecordSettings, Settings
from smetric.errors import ConfigError
from smetric.records.recorder import RecordStack


def load(tmp_path: Path, text: str, **env: str) -> Settings:
    path = tmp_path / "smetric.yaml"
    path.write_text(text)
    return load_settings(path, env)


def test_a_path_alone_is_a_record_of_decisions_beside_the_configuration(tmp_path: Path) -> None:
    settings = load(tmp_path, "record: decisions.jsonl.gz\n")
    assert settings.record == RecordSettings(path=str(tmp_path / "decisions.jsonl.gz"))
    stack = RecordStack(settings, [], lambda *_: None)
    assert stack.decisions is not None
    assert stack.traffic is None
    assert len(stack.writers) == 1


def test_the_environment_may_set_it_too(tmp_path: Path) -> None:
    assert load(tmp_path, "", SMETRIC_RECORD="/var/lib/d.jsonl").record.path == "/var/lib/d.jsonl"
    settings = load(tmp_path, "", SMETRIC_RECORD__TRACE="/var/lib/t.jsonl", SMETRIC_RECORD__KEEP="3")
    assert settings.record == RecordSettings(trace="/var/lib/t.jsonl", keep=3)


def test_without_one_nothing_is_recorded(tmp_path: Path) -> None:
    stack = RecordStack(load(tmp_path, ""), [], lambda *_: None)
    assert (stack.decisions, stack.traffic, stack.writers) == (None, None, [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("record: {path: a.jsonl, trace: a.jsonl}", "record.trace: .*a.jsonl is record.path too"),
        ("observe: [bailian]", "observe: set, but record.path is not"),
        ("record: {path: a.jsonl, max_file: 1KiB}", "record.max_file"),
        ("record: {pth: a.jsonl}", "record.pth: no such setting; did you mean `?path"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        load(tmp_path, text + "\n")

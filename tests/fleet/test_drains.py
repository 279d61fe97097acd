"""Drains kept over a restart and shared between processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from smetric import files
from smetric.features import VOCABULARY
from smetric.fleet.drains import NAME, Drains
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from tests.fakes import until


def fleet_of(*ids: str) -> Fleet:
    return Fleet([Instance(id, f"http://{id}") for id in ids], VOCABULARY)


def draining(fleet: Fleet) -> list[str]:
    return [instance.id for instance in fleet.instances if instance.draining]


def test_drains_survive_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when missing"
    before = fleet_of("a", "b", "c")
    drains = Drains(before, folder)
    drains.restore()
    assert [drains.drain(before[id]) for id in "abc"] == [""] * 3
    assert drains.undrain(before["b"]) == ""
    after = fleet_of("a", "b", "d")
    Drains(after, folder).restore()
    assert draining(after) == ["a"]
    assert [path.name for path in folder.iterdir()] == [NAME]


def test_drains_are_shared_by_two_processes(tmp_path: Path) -> None:
    old, new = fleet_of("a", "b"), fleet_of("a", "b", "c")
    drains, successors = Drains(old, tmp_path), Drains(new, tmp_path)
    drains.restore()
    successors.restore()
    drains.drain(old["a"])
    successors.refresh()
    assert draining(new) == ["a"]
    # Before they read each other's changes.
    successors.drain(new["c"])
    drains.drain(old["b"])
    with capture_logs() as lines:
        successors.refresh()
    assert [line["instance"] for line in lines if line["event"] == "smetric.drains.drained"] == ["b"]
    assert draining(new) == ["a", "b", "c"]
    assert successors.undrain(new["a"]) == ""
    drains.refresh()
    assert draining(old) == ["b"]
    restarted = fleet_of("a", "b", "c")
    Drains(restarted, tmp_path).restore()
    assert draining(restarted) == ["b", "c"]


@pytest.mark.parametrize("at", ["before", "after"])
def test_drains_merge_simultaneous_changes_of_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    first, second = fleet_of("a", "b"), fleet_of("a", "b")
    drains, others = Drains(first, tmp_path), Drains(second, tmp_path)
    drains.restore()
    others.restore()
    replace = os.replace

    def replace_while_the_other_writes(draft: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        if at == "after":
            replace(draft, path)
        assert others.drain(second["b"]) == ""
        if at == "before":
            replace(draft, path)

    monkeypatch.setattr(os, "replace", replace_while_the_other_writes)
    assert drains.drain(first["a"]) == ""
    drains.refresh()
    others.refresh()
    assert draining(first) == draining(second) == (["a"] if at == "before" else ["a", "b"])
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_drains_ignore_a_broken_or_missing_file_while_followed(tmp_path: Path) -> None:
    fleet = fleet_of("a")
    drains = Drains(fleet, tmp_path)
    drains.drain(fleet["a"])
    (tmp_path / NAME).write_text("{")
    with capture_logs() as lines:
        drains.refresh()
        drains.refresh()
    assert [line["event"] for line in lines] == ["smetric.drains.unreadable"]
    (tmp_path / NAME).unlink()
    drains.refresh()
    assert draining(fleet) == ["a"]


@pytest.mark.parametrize("before", ["", "{"])
async def test_drains_follow_another_process_over_any_earlier_file(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "COMPARE_EVERY_S", 0.2)  # it may be written before the watch begins
    if before:
        (tmp_path / NAME).write_text(before)
    fleet = fleet_of("a")
    drains = Drains(fleet, tmp_path)
    await drains.start()
    try:
        other = fleet_of("a")
        Drains(other, tmp_path).drain(other["a"])
        await until(lambda: draining(fleet) == ["a"])
    finally:
        await drains.stop()


def test_drains_without_a_folder_log_that_nothing_is_kept() -> None:
    fleet = fleet_of("a")
    drains = Drains(fleet, None)
    drains.restore()
    assert drains.drain(fleet["a"]) == "state_dir is not set"
    assert draining(fleet) == ["a"]


def test_drains_hold_if_the_folder_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    fleet = fleet_of("a")
    with capture_logs() as lines:
        reason = Drains(fleet, tmp_path / "file").drain(fleet["a"])
    assert reason == f"drained.json cannot be written to {tmp_path / 'file'}: File exists"
    assert [line["event"] for line in lines if line["log_level"] == "warning"][-1] == "smetric.drains.not_kept"
    assert draining(fleet) == ["a"]


def test_drains_leave_no_temporary_file_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    fleet = fleet_of("a")
    assert "cannot be written" in Drains(fleet, tmp_path).drain(fleet["a"])
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_drains_log_a_read_only_folder_at_start(tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(tmp_path / "nowhere" / "else")
    with capture_logs() as lines:
        Drains(fleet_of("a"), tmp_path / "folder").restore()
    assert [line["event"] for line in lines] == ["smetric.drains.not_kept"]


def test_drains_keep_their_file_at_start(tmp_path: Path) -> None:
    before = fleet_of("a", "b")
    assert Drains(before, tmp_path).drain(before["a"]) == ""
    written = (tmp_path / NAME).read_bytes()
    with capture_logs() as lines:
        Drains(fleet_of("b"), tmp_path).restore()
    assert (lines, (tmp_path / NAME).read_bytes()) == ([], written)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it is not of version 1"),
        (b'{"version": 2, "drained": []}', "it is not of version 1"),
        (b'{"version": 1, "drained": "a"}', "`drained` is not a list of ids"),
        (b'{"version": 1, "drained": [1]}', "`drained` is not a list of ids"),
        (b" " * 1024 * 1025, "it is larger than 1048576 bytes"),
        (None, "not a regular file"),
    ],
)
def test_drains_of_an_unreadable_file_are_none(tmp_path: Path, content: bytes | None, reason: str) -> None:
    os.mkfifo(tmp_path / NAME) if content is None else (tmp_path / NAME).write_bytes(content)
    fleet = fleet_of("a")
    with capture_logs() as lines:
        Drains(fleet, tmp_path).restore()
    assert [(line["event"], line["reason"]) for line in lines] == [("smetric.drains.unreadable", reason)]
    assert draining(fleet) == []

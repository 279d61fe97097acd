from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from smetric.http import footprint


def test_footprint_gives_memory_and_open_files() -> None:
    resident, files = footprint.resident_bytes(), footprint.open_files()
    assert resident is not None
    assert 1 << 20 < resident < 1 << 40
    assert files is not None
    with Path(os.devnull).open() as _:
        assert footprint.open_files() == files + 1
    assert files < footprint.most_files()
    footprint.give_back()


def test_open_files_are_at_their_limit_when_none_is_left_to_count_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(footprint, "_FILES", "/proc/self/task")  # of size 0, as the other is before Linux 6.2
    monkeypatch.setattr(os, "listdir", refused)
    assert footprint.open_files() == footprint.most_files()


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "536870912\n"}, 512 << 20),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/memory.max": "1048576", "a/b/memory.max": "max", "memory.max": "max"}, 1 << 20),
        ("5:memory:/docker/x\n", {"memory/docker/x/memory.limit_in_bytes": "1048576"}, 1 << 20),
        ("5:memory:/docker/x\n1:cpu:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (None, {}, None),
    ],
)
def test_memory_limit_is_the_least_of_the_cgroups(
    tmp_path: Path, own: str | None, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert footprint.memory_limit(tmp_path / "cgroup", tmp_path / "own") == limit

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from smetric.doctor.examination import as_text, examine
from smetric.doctor.site import Severity
from smetric.fleet.instance import Instance
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.prefix_index.persistence import NAME, IndexFile
from tests.doctor.lab import Lab, the_only, told


def keep_in(folder: Path, lab: Lab) -> None:
    """Let the router keep its index in *folder*."""
    lab.settings = replace(lab.settings, prefix_index=replace(lab.settings.prefix_index, folder=str(folder)))


async def kept(folder: Path) -> Path:
    """A file as a router writes it."""
    instance, kept = Instance("e0", "http://e0"), PrefixIndex()
    instance.started_at = 1000.0
    kept.placed(instance, array("Q", range(100)))
    await IndexFile(PrefixIndexes([kept]), folder, interval_s=60).save()
    return folder / NAME


async def test_a_file_that_can_be_read_is_well_and_so_is_none(lab: Lab, tmp_path: Path) -> None:
    for folder in (tmp_path / "not" / "there" / "yet", (await kept(tmp_path)).parent):
        keep_in(folder, lab)
        examination = await examine(lab.settings, may_probe=False)
        assert told(examination) == [], as_text(examination)
    assert not (tmp_path / "not").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def age(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[15] -= 1
    path.write_bytes(content)


def take(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "reason"), [(cut, "damaged or truncated"), (age, "another version"), (take, "regular")]
)
async def test_a_file_that_cannot_be_used_is_found(
    lab: Lab, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(await kept(tmp_path))
    keep_in(tmp_path, lab)
    check, found = the_only(await examine(lab.settings, may_probe=False))
    assert (check, found.severity) == ("index", Severity.WARNING)
    assert reason in found.what
    assert "a folder of its own" in found.remedy


async def test_a_folder_that_cannot_be_written_is_found(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_in(tmp_path / "file" / "folder", lab)
    check, found = the_only(await examine(lab.settings, may_probe=False))
    assert (check, found.severity) == ("index", Severity.ERROR)
    assert "file is no folder that can be written" in found.what
    assert "`prefix_index.folder`" in found.remedy


async def test_a_full_disk_is_found(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await kept(tmp_path)
    keep_in(tmp_path, lab)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    check, found = the_only(await examine(lab.settings, may_probe=False))
    assert (check, found.severity) == ("index", Severity.WARNING)
    assert f"4096 bytes are free, and a new file of the index takes {path.stat().st_size}" in found.what
    assert "make room" in found.remedy

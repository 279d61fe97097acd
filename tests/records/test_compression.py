"""What packs a record, by the end of its name."""

from __future__ import annotations

import gzip
import importlib
from pathlib import Path

import pytest

from smetric.errors import ConfigError
from smetric.records.reader import packer, unpacked


def test_the_end_of_the_name_decides() -> None:
    assert packer(Path("decisions.jsonl"))(b"line\n") == b"line\n"
    assert gzip.decompress(packer(Path("decisions.jsonl.gz"))(b"line\n")) == b"line\n"


def test_zstandard_is_an_extra_and_its_absence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    wanted = r"Zstandard needs the extra `zstd`: pip install 'smetric-router\[zstd\]'; or use \.gz"
    with pytest.raises(ConfigError, match=rf"decisions\.jsonl\.zst: {wanted}"):
        packer(Path("decisions.jsonl.zst"))
    path = tmp_path / "odd"
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with path.open("rb") as file, pytest.raises(ConfigError, match=wanted):
        list(unpacked(file, "odd"))


def test_a_damaged_file_is_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    packed = bytearray(gzip.compress(b"line\n" * 1000))
    packed[15] ^= 0xFF
    path.write_bytes(packed)
    with path.open("rb") as file, pytest.raises(ConfigError, match=r"d\.jsonl\.gz: damaged before byte \d+"):
        list(unpacked(file, "d.jsonl.gz"))

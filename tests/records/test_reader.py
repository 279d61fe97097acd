"""Reader of records, and their compression."""

from __future__ import annotations

import gzip
import importlib
import random
import sys
from pathlib import Path

import pytest

from smetric.errors import ConfigError
from smetric.records.reader import Reading, find, packer, unpacked
from tests.records.drive import Fleet, policy, write

# Compression


def test_codec_follows_the_file_suffix() -> None:
    assert packer(Path("decisions.jsonl"))(b"line\n") == b"line\n"
    assert gzip.decompress(packer(Path("decisions.jsonl.gz"))(b"line\n")) == b"line\n"


def test_zstandard_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_reader_reports_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    packed = bytearray(gzip.compress(b"line\n" * 1000))
    packed[15] ^= 0xFF
    path.write_bytes(packed)
    with path.open("rb") as file, pytest.raises(ConfigError, match=r"d\.jsonl\.gz: damaged before byte \d+"):
        list(unpacked(file, "d.jsonl.gz"))


# Reading

LOAD_ONLY = "policy load_only\nroute rr_argmin(requests) as least\n"


def recorded(path: Path, count: int = 50) -> list[str]:
    fleet = Fleet(random.Random(1), 4)
    records = [fleet.decide(policy(LOAD_ONLY)) for _ in range(count)]
    write(path, records)
    return [record.id for record in records]


def ids(path: Path) -> list[str]:
    return [one.line.id for one in Reading([path])]


@pytest.fixture(params=["decisions.jsonl", "decisions.jsonl.gz", "decisions.jsonl.zst"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A path for each compression."""
    if request.param.endswith(".zst") and sys.version_info < (3, 14):
        pytest.importorskip("backports.zstd", reason="the extra `zstd`")
    return tmp_path / str(request.param)


def test_reader_reads_each_compression(packed: Path) -> None:
    wanted = recorded(packed)
    assert ids(packed) == wanted
    anywhere = packed.rename(packed.parent / "renamed")  # the content decides, not the name
    assert ids(anywhere) == wanted


def test_reader_joins_frames_and_reports_half_a_frame(packed: Path) -> None:
    first, second = (packed.parent / number / packed.name for number in "12")
    wanted, more = recorded(first), recorded(second)
    packed.write_bytes(first.read_bytes() + second.read_bytes())
    assert ids(packed) == wanted + more
    packed.write_bytes(first.read_bytes() + second.read_bytes()[:-20])
    reading = Reading([packed])
    assert [one.line.id for one in reading][:50] == wanted
    assert reading.cut_short == [packed]


def test_reader_gives_each_decision_its_policy(path: Path) -> None:
    fleet = Fleet(random.Random(2), 4)
    other = policy("policy other\nroute argmin(requests)\n")
    write(path, [fleet.decide(policy(LOAD_ONLY)), fleet.decide(other, generation=2), fleet.decide(policy(LOAD_ONLY))])
    assert [one.policy.name for one in Reading([path])] == ["load_only", "other", "load_only"]
    assert [one.policy.file for one in Reading([path])] == ["test.policy"] * 3  # without its folder


def test_reader_finds_a_decision_by_id(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl.gz"
    recorded(one)
    wanted = recorded(two)[7]
    found = find([one, two], wanted)
    assert found is not None
    assert found.line.id == wanted
    assert find([one, two], "01JDQ2M7Q0Z5T8F4C6R9K3W1XE") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"hello\n", "no line of a record"),
        (b'{"kind":"decision","id":"x","time_ns":1,"generation":1,"outcome":"routed","request":{}}\n', "generation 1"),
        (b'{"kind":"other"}\n', "no line of a record"),
        (b'[{"event":"smetric.request"}]\n', "no line of a record"),
        (b"\xff\xfe\n", "no line of a record"),
    ],
)
def test_reader_names_the_place_of_invalid_content(text: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"file\.jsonl:1: .*{why}.*expected a file that the setting `record` made"):
        ids(path)


def test_reader_refuses_a_later_version(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(b'{"kind":"header","version":99,"smetric":"9","time_ns":1}\n')
    with pytest.raises(ConfigError, match=r"file\.jsonl:1: version 99; this SMetric reads 1: use a newer one"):
        ids(path)


def test_reader_accepts_an_empty_file_among_others_only(tmp_path: Path) -> None:
    empty, path = tmp_path / "empty.jsonl", tmp_path / "decisions.jsonl"
    empty.touch()
    wanted = recorded(path)
    assert [one.line.id for one in Reading([empty, path])] == wanted
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ConfigError, match=r"empty\.jsonl, .*decisions\.jsonl: no decision in it; expected a file that"):
        find([empty, path], wanted[0])


def test_reader_refuses_columns_that_do_not_fit_the_candidates(path: Path) -> None:
    recorded(path, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    for spoilt in (b'"values":[', b'"age":['):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(spoilt, spoilt + b"1,"))
        with pytest.raises(ConfigError, match="columns that do not fit"):
            ids(path)


def test_reader_names_the_decision_of_a_wrong_value(path: Path) -> None:
    from smetric.records.replay import Judge

    (wanted,) = recorded(path, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    values = lines[-1].split(b'"values":[')[1].split(b"]")[0]
    path.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(values, b",".join([b'"x"', *values.split(b",")[1:]])))
    (one,) = Reading([path])
    with pytest.raises(ConfigError, match=f"decision {wanted}: a value in its record is not of its feature's kind"):
        Judge(policy("policy p\nroute argmin(requests + 1)\n")).decide(one)


def test_reader_names_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ids(tmp_path / "absent.jsonl")


def test_reader_reports_progress_in_bytes_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl.gz"
    recorded(path)
    told: list[int] = []
    reading = Reading([path], told.append)
    assert len(list(reading)) == 50
    assert sum(told) == reading.size == path.stat().st_size


def test_reader_ignores_unknown_fields(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl.gz"
    wanted = recorded(path, 3)
    text = gzip.decompress(path.read_bytes()).replace(b'"request":{', b'"novelty":[1],"request":{"novelty":2,')
    path.write_bytes(text)
    assert ids(path) == wanted

"""Images of an index, and its file: failures are logged and never keep the router from starting."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.prefix_index.persistence import (
    MAGIC,
    NAME,
    IndexFile,
    IndexImage,
    InstanceImage,
    UnreadableImage,
    decode_image,
    encode_image,
    pack,
    unpack,
)
from tests.fakes import until

HASH = st.integers(0, 2**64 - 1)


def image(blocks: list[int], runs: list[tuple[int, int]]) -> IndexImage:
    return IndexImage(5.0, BLOCK_BYTES, [InstanceImage("a", 1000.5, pack(blocks), runs)])


@given(st.lists(HASH, max_size=40))
def test_image_decodes_to_what_was_encoded(blocks: list[int]) -> None:
    runs = [(place, 1) for place in range(len(blocks))]
    (one,) = decode_image(encode_image(image(blocks, runs))).instances
    assert list(one.blocks) == blocks
    assert (one.id, one.started_at, one.runs) == ("a", 1000.5, runs)


def test_pack_is_little_endian() -> None:
    assert pack([1, 2**63]) == bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 128])
    assert list(unpack(pack([7, 8]))) == [7, 8]


@given(st.data())
def test_image_with_a_changed_bit_or_missing_end_is_refused(data: st.DataObject) -> None:
    whole = bytearray(encode_image(image([1, 2, 3], [(1, 3)])))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(UnreadableImage):
        decode_image(bytes(whole))


def test_image_of_another_version_is_refused_by_name() -> None:
    other = bytearray(encode_image(image([], [])))
    other[len(MAGIC) - 1] += 1
    with pytest.raises(UnreadableImage, match="another version"):
        decode_image(bytes(other))


@pytest.mark.parametrize(
    "wrong",
    [
        image([1, 2], [(1, 3)]),
        image([1, 2], [(1, 2), (2, 0)]),
        image([1, 2], [(1, 3), (2, -1)]),
        image([1, 2], [(2, 1), (1, 1)]),
        IndexImage(0.0, BLOCK_BYTES, [InstanceImage("a", None, b"1234567", [(1, 1)])]),
        IndexImage(0.0, 512, []),
    ],
)
def test_image_that_is_inconsistent_is_refused(wrong: IndexImage) -> None:
    with pytest.raises(UnreadableImage):
        decode_image(encode_image(wrong))


ASKED = InferenceRequest(prompt=Prompt([b"x" * 3 * BLOCK_BYTES], 4.0))
HIT = 3 * BLOCK_BYTES / 4


def engine(started_at: float | None = 1000.0) -> Instance:
    instance = Instance("a", "http://127.0.0.1:1")
    instance.started_at = started_at
    return instance


def hit(index: PrefixIndex, instance: Instance) -> float | None:
    (cell,) = index.lookup(ASKED, [instance])["hit_len"]
    return cell


async def kept(folder: Path, instance: Instance) -> None:
    """A router that serves one request and ends."""
    index = PrefixIndex()
    file = IndexFile(PrefixIndexes([index]), folder, interval_s=60)
    await file.start()
    index.prefilled(ASKED, instance)
    await file.stop()


async def started(folder: Path) -> tuple[PrefixIndex, IndexFile]:
    index = PrefixIndex()
    file = IndexFile(PrefixIndexes([index]), folder, interval_s=0.01)
    await file.start()
    return index, file


async def test_index_file_restores_the_index_of_a_running_engine(tmp_path: Path) -> None:
    await kept(tmp_path / "new" / "folder", engine())
    index, file = await started(tmp_path / "new" / "folder")
    assert hit(index, engine()) == HIT
    await file.stop()


async def test_index_file_keeps_both_kinds_of_blocks(tmp_path: Path) -> None:
    def both() -> PrefixIndexes:
        return PrefixIndexes([PrefixIndex(block_tokens=16), PrefixIndex()])

    asked = InferenceRequest(prompt=Prompt([b"x" * 3000], 4.0), token_ids=array("I", range(700)))
    before = both()
    file = IndexFile(before, tmp_path, interval_s=60)
    await file.start()
    for index in before:
        index.prefilled(asked, engine())
    await file.stop()
    after = both()
    file = IndexFile(after, tmp_path, interval_s=60)
    await file.start()
    assert [index.least(asked, [engine()]) for index in after] == [[688], [512]]
    await file.stop()


@pytest.mark.parametrize("started_at", [1010.0, None])
async def test_index_file_restores_nothing_for_another_or_unknown_process(
    tmp_path: Path, started_at: float | None
) -> None:
    await kept(tmp_path, engine())
    index, file = await started(tmp_path)
    assert hit(index, engine(started_at)) is None
    await file.stop()


async def test_index_file_skips_images_without_start_time(tmp_path: Path) -> None:
    await kept(tmp_path, engine(None))
    index, file = await started(tmp_path)
    assert not index.is_restoring
    await file.stop()


async def test_index_file_is_written_when_changed_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    index, file = await started(tmp_path)
    path = tmp_path / NAME
    await asyncio.sleep(0.05)
    assert not path.exists()
    index.prefilled(ASKED, engine())
    await until(path.exists)
    (one,) = decode_image(path.read_bytes()).instances
    assert len(one.blocks) == 3
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(tmp_path) == [NAME]
    first = path.stat().st_mtime_ns
    await file.save()
    assert path.stat().st_mtime_ns == first
    await file.stop()


async def test_index_file_is_written_again_after_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, file = await started(tmp_path)
    with monkeypatch.context() as broken, capture_logs() as logs:
        broken.setattr(index, "images", lambda: 1 / 0)
        index.prefilled(ASKED, engine())
        await until(lambda: bool(logs))
    assert [line["event"] for line in logs] == ["smetric.index.failed"]
    await until((tmp_path / NAME).exists)
    await file.stop()


async def test_index_file_last_write_waits_for_the_present_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    under_way = 0

    def slow(fd: int) -> None:
        nonlocal under_way
        under_way += 1
        at_once.append(under_way)
        time.sleep(0.1)
        under_way -= 1

    index, file = await started(tmp_path)
    monkeypatch.setattr(os, "fsync", slow)
    index.prefilled(ASKED, engine())
    await until(lambda: bool(at_once))
    other = Instance("b", "http://127.0.0.1:2")
    other.started_at = 1000.0
    index.prefilled(ASKED, other)
    await file.stop()
    assert at_once == [1, 1]
    assert [one.id for one in decode_image((tmp_path / NAME).read_bytes()).instances] == ["a", "b"]
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no image"),
        (b"{}" * 100, "no image"),
        (encode_image(IndexImage(0.0, BLOCK_BYTES, []))[:-1], "checksum"),
    ],
)
async def test_index_file_that_is_unreadable_is_logged_and_rewritten(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / NAME).write_bytes(content)
    with capture_logs() as logs:
        index, file = await started(tmp_path)
    (line,) = [line for line in logs if line["event"] == "smetric.index.unreadable"]
    assert reason in line["reason"]
    index.prefilled(ASKED, engine())
    await file.stop()
    assert len(decode_image((tmp_path / NAME).read_bytes()).instances) == 1


async def test_index_file_that_is_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with capture_logs() as logs:
        index, file = await started(tmp_path)
    assert [line["reason"] for line in logs] == ["not a regular file"]
    index.prefilled(ASKED, engine())
    await file.stop()
    assert len(decode_image((tmp_path / NAME).read_bytes()).instances) == 1


async def test_index_file_larger_than_the_index_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(2**20 + 1)
    with capture_logs() as logs:
        kept = IndexFile(PrefixIndexes([PrefixIndex(2**20)]), tmp_path, interval_s=60)
        await kept.start()
    assert "larger than prefix_index.max_bytes" in logs[0]["reason"]
    await kept.stop()


async def test_index_file_logs_an_unwritable_folder_once(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    index = PrefixIndex()
    file = IndexFile(PrefixIndexes([index]), tmp_path / "taken", interval_s=60)
    with capture_logs() as logs:
        await file.start()
        assert logs[-1]["event"] == "smetric.index.not_saved"
        for _ in range(3):
            index.prefilled(ASKED, engine())
            await file.save()
        await file.stop()
    assert [line["event"] for line in logs].count("smetric.index.not_saved") == 1


async def test_index_file_keeps_the_last_image_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, file = await started(tmp_path)
    index.prefilled(ASKED, engine())
    await until((tmp_path / NAME).exists)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    other = Instance("b", "http://127.0.0.1:2")
    other.started_at = 1000.0
    with capture_logs() as logs:
        index.prefilled(ASKED, other)
        await file.stop()
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("smetric.index.not_saved", "No space left on device")
    ]
    assert os.listdir(tmp_path) == [NAME]
    assert [one.id for one in decode_image((tmp_path / NAME).read_bytes()).instances] == ["a"]


@pytest.mark.parametrize("kind", ["pipe", "link"])
async def test_index_file_replaces_a_pipe_or_link_in_the_place_of_its_draft(tmp_path: Path, kind: str) -> None:
    draft, other = tmp_path / f"{NAME}.new", tmp_path / "other"
    other.write_text("of somebody else")
    if kind == "pipe":
        os.mkfifo(draft)
    else:
        draft.symlink_to(other)
    async with asyncio.timeout(5):
        index, file = await started(tmp_path)
        index.prefilled(ASKED, engine())
        await file.stop()
    assert other.read_text() == "of somebody else"
    assert len(decode_image((tmp_path / NAME).read_bytes()).instances) == 1

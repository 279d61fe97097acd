"""Images of an index, and its file: failures are logged and never keep the router from starting."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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

# ── images ───────────────────────────────────────────────────────────────────

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


# ── the file ─────────────────────────────────────────────────────────────────

ASKED = InferenceRequest(prompt=Prompt([b"x" * 3 * BLOCK_BYTES], 4.0), token_ids=array("I", range(700)))
HIT = 3 * BLOCK_BYTES / 4


def engine(started_at: float | None = 1000.0, id: str = "a") -> Instance:
    instance = Instance(id, "http://127.0.0.1:1")
    instance.started_at = started_at
    return instance


def hit(index: PrefixIndex, instance: Instance) -> float | None:
    (cell,) = index.lookup(ASKED, [instance])["hit_len"]
    return cell


@asynccontextmanager
async def kept(folder: Path, max_bytes: int = 2**24) -> AsyncIterator[tuple[PrefixIndex, IndexFile]]:
    """An index while it is kept in *folder*."""
    index = PrefixIndex(max_bytes)
    file = IndexFile(PrefixIndexes([index]), folder, interval_s=0.01)
    await file.start()
    yield index, file
    await file.stop()


async def serve_one(folder: Path, instance: Instance) -> None:
    """A router that serves one request and ends."""
    async with kept(folder) as (index, _):
        index.prefilled(ASKED, instance)


def ids_in(folder: Path) -> list[str]:
    """The instances in the file, which is the only one in *folder*."""
    assert NAME in os.listdir(folder)
    return [one.id for one in decode_image((folder / NAME).read_bytes()).instances]


@pytest.mark.parametrize(
    ("before", "after", "cell"),
    [(1000.0, 1000.0, HIT), (1000.0, 1010.0, None), (1000.0, None, None), (None, None, None)],
    ids=["same process", "another process", "unknown process", "unknown then"],
)
async def test_index_file_restores_the_index_of_the_same_process_only(
    tmp_path: Path, before: float | None, after: float | None, cell: float | None
) -> None:
    folder = tmp_path / "new" / "folder"
    await serve_one(folder, engine(before))
    async with kept(folder) as (index, _):
        assert index.is_restoring == (before is not None)
        assert hit(index, engine(after)) == cell


async def test_index_file_keeps_both_kinds_of_blocks(tmp_path: Path) -> None:
    for least in ([[0], [0]], [[688], [768]]):
        both = PrefixIndexes([PrefixIndex(block_tokens=16), PrefixIndex()])
        file = IndexFile(both, tmp_path, interval_s=60)
        await file.start()
        assert [index.least(ASKED, [engine()]) for index in both] == least
        for index in both:
            index.prefilled(ASKED, engine())
        await file.stop()


async def test_index_file_is_written_when_changed_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / NAME
    async with kept(tmp_path) as (index, file):
        await asyncio.sleep(0.05)
        assert not path.exists()
        index.prefilled(ASKED, engine())
        await until(path.exists)
        assert ids_in(tmp_path) == ["a"]
        assert path.stat().st_mode & 0o077 == 0
        assert os.listdir(tmp_path) == [NAME]
        first = path.stat().st_mtime_ns
        await file.save()
        assert path.stat().st_mtime_ns == first


async def test_index_file_is_written_again_after_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept(tmp_path) as (index, _):
        with monkeypatch.context() as broken, capture_logs() as logs:
            broken.setattr(index, "images", lambda: 1 / 0)
            index.prefilled(ASKED, engine())
            await until(lambda: bool(logs))
        assert [line["event"] for line in logs] == ["smetric.index.failed"]
        await until((tmp_path / NAME).exists)


async def test_index_file_last_write_waits_for_the_present_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    under_way = 0

    def slow(fd: int) -> None:
        nonlocal under_way
        under_way += 1
        at_once.append(under_way)
        time.sleep(0.1)
        under_way -= 1

    async with kept(tmp_path) as (index, _):
        monkeypatch.setattr(os, "fsync", slow)
        index.prefilled(ASKED, engine())
        await until(lambda: bool(at_once))
        index.prefilled(ASKED, engine(id="b"))
    assert at_once == [1, 1]
    assert ids_in(tmp_path) == ["a", "b"]
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no image"),
        (b"{}" * 100, "no image"),
        (encode_image(IndexImage(0.0, BLOCK_BYTES, []))[:-1], "checksum"),
        (bytes(2**20 + 1), "larger than prefix_index.max_bytes"),
        (None, "not a regular file"),
    ],
    ids=["empty", "other", "truncated", "too large", "pipe"],
)
async def test_index_file_that_is_unreadable_is_logged_and_rewritten(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    if content is None:
        os.mkfifo(tmp_path / NAME)
    else:
        (tmp_path / NAME).write_bytes(content)
    with capture_logs() as logs:
        async with kept(tmp_path, 2**20) as (index, _):
            index.prefilled(ASKED, engine())
    (line,) = [line for line in logs if line["event"] == "smetric.index.unreadable"]
    assert reason in line["reason"]
    assert ids_in(tmp_path) == ["a"]


async def test_index_file_logs_an_unwritable_folder_once(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with capture_logs() as logs:
        async with kept(tmp_path / "taken") as (index, file):
            assert logs[-1]["event"] == "smetric.index.not_saved"
            for _ in range(3):
                index.prefilled(ASKED, engine())
                await file.save()
    assert [line["event"] for line in logs].count("smetric.index.not_saved") == 1


async def test_index_file_keeps_the_last_image_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    await serve_one(tmp_path, engine())
    with capture_logs() as logs:
        async with kept(tmp_path) as (index, _):
            monkeypatch.setattr(os, "fsync", full)
            index.prefilled(ASKED, engine(id="b"))
    assert [(line["event"], line["reason"]) for line in logs] == [
        ("smetric.index.not_saved", "No space left on device")
    ]
    assert os.listdir(tmp_path) == [NAME]
    assert ids_in(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["pipe", "link"])
async def test_index_file_replaces_a_pipe_or_link_in_the_place_of_its_draft(tmp_path: Path, kind: str) -> None:
    draft, other = tmp_path / f"{NAME}.new", tmp_path / "other"
    other.write_text("another file")
    if kind == "pipe":
        os.mkfifo(draft)
    else:
        draft.symlink_to(other)
    async with asyncio.timeout(5):
        await serve_one(tmp_path, engine())
    assert other.read_text() == "another file"
    assert ids_in(tmp_path) == ["a"]

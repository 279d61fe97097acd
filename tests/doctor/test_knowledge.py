"""Checks of sources: KV events, token ids, and the file of the prefix index."""

from __future__ import annotations

import asyncio
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from smetric.config.settings import TokenizerSettings
from smetric.doctor.examination import as_text, examine
from smetric.doctor.knowledge import publisher_problem
from smetric.fleet.instance import Instance
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.prefix_index.persistence import NAME, IndexFile
from tests.doctor.broken import ERROR, WARNING
from tests.doctor.lab import Lab, all_findings, listening, publishing
from tests.sources.kv_events.kv_engine import stored
from tests.sources.tokens.recorded import model_folder

pytestmark = pytest.mark.slow


_SECOND_RANK = b'\nvllm:num_requests_running{engine="1",model_name="m"} 0.0\nvllm:num_requests_running'


@pytest.mark.parametrize("address", ["tcp://[::1:5557", "tcp://gpu..0:5557"])
async def test_publisher_problem_of_what_is_no_address(address: str) -> None:
    assert await publisher_problem(address) == "it is not an address"


async def test_kv_events_check_finds_dead_endpoints(lab: Lab) -> None:
    address = "tcp://127.0.0.1:9"
    async with publishing(lab.fronts[0]) as one, publishing(lab.fronts[1]) as two:
        settings = listening(lab, one, two)
        dead = replace(settings.instances[0], kv_events=address)
        no_zmq = replace(settings.instances[1], kv_events=lab.fronts[1].url.replace("http", "tcp"))
        found = all_findings(await examine(replace(settings, instances=(dead, no_zmq)), may_probe=False))
    assert [(check, finding.where) for check, finding in found] == [
        ("kv-events", "instance e0"),
        ("kv-events", "instance e1"),
    ]
    assert f"{address}: connection refused" in found[0][1].what
    assert "nothing greets there" in found[1][1].what
    assert all("--kv-events-config" in finding.remedy for _, finding in found)


async def test_kv_events_check_finds_silent_engines_and_missing_ranks(lab: Lab) -> None:
    async with publishing(lab.fronts[0]) as one, publishing(lab.fronts[1]) as two:
        lab.fronts[0].on_chat = None
        lab.fronts[1].edit("/metrics", b"\nvllm:num_requests_running", _SECOND_RANK)
        settings = listening(lab, one, two)
        found = all_findings(await examine(settings))
    by_where = {finding.where: finding for check, finding in found if check == "kv-events"}
    assert "nothing was published" in by_where["instance e0"].what
    assert "prefix caching on" in by_where["instance e0"].remedy
    assert "set `kv_events.ranks: 2`" in by_where["instance e1"].remedy


async def test_kv_events_check_warns_without_replay(lab: Lab) -> None:
    async with publishing(lab.fronts[0], replay=False) as one, publishing(lab.fronts[1], replay=False) as two:
        found = all_findings(await examine(listening(lab, one, two)))
    assert [(check, finding.where) for check, finding in found if finding.severity is WARNING] == [
        ("kv-events", "kv_events.replay")
    ]


async def test_kv_events_check_finds_engines_at_one_address(lab: Lab) -> None:
    async with publishing(lab.fronts[0]) as one, publishing(lab.fronts[1]) as two:

        async def others() -> None:
            """Publish the message numbers of two more engines in turns."""
            for number in range(1000):
                payload = msgspec.msgpack.encode([2e9 + number, [stored([1] * 9)], 0])
                await one.send_frames(b"", (900 - number if number % 2 else 5).to_bytes(8, "big"), payload)
                await asyncio.sleep(0.01)

        publishing_too = asyncio.create_task(others())
        found = all_findings(await examine(listening(lab, one, two)))
        publishing_too.cancel()
    errors = [one for check, one in found if check == "kv-events" and one.severity is ERROR]
    assert [one.where for one in errors] == ["instance e0"]
    assert "started again" in errors[0].what
    assert "an address of its own" in errors[0].remedy


def keep_in(folder: Path, lab: Lab) -> None:
    """Let the router keep its index in *folder*."""
    lab.set(prefix_index=replace(lab.settings.prefix_index, folder=str(folder)))


async def kept(folder: Path) -> Path:
    """Write a file of the index as a router does, and return its path."""
    instance, kept = Instance("e0", "http://e0"), PrefixIndex()
    instance.started_at = 1000.0
    kept.placed(instance, array("Q", range(100)))
    await IndexFile(PrefixIndexes([kept]), folder, interval_s=60).save()
    return folder / NAME


async def test_index_check_accepts_a_readable_file_and_none(lab: Lab, tmp_path: Path) -> None:
    for folder in (tmp_path / "not" / "there" / "yet", (await kept(tmp_path)).parent):
        keep_in(folder, lab)
        examination = await examine(lab.settings, may_probe=False)
        assert all_findings(examination) == [], as_text(examination)
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
async def test_index_check_finds_unusable_files(
    lab: Lab, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(await kept(tmp_path))
    keep_in(tmp_path, lab)
    found = await lab.only_finding("index", WARNING)
    assert reason in found.what
    assert "a folder of its own" in found.remedy


async def test_index_check_finds_unwritable_folders(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_in(tmp_path / "file" / "folder", lab)
    found = await lab.only_finding("index", ERROR)
    assert "file is not a writable folder" in found.what
    assert "`prefix_index.folder`" in found.remedy


async def test_index_check_finds_full_disks(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await kept(tmp_path)
    keep_in(tmp_path, lab)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    found = await lab.only_finding("index", WARNING)
    assert f"4096 bytes are free, and a new file of the index takes {path.stat().st_size}" in found.what
    assert "make room" in found.remedy


async def test_tokens_check_finds_the_tokenizer_of_another_model(lab: Lab, tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path, "plain"))
    lab.set(tokenizer=TokenizerSettings(source="local", folders={"*": folder}))
    found = dict(await lab.findings(may_probe=True))
    assert found.keys() == {"tokens", "hits"}
    assert "with tools has other token ids here than on e0" in found["tokens"].what
    assert "let `tokenizer.folders` name" in found["tokens"].remedy
    assert "the engine counts" in found["hits"].what


async def test_tokens_check_finds_models_without_a_folder(lab: Lab, tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path, "plain"))
    lab.set(tokenizer=TokenizerSettings(source="local", folders={"n": folder}))
    finding = await lab.only_finding("tokens", ERROR, may_probe=True)
    assert "set `tokenizer.folders: {m: FOLDER}`" in finding.remedy


async def test_examination_sends_instances_their_keys(lab: Lab) -> None:
    for front in lab.fronts:
        front.key = "a-key-of-an-engine"
    keyed = tuple(replace(one, api_key="a-key-of-an-engine") for one in lab.settings.instances)
    lab.set(instances=keyed, tokenizer=TokenizerSettings(source="engine"))
    assert await lab.is_fine(may_probe=True)

"""Policy files: reload, last good policy and libraries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from smetric.errors import ConfigError
from smetric.features import VOCABULARY
from smetric.files import watch
from smetric.policy import PolicyError, PolicyText
from smetric.policy.parser import MAX_BYTES
from smetric.routing.policy_files import Origin, PolicyFile
from tests.fakes import until

GOOD = "policy p\nroute argmin(requests) as least\n"
BETTER = "policy p\nroute argmax(hit_len) as warmest\n"
BAD = "policy p\nroute argmin(requets)\n"
USING = "policy p\nuse common (near)\nroute argmin(near(requests))\n"
LIBRARY = "library common\ndef near(x) = x + 1\n"


class Heard:
    """Remembers what was reported."""

    def __init__(self) -> None:
        self.swaps: list[int] = []
        self.failures: list[str] = []

    def __call__(self, file: PolicyFile, error: str | None) -> None:
        if error is None:
            self.swaps.append(file.current.number)
        else:
            self.failures.append(error)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "p.policy"
    path.write_text(GOOD)
    return path


@pytest.fixture
def library(path: Path) -> Path:
    """Library beside a policy that uses it."""
    path.write_text(USING)
    library = path.with_name("common.policy")
    library.write_text(LIBRARY)
    return library


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def policy_file(path: Path, heard: Heard) -> PolicyFile:
    return PolicyFile(path, VOCABULARY, on_reload=heard)


def test_policy_file_refuses_unchecked_policy_at_start(path: Path) -> None:
    path.write_text(BAD)
    with pytest.raises(PolicyError, match="did you mean `requests`"):
        PolicyFile(path, VOCABULARY)


def test_policy_file_refuses_missing_file_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.policy: cannot be read: No such file"):
        PolicyFile(tmp_path / "none.policy", VOCABULARY)


@pytest.mark.parametrize("kind", ["folder", "fifo", "huge", "binary"])
def test_policy_file_refuses_odd_files_without_hanging(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "p.policy"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "huge":
        path.write_bytes(b"#" * (MAX_BYTES + 1))
    else:
        path.write_bytes(b"policy \xff")
    with pytest.raises(ConfigError, match=r"p\.policy"):
        PolicyFile(path, VOCABULARY)


def test_policy_file_checks_parameters(path: Path) -> None:
    with pytest.raises(PolicyError, match="NOPE"):
        PolicyFile(path, VOCABULARY, {"NOPE": 1.0})


def test_policy_file_swaps_changed_file(path: Path, policy_file: PolicyFile, heard: Heard) -> None:
    before = policy_file.current
    assert before.number == 1
    assert not policy_file.refresh()
    path.write_text(BETTER)
    assert policy_file.refresh()
    assert policy_file.current.number == 2
    assert policy_file.current.policy.digest != before.policy.digest
    assert heard.swaps == [2]


@pytest.mark.parametrize("content", [BAD, "", GOOD[:20], "\x00", "# only a comment\n"])
def test_policy_file_keeps_last_good_policy_and_logs_once(
    path: Path, policy_file: PolicyFile, heard: Heard, content: str
) -> None:
    before = policy_file.current
    path.write_text(content)
    for _ in range(3):
        assert not policy_file.refresh()
    assert policy_file.current is before
    assert len(heard.failures) == 1
    assert policy_file.problem == heard.failures[0]
    path.write_text(BETTER)
    assert policy_file.refresh()
    assert policy_file.problem is None


def test_policy_file_logs_first_error_on_one_line(path: Path, policy_file: PolicyFile) -> None:
    with structlog.testing.capture_logs() as lines:
        path.write_text(BAD.replace("route", "let l = requets\nroute"))
        policy_file.refresh()
        path.unlink()
        policy_file.refresh()
    bad, gone = lines
    assert (bad["error"], bad["errors"]) == ("2:9: unknown name `requets`; did you mean `requests`?", 2)
    assert (gone["error"], gone["errors"]) == ("cannot be read: No such file or directory", 1)
    assert bad["keeps"] == gone["keeps"] == policy_file.current.policy.digest


def test_policy_file_keeps_policy_of_deleted_file(path: Path, policy_file: PolicyFile, heard: Heard) -> None:
    path.unlink()
    assert not policy_file.refresh()
    assert not policy_file.refresh()
    assert len(heard.failures) == 1
    path.write_text(BETTER)
    assert policy_file.refresh()
    assert policy_file.current.number == 2


def test_policy_file_makes_no_generation_of_the_acting_text(path: Path, policy_file: PolicyFile, heard: Heard) -> None:
    path.write_text(BAD)
    policy_file.refresh()
    path.write_text(GOOD)
    assert not policy_file.refresh()
    assert (policy_file.current.number, policy_file.problem, heard.swaps) == (1, None, [])


def test_policy_file_lets_put_aside_text_act_after_a_change(path: Path, policy_file: PolicyFile, heard: Heard) -> None:
    path.write_text(BETTER)
    assert policy_file.refresh()
    policy_file.restore(Origin.ROLLBACK)
    path.write_text(GOOD)  # the mended file is in force
    assert not policy_file.refresh()
    assert policy_file.problem is None
    path.write_text(BETTER)  # and what was undone is pushed once more, deliberately
    assert policy_file.refresh()
    assert (policy_file.current.policy.source, policy_file.current.origin) == (BETTER, Origin.FILE)
    assert (policy_file.problem, heard.swaps) == (None, [2, 3, 4])


@pytest.mark.parametrize("meanwhile", [BAD, None])
def test_policy_file_keeps_put_aside_over_bad_file(path: Path, policy_file: PolicyFile, meanwhile: str | None) -> None:
    path.with_name("common.policy").write_text(LIBRARY)
    path.write_text(USING)
    assert policy_file.refresh()
    policy_file.restore(Origin.ROLLBACK)
    why = policy_file.problem
    path.unlink() if meanwhile is None else path.write_text(meanwhile)
    assert not policy_file.refresh()
    assert policy_file.problem != why
    path.write_text(USING)
    assert not policy_file.refresh()
    assert policy_file.current.policy.source == GOOD
    assert policy_file.problem == why


def test_policy_file_keeps_put_aside_while_file_is_away(path: Path, policy_file: PolicyFile) -> None:
    path.write_text(BETTER)
    assert policy_file.refresh()
    path.unlink()
    policy_file.refresh()
    policy_file.restore(Origin.GUARDRAIL)
    path.write_text(BETTER)
    assert not policy_file.refresh()
    assert policy_file.current.policy.source == GOOD
    assert "was replaced by 1 (guardrail)" in (policy_file.problem or "")


def test_policy_file_has_no_problem_after_restoring_its_text(path: Path, policy_file: PolicyFile) -> None:
    path.write_text(BETTER)
    assert policy_file.refresh()
    policy_file.restore(Origin.ROLLBACK)
    policy_file.restore(Origin.ROLLBACK, 2)
    assert (policy_file.current.policy.source, policy_file.problem) == (BETTER, None)


def test_policy_file_picks_up_completed_file(path: Path, policy_file: PolicyFile) -> None:
    text = BETTER.encode()
    for end in range(1, len(text)):
        path.write_bytes(text[:end])
        policy_file.refresh()
        # A prefix that happens to be a whole policy may be taken; anything else must not be.
        acting = policy_file.current.policy.source
        assert acting == GOOD or BETTER.startswith(acting)
    path.write_bytes(text)
    policy_file.refresh()
    assert policy_file.current.policy.source == BETTER


@asynccontextmanager
async def watching(policy_file: PolicyFile) -> AsyncIterator[None]:
    task = asyncio.create_task(watch([policy_file]))
    await asyncio.sleep(0.1)  # the watch is set up in a thread that reports nothing when it is ready
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_watch_sees_written_and_replaced_files(path: Path, policy_file: PolicyFile) -> None:
    async with watching(policy_file):
        path.write_text(BETTER)  # noqa: ASYNC240 - a few bytes
        await until(lambda: policy_file.current.number == 2, within_s=10)
        replacement = path.with_suffix(".new")
        replacement.write_text(GOOD)
        replacement.rename(path)
        await until(lambda: policy_file.current.number == 3, within_s=10)
    assert policy_file.current.policy.source == GOOD


async def test_watch_sees_swapped_link(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: p.policy → ..data/p.policy, and ..data is replaced."""
    for name, text in (("one", GOOD), ("two", BETTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.policy").write_text(text)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "p.policy").symlink_to("..data/p.policy")
    policy_file = PolicyFile(tmp_path / "p.policy", VOCABULARY)
    async with watching(policy_file):
        (tmp_path / "..tmp").symlink_to("two")
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        await until(lambda: policy_file.current.number == 2, within_s=10)
    assert policy_file.current.policy.source == BETTER


# Libraries


def test_policy_file_follows_its_libraries(path: Path, library: Path, heard: Heard) -> None:
    policy_file = PolicyFile(path, VOCABULARY, on_reload=heard)
    before = policy_file.current.policy.digest
    assert not policy_file.refresh()
    library.write_text(LIBRARY.replace("+ 1", "+ 2"))
    assert policy_file.refresh()
    assert policy_file.current.policy.digest != before
    assert heard.swaps == [2]


def test_policy_file_keeps_policy_when_library_breaks(path: Path, library: Path, heard: Heard) -> None:
    policy_file = PolicyFile(path, VOCABULARY, on_reload=heard)
    library.write_text(LIBRARY.replace("+ 1", "+"))
    assert not policy_file.refresh()
    assert f"--> {library}:2:" in (policy_file.problem or "")
    assert not policy_file.refresh()
    library.unlink()
    assert not policy_file.refresh()
    assert "there is no common.policy beside this file" in (policy_file.problem or "")
    library.write_text(LIBRARY)
    assert not policy_file.refresh()
    assert not policy_file.problem
    assert policy_file.current.number == 1
    assert len(heard.failures) == 2


@pytest.mark.parametrize("written", ["+ 2", "+"])
def test_policy_file_reads_library_changed_during_load(path: Path, library: Path, written: str) -> None:
    policy_file = PolicyFile(path, VOCABULARY)
    beside = policy_file.beside
    reads = []

    def late(name: str) -> PolicyText | None:
        found = beside(name)
        reads.append(name)
        if len(reads) == 2:  # the second of a refresh is the policy's own
            library.write_text(LIBRARY.replace("+ 1", "+ 3"))
        return found

    policy_file.beside = late
    library.write_text(LIBRARY.replace("+ 1", written))
    policy_file.refresh()
    assert policy_file.refresh()
    assert policy_file.current.policy.libraries["common"].text == LIBRARY.replace("+ 1", "+ 3")

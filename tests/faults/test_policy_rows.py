"""Rows F: a policy file that is bad, half-written, gone, or replaced a few hundred times under load."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import orjson
import pytest

from tests.fakes import FakeEngine, until
from tests.faults.harness import Running, running

ONE = "policy one\n\nroute rr_argmin(requests)\n"
TWO = "policy two\n\nroute rr_argmin(unprefilled)\n"
RELOADS = 300


async def in_force(router: Running) -> dict[str, object]:
    page: dict[str, object] = orjson.loads((await router.admin("/admin/policy")).body)
    return page


async def test_f1_an_invalid_policy_at_start_ends_the_process_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.policy"
    path.write_text("policy bad\n\nroute argmin(no_such_feature)\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "smetric", "serve", "--policy", str(path), "--instance", "http://127.0.0.1:9"),
        *("--port", "0", "--admin-port", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(10):
        _, told = await process.communicate()
    assert process.returncode == 1
    assert f"{path}:3:14".encode() in told
    assert b"no_such_feature" in told
    assert b"Traceback" not in told


@pytest.mark.parametrize(
    "bad",
    [
        "policy two\n\nroute nobody(\n",
        "policy two\n\nroute rr_arg",
        "",
        "policy two\n\nroute argmin(no_such_feature)\n",
    ],
    ids=["invalid", "half-written", "empty", "unknown feature"],
)
async def test_f2_a_bad_policy_file_leaves_the_last_good_one_until_it_is_whole(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "p.policy"
    path.write_text(ONE)
    async with running(FakeEngine(), policy=str(path)) as router:
        path.write_text(bad)
        await until(lambda: len(router.lines("smetric.policy.kept")) == 1)
        assert (await router.chat()).value("x-smetric-policy").startswith("one@")
        page = await in_force(router)
        assert (page["name"], page["generation"]) == ("one", 1)
        assert page["kept_because"]
        assert b'smetric_policy_reloads_total{result="kept"} 1.0' in (await router.admin("/metrics")).body
        path.write_text(TWO)
        await until(lambda: len(router.lines("smetric.policy.reloaded")) == 1)
        assert (await router.chat()).value("x-smetric-policy").startswith("two@")


async def test_f2_a_policy_file_that_goes_away_or_becomes_a_folder_leaves_the_last_good_one(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(ONE)
    async with running(FakeEngine(), policy=str(path)) as router:
        path.unlink()
        await until(lambda: len(router.lines("smetric.policy.kept")) == 1)
        path.mkdir()
        assert (await router.chat()).value("x-smetric-policy").startswith("one@")
        path.rmdir()
        path.write_text(TWO)
        await until(lambda: len(router.lines("smetric.policy.reloaded")) == 1)
        assert (await router.chat()).value("x-smetric-policy").startswith("two@")


@pytest.mark.slow
async def test_f3_hundreds_of_reloads_under_load_cost_no_request_and_mix_no_decision(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(ONE)
    async with running(FakeEngine(), FakeEngine(), policy=str(path)) as router:
        seen: set[str] = set()
        done = False

        async def load() -> None:
            while not done:
                answer = await router.chat()
                assert answer.status == 200
                policy = answer.value("x-smetric-policy")
                decided = router.application.telemetry.decisions.get(answer.value("x-smetric-decision-id"))
                assert decided is not None
                assert policy == f"{decided.policy.name}@{decided.policy.digest}"
                seen.add(policy)

        loading = [asyncio.create_task(load()) for _ in range(4)]
        for i in range(RELOADS):
            path.write_text(ONE if i % 2 else TWO)
            assert router.application.policy_file.refresh() or i == 0
            await asyncio.sleep(0)
        done = True
        await asyncio.gather(*loading)
        assert {re.sub("@.*", "", policy) for policy in seen} == {"one", "two"}
        assert len(seen) == 2
        assert router.lines("smetric.policy.kept") == []

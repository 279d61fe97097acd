"""`smetric status`, `decisions`, `policies` and `explain --last` of a running router."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from click.testing import CliRunner, Result

from smetric.cli import admin, main
from smetric.cli.watch import table
from smetric.config.settings import ShadowSettings
from smetric.files import shipped_policies
from tests.cli.commands import run
from tests.doctor.lab import Lab, running, set_up


@asynccontextmanager
async def router() -> AsyncIterator[tuple[Lab, str]]:
    """A router that has answered a request, and its URL."""
    async with set_up() as lab, running(lab) as url:
        await ask(url)
        yield lab, url


async def ask(url: str) -> None:
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    async with aiohttp.ClientSession() as client, client.post(url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200
        await response.read()


async def shown(lab: Lab, *arguments: str) -> Result:
    """Run a command on the router of *lab* in a thread of its own."""
    return await asyncio.to_thread(run, *arguments, SMETRIC_ADMIN__PORT=str(lab.settings.admin.port))


async def test_running_router_is_shown_by_each_command() -> None:
    async with router() as (lab, _):
        status = await shown(lab, "status")
        state = json.loads((await shown(lab, "status", "--format", "json")).stdout)
        decisions = await shown(lab, "decisions", "-n", "3")
        policies = await shown(lab, "policies")
        last = await shown(lab, "explain", "--last")
        (row,) = [json.loads(line) for line in (await shown(lab, "decisions", "--format", "json")).stdout.splitlines()]
        listed = json.loads((await shown(lab, "policies", "--format", "json")).stdout)
    admin = f"http://127.0.0.1:{lab.settings.admin.port}"
    lines = status.stdout.splitlines()
    assert re.fullmatch(rf"smetric \S+ at {admin}: 2 of 2 instances up", lines[0])
    assert re.fullmatch(r"policy default: smetric@\w+, generation 1", lines[1])
    assert lines[4].split()[:3] == ["instance", "state", "requests"]
    assert [line.split()[:2] for line in lines[5:]] == [["e0", "well"], ["e1", "well"]]
    assert (status.exit_code, state["up"], "history" in state) == (0, 2, False)
    assert f"{row['id']}  {row['instance']}  balance  smetric  turn 0, " in decisions.stdout
    assert "  200 after " in decisions.stdout
    assert policies.stdout.startswith("default: smetric@")
    assert (
        "  parameters  OVERLOAD = 2, HIT_RATIO = 0.5, LOAD = requests, FLOOR = 0\n  generation  1: " in policies.stdout
    )
    assert listed["policies"][0]["policy"] == "smetric"
    assert last.stdout.startswith(f"smetric: route to {row['instance']}\n")


async def test_shadows_are_shown_with_their_agreement_and_refusals_as_shares() -> None:
    async with set_up() as lab:
        lab.set(shadow=(ShadowSettings(policy="lmetric"),))
        async with running(lab) as url:
            await ask(url)
            async with aiohttp.ClientSession() as client, client.post(url + "/v1/embeddings", json={"model": "x"}):
                pass
            async with asyncio.timeout(10):
                while "agrees" not in (status := await shown(lab, "status")).stdout or "no_" not in status.stdout:
                    pass
            policies = await shown(lab, "policies")
    assert re.search(r"\n  in shadow, lmetric agrees on \d+%\n  no_candidate: 50%\n", status.stdout), status.stdout
    assert re.search(r"\ndefault:shadow-1: lmetric@\w+ from \S+, in shadow\n", policies.stdout), policies.output
    assert "\n  parameters  OWN = 1, QUEUED = false\n" in policies.stdout


async def test_decisions_follow_new_ones_until_ctrl_c() -> None:
    async with router() as (lab, url), asyncio.timeout(20):
        address = f"http://127.0.0.1:{lab.settings.admin.port}"
        command = (sys.executable, "-m", "smetric", "decisions", "-f", "--format", "json", "--admin", address)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
        assert process.stdout is not None
        seen = [json.loads(await process.stdout.readline())["id"]]
        for _ in range(2):
            await ask(url)
            seen.append(json.loads(await process.stdout.readline())["id"])
        process.send_signal(signal.SIGINT)
        assert await process.wait() in (130, -signal.SIGINT)
    assert seen == sorted(set(seen))


async def test_status_without_an_instance_ends_with_1() -> None:
    async with router() as (lab, _):
        for instance in ("e0", "e1"):
            await shown(lab, "drain", instance)
        async with asyncio.timeout(10):
            while (await shown(lab, "status")).exit_code == 0:
                pass
        assert (await shown(lab, "status")).exit_code == 1


@pytest.mark.parametrize("command", ["status", "decisions", "policies", "explain --last", "drain a", "try smetric"])
def test_admin_commands_share_address_and_token_of_the_environment(command: str) -> None:
    shared = {"SMETRIC_ADMIN__HOST": "127.0.0.2", "SMETRIC_ADMIN__PORT": "9"}
    result = run(*command.split(), **shared)
    assert (result.exit_code, "http://127.0.0.2:9 does not answer" in result.stderr) == (3, True), result.output
    result = run(*command.split(), SMETRIC_ADMIN__PORT="x")
    assert (result.exit_code, "SMETRIC_ADMIN__PORT: admin.port: expected" in result.stderr) == (2, True), result.output
    help_text = " ".join(run(command.split()[0], "--help").output.split())
    assert "SMETRIC_ADMIN__TOKEN or SMETRIC_ADMIN__TOKEN_FILE" in help_text
    assert "SMETRIC_ADMIN__HOST and SMETRIC_ADMIN__PORT" in help_text


def test_policies_shipped_need_no_router() -> None:
    result = run("policies", "--shipped", "--admin", "http://127.0.0.1:9")
    assert [line.split()[0] for line in result.stdout.splitlines()] == sorted(shipped_policies())
    assert "Join the shortest queue" in result.stdout


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = {
        "/admin/instances": {"instances": [{"id": "gpu-0"}, {"id": "gpu-1"}, {"id": "cpu"}]},
        "/admin/policies": {"policies": [{"name": "default"}, {"name": "coder"}]},
    }
    monkeypatch.setattr(admin, "ask", lambda admin, method, path, **_: (200, documents[path]))


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("drain gpu", ["gpu-0", "gpu-1"]),
        ("rollback c", ["coder"]),
        ("check smetric_b", ["smetric_basic", "smetric_b"]),
        ("serve --policy load", ["load_only", "load"]),
    ],
)
def test_completion_knows_policies_routes_and_instances(words: str, completed: list[str]) -> None:
    environ = {
        "COMP_WORDS": f"smetric {words}",
        "COMP_CWORD": str(len(words.split())),
        "_SMETRIC_COMPLETE": "bash_complete",
    }
    result = CliRunner(env=environ).invoke(main, prog_name="smetric")
    assert [line.partition(",")[2] for line in result.stdout.splitlines()] == completed


def test_table_aligns_columns() -> None:
    assert list(table(("a", "b", "c"), [("long", "x", "1"), ("s", "y", "100")])) == [
        "a     b    c",
        "long  x    1",
        "s     y  100",
    ]

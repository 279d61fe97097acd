"""`smetric demo` and `smetric emulate`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from smetric.cli.lab import demo, emulate
from smetric.errors import ConfigError

pytestmark = pytest.mark.slow


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader]]:
    """Python with *arguments* and its standard output; it must end with 0 and an empty standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            yield process, process.stdout
            errors = await process.stderr.read()
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "8080"), "need --serve"),
        (("--serve", "--policy", "smetric", "--policy", "bailian"), "--serve takes one --policy"),
        (("--sessions", "0"), "--sessions"),
    ],
)
def test_demo_refuses_conflicting_options(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(demo, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_demo_checks_policies_before_it_plays(tmp_path: Path) -> None:
    path = tmp_path / "bad.policy"
    path.write_text("## Bad.\npolicy bad\n\nroute argmin(nosuch)\n")
    result = CliRunner().invoke(demo, ["--policy", "smetric", "--policy", str(path)])
    assert result.exit_code == 1
    assert "nosuch" in result.output
    assert "requests" not in result.stdout


async def test_demo_serve_until_ctrl_c() -> None:
    arguments = ("-m", "smetric", "demo", "--serve", "--port", "0", "--admin-port", "0")
    async with started(*arguments) as (process, output), aiohttp.ClientSession() as client:
        words = (await output.readline()).decode().replace(",", "").split()
        router, admin = [word for word in words if word.startswith("http://127.0.0.1:")]
        body = {"model": "emulated", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        async with client.post(f"{router}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            decision = response.headers["x-smetric-decision-id"]
            assert (await response.json())["usage"]["completion_tokens"] == 4
        async with client.get(f"{admin}/admin/decisions/{decision}") as response:
            assert (await response.json())["policy"].startswith("smetric@")
        process.send_signal(signal.SIGINT)
        printed = await output.read()
    assert f"curl -si {router}/v1/chat/completions" in printed.decode()


TINY = """
import smetric.cli.lab
from smetric.lab.demo.play import Session, Turn

turns = (Turn(300, 4, 0.0), Turn(20, 4, 0.1), Turn(10, 4, 0.1))
smetric.cli.lab._SESSIONS = [Session("tiny", 120, 200, turns)]
smetric.cli.lab.demo(["--sessions", "1", "--policy", "smetric FLOOR=2", "--policy", "load_only"])
"""


async def test_demo_plays_each_policy_and_reports() -> None:
    async with started("-c", TINY) as (_, output):
        text = (await output.read()).decode()
    assert text.count(" 3 requests in ") == 3
    assert "smetric FLOOR=2 again, with LMCache's lookup" in text
    assert "2 of 2" in text
    assert "1. A first request" in text


async def test_emulate_serves_every_instance_until_sigterm() -> None:
    arguments = ("--instances", "2", "--port", "0", "--served-model-name", "a", "--served-model-name", "b", "--lmcache")
    command = ("-c", "from smetric.cli.lab import emulate; emulate()", *arguments)
    async with started(*command) as (process, output), aiohttp.ClientSession() as client:
        for _ in range(2):
            line = (await output.readline()).decode()
            assert line.startswith("emulated vLLM on http://127.0.0.1:")
            async with client.get(line.split()[-1] + "/v1/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["a", "b"]
        line = (await output.readline()).decode()
        assert line.startswith("emulated LMCache on http://127.0.0.1:")
        async with client.get(line.split()[-1] + "/instances") as response:
            assert len((await response.json())["instances"]) == 2
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--blocks", "10", "--max-model-len", "161"),
            "max_model_len is 161, but 10 blocks of 16 tokens hold only 160",
        ),
        (("--time-scale", "0"), "time_scale is 0"),
        (("--instances", "2", "--port", "65535"), "--port 65535 with 2 instances goes beyond 65535"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1:9101: "),
    ],
)
def test_emulate_refuses_impossible_settings(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(emulate, arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)

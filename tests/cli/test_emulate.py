from __future__ import annotations

import asyncio
import signal
import sys

import aiohttp
import pytest
from click.testing import CliRunner

from smetric.cli.lab import emulate
from smetric.errors import ConfigError


async def test_it_says_where_it_listens_serves_every_instance_and_ends_cleanly_on_sigterm() -> None:
    command = "from smetric.cli.lab import emulate; emulate()"
    arguments = ("--instances", "2", "--port", "0", "--served-model-name", "a", "--served-model-name", "b", "--lmcache")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", command, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(20), aiohttp.ClientSession() as client:
            for _ in range(2):
                line = (await process.stdout.readline()).decode()
                assert line.startswith("emulated vLLM on http://127.0.0.1:")
                async with client.get(line.split()[-1] + "/v1/models") as response:
                    assert [model["id"] for model in (await response.json())["data"]] == ["a", "b"]
            line = (await process.stdout.readline()).decode()
            assert line.startswith("emulated LMCache on http://127.0.0.1:")
            async with client.get(line.split()[-1] + "/instances") as response:
                assert len((await response.json())["instances"]) == 2
            process.send_signal(signal.SIGTERM)
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, errors) == (0, b"")


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
def test_what_cannot_be_run_is_a_configuration_error(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(emulate, arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)

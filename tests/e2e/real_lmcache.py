"""LMCache's real coordinator and controller as processes on loopback: started, waited for, frozen, killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.e2e.real_vllm import folder
from tests.ports import free_ports

HERE = Path(__file__).parent
#: Tokens of a chunk, LMCache's default.
CHUNK = 256
#: Without it each process would name chunks otherwise.
SEED = {"PYTHONHASHSEED": "0"}
#: Seconds until a service answers; it takes about 5.
READY_S = 90.0


def set_up() -> None:
    """Install LMCache, unless it is there."""
    subprocess.run([HERE / "setup_lmcache.sh", folder()], check=True)


def command(name: str) -> str:
    """A program of LMCache's environment."""
    return str(folder() / "lmcache/bin" / name)


class RealService:
    """One of the two lookup services; it keeps its ports when it is started again.

    Args:
        mode: coordinator or controller.
        options: more options of its command line.
    """

    def __init__(self, mode: str, *options: str) -> None:
        self.mode = mode
        self.port, self.pull, self.reply, self.heartbeat = free_ports(4)
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def page(self) -> str:
        """Where it lists the instances it knows. The controller's `/controller/workers` is up to 30 s old."""
        return "/instances" if self.mode == "coordinator" else "/controller/key-stats"

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        self._launch()
        deadline = time.monotonic() + READY_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as client:
            while not await self._answers(client):
                assert self._process is not None
                assert self._process.poll() is None, f"the {self.mode} ended; see its log in {folder()}"
                assert time.monotonic() < deadline, f"the {self.mode} is not ready after {READY_S} s"
                await asyncio.sleep(0.2)

    def _launch(self) -> None:
        if self.mode == "coordinator":
            program = [command("lmcache"), "coordinator"]
        else:
            sockets = {name: getattr(self, name) for name in ("pull", "reply", "heartbeat")}
            program = [command("lmcache_controller"), "--monitor-ports", json.dumps(sockets)]
        with (folder() / f"lmcache-{self.mode}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*program, "--host", "127.0.0.1", "--port", str(self.port), *self._options],
                env=os.environ | SEED | {"LMCACHE_TRACK_USAGE": "false"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def _answers(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(self.url + self.page) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def signal(self, number: signal.Signals) -> None:
        """Freeze it (SIGSTOP) or let it go on (SIGCONT)."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@asynccontextmanager
async def service(mode: str, *options: str) -> AsyncIterator[RealService]:
    """A service that answers."""
    one = RealService(mode, *options)
    try:
        await one.start()
        yield one
    finally:
        one.kill()

"""Router as a separate process: start, stop and logs."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tests.fakes import until


@dataclass
class Process:
    """A router that runs, with its addresses."""

    process: asyncio.subprocess.Process
    log: Path
    data: str
    admin: str

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The log lines of *event*."""
        return events(self.log, event)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, within_s: float = 15.0) -> int:
        """The exit code, once it has ended."""
        async with asyncio.timeout(within_s):
            return await self.process.wait()


def events(log: Path, event: str) -> list[dict[str, Any]]:
    """Return the complete lines of *log* with *event*."""
    named = f'"event":"{event}"'.encode()
    whole = log.read_bytes().rpartition(b"\n")[0].splitlines()
    lines = [orjson.loads(line) for line in whole if line.startswith(b"{") and named in line]
    return [line for line in lines if line["event"] == event]


@asynccontextmanager
async def process(
    log: Path,
    *arguments: str,
    sockets: Sequence[tuple[str, socket.socket]] = (),
    before: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    module: str = "smetric",
    policy: str = "load_only",
) -> AsyncIterator[Process]:
    """`smetric serve` with *arguments* once it is ready, killed at the end if it still runs.

    Args:
        log: where its log lines go.
        arguments: of the command.
        sockets: handed over to it, with their names.
        before: a command that runs it.
        environ: variables beside those of the tests.
        module: what is run instead of the command.
        policy: its policy.
    """
    command = [sys.executable, "-m", module, "serve", "--policy", policy, "--port", "0", "--admin-port", "0"]
    line = shlex.join([*before, *command, *arguments])
    names = ":".join(name for name, _ in sockets)
    # A descriptor keeps its number over `pass_fds`, and the first one handed over must be 3.
    moved = " ".join(f"{10 + i}<&{sock.fileno()}" for i, (_, sock) in enumerate(sockets))
    placed = " ".join(f"{3 + i}<&{10 + i} {10 + i}<&-" for i in range(len(sockets)))
    shell = f"exec {moved}; exec {placed}; LISTEN_PID=$$ exec {line}" if sockets else f"exec {line}"
    given = {"LISTEN_FDS": str(len(sockets)), "LISTEN_FDNAMES": names} if sockets else {}
    with log.open("wb") as stderr:
        started = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            shell,
            stderr=stderr,
            pass_fds=[sock.fileno() for _, sock in sockets],
            env={**os.environ, "SMETRIC_LOG__FORMAT": "json", **given, **(environ or {})},
        )
    try:
        await until(lambda: started.returncode is not None or bool(events(log, "smetric.ready")), within_s=20)
        assert started.returncode is None, f"it did not start; see {log}"
        (serving,) = events(log, "smetric.serving")
        yield Process(started, log, serving["data"], serving["admin"])
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()

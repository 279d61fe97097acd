"""Load that a client without a token puts on the admin port: our own server beside Hypercorn.

    python benchmarks/admin_port.py [--json]

The admin app with a token is served by each of the two in a process of its own, which may open 1,024 files and runs
on uvloop. Hypercorn has the guard's limits as far as it has settings for them. Each attack is one client process:

    bodies    30 requests that are refused, each with 4 MiB of a body of 20 MiB
    resets    8 connections with HTTP/2 prior knowledge, on each 900 streams that are opened and reset
    pipeline  one connection with 2,000 requests for `/metrics`, whose answers are not read
    idle      1,500 connections that send nothing

*Tasks*, *files* and *MiB* are the most that the process has within `WAIT_S` of an attack, less what it had before.
*Ping* is the longest answer on another port of the same process in that time, in milliseconds; it shows how long
requests of the data port would wait. *Refused* counts pings that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PORTS = {"ours": (19464, 19465), "hypercorn": (19474, 19475)}
FILES = 1024
WAIT_S = 12.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
#: HPACK: `:method POST`, `:scheme http`, `:path /`, and `:authority x` as a literal.
FIELDS = bytes([0x83, 0x86, 0x84, 0x41, 1]) + b"x"


async def serve_admin(server: str) -> None:
    """Serve the admin port by *server*, and pings; print tasks, files and bytes for each line of stdin."""
    from smetric.app import Application
    from smetric.config.settings import Admin, InstanceSettings, Settings
    from smetric.http.listener import listen, serve_port

    instances = (InstanceSettings(url="http://127.0.0.1:1", id="a"),)
    application = Application(Settings(instances=instances, admin=Admin(token="sixteen characters")), {})
    stop = asyncio.Event()

    def report() -> None:
        if not sys.stdin.readline():
            stop.set()
            return
        files, rss = FILES, 0
        with suppress(OSError):  # no file is left to read with
            files = len(os.listdir("/proc/self/fd"))
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        print("report", len(asyncio.all_tasks()), files, rss, flush=True)

    async def ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    admin, pings = PORTS[server]
    sock = listen("127.0.0.1", admin)
    asyncio.get_running_loop().add_reader(sys.stdin, report)
    await asyncio.start_server(ping, "127.0.0.1", pings)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    if server == "ours":
        await serve_port(application.admin_app(), sock, stop=stop.wait, drain_s=1.0)
        return
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"fd://{sock.detach()}"]
    config.alpn_protocols = ["http/1.1"]
    config.h11_max_incomplete_size = 32 * 1024
    config.keep_alive_timeout = 10
    config.graceful_timeout = 1
    config.errorlog = None
    await serve(application.admin_app(), config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]


def connect(port: int) -> socket.socket:
    """Return a connection whose operations end within five seconds."""
    return socket.create_connection(("127.0.0.1", port), 5.0)


def bodies(port: int) -> list[socket.socket]:
    for _ in range(30):
        with connect(port) as sock, suppress(OSError):
            sock.sendall(b"POST /admin/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 20971520\r\n\r\n" + bytes(4 << 20))
            sock.recv(4096)
    return []


def resets(port: int) -> list[socket.socket]:
    held = []
    for _ in range(8):
        held.append(connect(port))
        frames = [PREFACE]
        for stream in range(1, 1801, 2):
            name = stream.to_bytes(4, "big")
            frames.append(len(FIELDS).to_bytes(3, "big") + b"\x01\x04" + name + FIELDS)
            frames.append(b"\x00\x00\x04\x03\x00" + name + b"\x00\x00\x00\x08")
        with suppress(OSError):
            held[-1].sendall(b"".join(frames))
    return held


def pipeline(port: int) -> list[socket.socket]:
    sock = connect(port)
    with suppress(OSError):
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
    return [sock]


def idle(port: int) -> list[socket.socket]:
    held = []
    for _ in range(1500):
        with suppress(OSError):
            held.append(connect(port))
    return held


ATTACKS: tuple[Callable[[int], list[socket.socket]], ...] = (bodies, resets, pipeline, idle)


class Pings:
    """Pings a port every 20 ms until it ends: the longest answer, and the pings that failed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self.longest_ms = 0.0
        self.refused = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            began = time.monotonic()
            try:
                with connect(self._port) as sock:
                    sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                    if not sock.recv(100):
                        raise ConnectionError
            except OSError:
                self.refused += 1
            self.longest_ms = max(self.longest_ms, 1000 * (time.monotonic() - began))

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


def measure(server: str, attack: Callable[[int], list[socket.socket]]) -> dict[str, float]:
    """Return the figures of *attack* on *server*."""
    admin, pings_port = PORTS[server]
    command = [sys.executable, __file__, "--serve", server]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def report() -> list[int]:
            stdin.write("\n")
            stdin.flush()
            while not (line := stdout.readline()).startswith("report"):
                assert line, "the process has ended"
            return [int(word) for word in line.split()[1:]]

        before = most = report()
        pings = Pings(pings_port)
        ends_at = time.monotonic() + WAIT_S
        held = attack(admin)
        while time.monotonic() < ends_at:
            most = list(map(max, most, report()))
            time.sleep(0.05)
        pings.end()
        for sock in held:
            sock.close()
        stdin.close()
    tasks, files, rss = (high - low for high, low in zip(most, before, strict=True))
    return {
        "tasks": tasks,
        "files": files,
        "MiB": round(rss / 2**20),
        "ping ms": round(pings.longest_ms),
        "refused": pings.refused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--serve", choices=PORTS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.serve:
        import uvloop

        uvloop.run(serve_admin(options.serve))
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    rows = [
        {"attack": attack.__name__, "server": server, **measure(server, attack)}
        for attack in ATTACKS
        for server in PORTS
    ]
    if options.json:
        print(json.dumps(rows))
        return
    print("|", " | ".join(rows[0]), "|\n| --- | --- |", "---: |" * 5)
    for row in rows:
        print("|", " | ".join(map(str, row.values())), "|")


if __name__ == "__main__":
    main()

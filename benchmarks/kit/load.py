"""The two C programs: building them, starting mock instances, and running the load client once."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.process import OTHER_CORE, on_core, running

#: Longest run of the load client, in seconds; it ends itself a little before.
LIMIT_S = 150.0


@dataclass(frozen=True, slots=True)
class Result:
    """What the load client saw of one run; medians in microseconds, -1 where there is none."""

    ok: int
    failed: int
    incomplete: int
    chunks: int
    seconds: float
    request_us: float
    first_chunk_us: float
    chunk_delay_us: float


def build(folder: Path) -> None:
    """Compile both programs into *folder*.

    Raises:
        FileNotFoundError: there is no gcc.
        subprocess.CalledProcessError: they do not compile.
    """
    here = Path(__file__).parent
    for name in ("mock", "load"):
        subprocess.run(["gcc", "-O2", "-o", folder / name, here / f"{name}.c"], check=True)


def run_load(folder: Path, port: int, bodies: Path, *, connections: int, requests: int, stamp: int) -> Result:
    """Send *requests* requests to *port* over *connections* connections; texts differ from those of another *stamp*."""
    with on_core(OTHER_CORE):
        done = subprocess.run(
            [
                *(folder / "load", str(port), bodies),
                *("--connections", str(connections), "--requests", str(requests), "--stamp", str(stamp)),
            ],
            check=True,
            capture_output=True,
            timeout=LIMIT_S,
        )
    return Result(**json.loads(done.stdout))


@contextmanager
def mock_instances(folder: Path, count: int) -> Iterator[list[str]]:
    """Run *count* mock instances; their base URLs."""
    first = free_ports(count)
    ports = range(first, first + count)
    with running("mock", [str(folder / "mock"), str(first), str(count)], folder / "mock.log", core=OTHER_CORE) as mock:
        mock.wait_until(lambda: all(map(listens, ports)), within_s=5.0)
        yield [f"http://127.0.0.1:{port}" for port in ports]


def listens(port: int) -> bool:
    """Whether something accepts connections on *port* of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_ready(port: int) -> bool:
    """Whether the router on *port* says that it is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def free_ports(count: int) -> int:
    """The first of *count* adjacent ports of 127.0.0.1 that are free now.

    Raises:
        OSError: there are none.
    """
    for first in range(21000, 31000, count):
        if not any(map(listens, range(first, first + count))):
            return first
    raise OSError(f"no {count} adjacent free ports between 21000 and 31000")

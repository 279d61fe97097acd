"""CPU per request and per chunk of SMetric beside sglang-router, in one interleaved run over mock instances.

    python -m benchmarks.router [--targets smetric,sglang-rr] [--scenarios small,32k,256k,1m,chunk] [--rounds 4]

How to read what it prints is in README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.kit.bodies import TURNS, Shape, write
from benchmarks.kit.collector import collector
from benchmarks.kit.load import build, mock_instances, run_load
from benchmarks.kit.process import NotReady
from benchmarks.kit.target import TARGETS, Missing, Running

KIB = 1024
INSTANCES = 4
#: Blocks in SMetric's prefix index before anything is measured, and the runs in which they must be reached.
WARM_BLOCKS = 100_000
WARM_RUNS = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load.

    Args:
        shape: the bodies.
        connections: of the load client.
        requests: in one round.
    """

    shape: Shape
    connections: int
    requests: int


SCENARIOS = {
    "small": Scenario(Shape(300, sessions=64), 32, 1536),
    "32k": Scenario(Shape(32 * KIB, sessions=16), 8, 512),
    "256k": Scenario(Shape(256 * KIB, sessions=16), 8, 192),
    "1m": Scenario(Shape(1024 * KIB, sessions=16), 8, 64),
    "chunk": Scenario(Shape(300, sessions=128, chunks=64, interval_ms=20), 100, 300),
    "free": Scenario(Shape(300, sessions=64, chunks=64), 32, 256),
}
WARM = SCENARIOS["1m"]


@dataclass(slots=True)
class Measured:
    """What one router took in one scenario: microseconds of CPU and of waiting for each round, and what went wrong."""

    cpu_us: list[float] = field(default_factory=list)
    request_us: list[float] = field(default_factory=list)
    bad: int = 0


class Load:
    """Drives routers with bodies whose texts come once.

    Args:
        folder: where the load client is, and where bodies are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bodies: dict[Shape, Path] = {}
        self._stamp = 0

    def run(self, router: Running, scenario: Scenario, requests: int, measured: Measured) -> None:
        """Send *requests* requests and add to *measured*."""
        shape = scenario.shape
        if shape not in self._bodies:
            self._bodies[shape] = self._folder / f"bodies-{len(self._bodies)}"
            write(shape, self._bodies[shape])
        before = router.process.cpu_ns()
        seen = run_load(
            self._folder,
            router.port,
            self._bodies[shape],
            connections=scenario.connections,
            requests=requests,
            stamp=self._stamp,
        )
        cpu_us = (router.process.cpu_ns() - before) / 1000
        self._stamp += requests // (shape.sessions * TURNS) + 1
        measured.bad += seen.failed + seen.incomplete
        measured.cpu_us.append(cpu_us / max(1, seen.chunks if shape.chunks else seen.ok))
        measured.request_us.append(seen.request_us)

    def warm(self, smetric: Running) -> int:
        """Fill SMetric's prefix index; returns how many blocks it holds."""
        blocks = 0
        for _ in range(WARM_RUNS):
            self.run(smetric, WARM, 2 * WARM.requests, Measured())
            blocks = index_blocks(smetric)
            if blocks >= WARM_BLOCKS:
                break
        return blocks

    def compare(self, routers: dict[str, Running], scenario: Scenario, rounds: int) -> dict[str, Measured]:
        """Run *scenario* on all routers, A B B A …, after a shorter round that does not count."""
        result = {name: Measured() for name in routers}
        for router in routers.values():
            self.run(router, scenario, max(scenario.connections, scenario.requests // 3), Measured())
        for number in range(rounds):
            for name in list(routers) if number % 2 == 0 else reversed(routers):
                self.run(routers[name], scenario, scenario.requests, result[name])
        return result


def index_blocks(smetric: Running) -> int:
    """Blocks in SMetric's prefix index, from its own metrics, which are at most a second old."""
    with urllib.request.urlopen(f"http://127.0.0.1:{smetric.admin}/metrics", timeout=10) as page:
        found = re.search(r"^smetric_prefix_index_blocks (\S+)", page.read().decode(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def table(name: str, scenario: Scenario, result: dict[str, Measured], base: str) -> list[str]:
    """The rows of one scenario."""
    unit = "chunk" if scenario.shape.chunks else "request"
    rows = []
    for router, measured in result.items():
        cpu = median(measured.cpu_us)
        ratio = f"{cpu / median(result[base].cpu_us):.2f}" if base in result else "-"
        wrong = f"  {measured.bad} BAD ANSWERS" if measured.bad else ""
        rows.append(
            f"{name:9}{router:14}{cpu:9.1f} us/{unit:8}x{ratio:7}"
            f"{min(measured.cpu_us):9.1f} ..{max(measured.cpu_us):9.1f}{median(measured.request_us):12.0f}{wrong}"
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if a router did not start or gave a wrong answer."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kept = Path(tempfile.gettempdir()) / f"smetric-bench-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    failed = False
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir=kept)))
        try:
            build(folder)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            print(f"the load client cannot be built ({error}); install gcc", file=sys.stderr)
            return 1
        instances = stack.enter_context(mock_instances(folder, INSTANCES))
        sink = stack.enter_context(collector())
        routers: dict[str, Running] = {}
        for name in options.targets:
            try:
                routers[name] = stack.enter_context(TARGETS[name](kept, folder, instances, sink))
            except Missing as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
            except NotReady as error:
                print(f"{name} did not start: {error}", file=sys.stderr)
                failed = True
        load = Load(folder)
        if "smetric" in routers:
            print(f"# prefix index: {load.warm(routers['smetric'])} blocks before the first round")
        print(
            f"# {options.rounds} rounds, interleaved; load average {os.getloadavg()[0]:.1f}; x against {options.base}"
        )
        print(f"{'scenario':9}{'router':14}{'CPU, median':>21}{'ratio':>9}{'least .. most':>22}{'wait, us':>14}")
        for name in options.scenarios:
            result = load.compare(routers, SCENARIOS[name], options.rounds)
            failed |= any(measured.bad for measured in result.values())
            for row in table(name, SCENARIOS[name], result, options.base):
                print(row, flush=True)
    return int(failed)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=(__doc__ or "").splitlines()[0])

    def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def some(text: str) -> list[str]:
            names = text.split(",")
            for name in names:
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
            return names

        return some

    default = "small,32k,256k,1m,chunk"
    parser.add_argument("--targets", type=some_of(list(TARGETS)), default="smetric,sglang-rr", help=", ".join(TARGETS))
    parser.add_argument("--scenarios", type=some_of(list(SCENARIOS)), default=default, help=", ".join(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=4, help="rounds that count (default 4)")
    parser.add_argument("--base", choices=TARGETS, default="sglang-rr", help="the router that ratios are against")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""What SMetric costs beside other routers, in one interleaved run over mock instances.

    python -m benchmarks.router [--targets smetric,sglang-rr] [--scenarios small,32k,256k,1m,chunk] [--rounds 4]

How to read what it prints is in README.md. With `--save` it writes what docs/internals/benchmarks.md shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
from benchmarks.kit.installed import Missing
from benchmarks.kit.load import build, mock_instances, run_load
from benchmarks.kit.peak import Peak
from benchmarks.kit.process import NotReady
from benchmarks.kit.target import TARGETS, Running, Site

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
        figure: the column of `Measured` that it is for.
    """

    shape: Shape
    connections: int
    requests: int
    figure: str = "cpu_us"


SCENARIOS = {
    "small": Scenario(Shape(300, sessions=64), 32, 1536),
    "32k": Scenario(Shape(32 * KIB, sessions=16), 8, 512),
    "256k": Scenario(Shape(256 * KIB, sessions=16), 8, 192),
    "1m": Scenario(Shape(1024 * KIB, sessions=16), 8, 64),
    "chunk": Scenario(Shape(300, sessions=128, chunks=64, interval_ms=20), 100, 300),
    "free": Scenario(Shape(300, sessions=64, chunks=64), 32, 256),
    "ttft": Scenario(Shape(300, sessions=16, chunks=8, interval_ms=10), 1, 48, "first_chunk_us"),
    "streams": Scenario(Shape(300, sessions=1000, chunks=16, interval_ms=250), 1000, 1000, "peak_mb"),
}
#: What each column is measured in.
UNITS = {"cpu_us": "us of CPU", "first_chunk_us": "us to wait", "peak_mb": "MB"}
WARM = SCENARIOS["1m"]

#: Medians by scenario, router and column.
Figures = dict[str, dict[str, dict[str, float]]]


@dataclass(slots=True)
class Measured:
    """What one router took in one scenario, a value for each round, and what went wrong.

    Args:
        cpu_us: microseconds of CPU for each request, or for each chunk of a stream; none without a router.
        request_us: microseconds a request took, the median.
        first_chunk_us: microseconds until the first chunk of a stream, the median.
        peak_mb: most memory while it ran, MB.
        bad: answers that were wrong.
    """

    cpu_us: list[float] = field(default_factory=list)
    request_us: list[float] = field(default_factory=list)
    first_chunk_us: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    bad: int = 0

    def values(self, column: str) -> list[float]:
        """A column's values; empty where there was nothing to measure."""
        found: list[float] = getattr(self, column)
        return found


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
        process = router.process
        before = process.cpu_ns() if process else 0
        with Peak(process) as peak:
            seen = run_load(
                self._folder,
                router.port,
                self._bodies[shape],
                connections=scenario.connections,
                requests=requests,
                stamp=self._stamp,
            )
        self._stamp += requests // (shape.sessions * TURNS) + 1
        measured.bad += seen.failed + seen.incomplete
        measured.request_us.append(seen.request_us)
        if shape.chunks:
            measured.first_chunk_us.append(seen.first_chunk_us)
        if process:
            cpu_us = (process.cpu_ns() - before) / 1000
            measured.cpu_us.append(cpu_us / max(1, seen.chunks if shape.chunks else seen.ok))
            measured.peak_mb.append(peak.bytes / 1e6)

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
    unit = UNITS[scenario.figure]
    if scenario.figure == "cpu_us":
        unit += " a chunk" if scenario.shape.chunks else " a request"
    of_base = result[base].values(scenario.figure) if base in result else []
    rows = []
    for router, measured in result.items():
        values = measured.values(scenario.figure)
        wrong = f"  {measured.bad} BAD ANSWERS" if measured.bad else ""
        if not values:
            rows.append(f"{name:9}{router:18}{'-':>9}{wrong}")
            continue
        ratio = f"x{median(values) / median(of_base):.2f}" if of_base else "-"
        rows.append(
            f"{name:9}{router:18}{median(values):9.1f} {unit:20}{ratio:7}"
            f"{min(values):9.1f} ..{max(values):9.1f}{median(measured.request_us):12.0f}{wrong}"
        )
    return rows


def figures(result: dict[str, dict[str, Measured]]) -> Figures:
    """The medians, by scenario, router and column."""
    columns = ("cpu_us", "first_chunk_us", "peak_mb")
    return {
        scenario: {
            router: {name: round(median(values), 1) for name in columns if (values := measured.values(name))}
            for router, measured in by_router.items()
        }
        for scenario, by_router in result.items()
    }


def save(path: Path, found: Figures, about: dict[str, str], rounds: int) -> None:
    """Write what was *found* in *rounds* to *path*; scenarios in it that were not run stay, if measured alike."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    alike = kept if kept.get("about") == about else {}
    whole = {
        "about": about,
        "rounds": alike.get("rounds", {}) | dict.fromkeys(found, rounds),
        "figures": alike.get("figures", {}) | found,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")


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
        site = Site(kept, folder, instances, sink)
        routers: dict[str, Running] = {}
        for name in options.targets:
            try:
                routers[name] = stack.enter_context(TARGETS[name](site))
            except Missing as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
            except NotReady as error:
                print(f"{name} did not start: {error}", file=sys.stderr)
                failed = True
        load = Load(folder)
        for name in ("smetric", "smetric-other"):
            if name in routers:
                print(f"# prefix index of {name}: {load.warm(routers[name])} blocks before the first round")
        print(
            f"# {options.rounds} rounds, interleaved; load average {os.getloadavg()[0]:.1f}; x against {options.base}"
        )
        print(f"{'scenario':9}{'router':18}{'median':>9}{'ratio':>28}{'least .. most':>22}{'request, us':>14}")
        results: dict[str, dict[str, Measured]] = {}
        for name in options.scenarios:
            result = results[name] = load.compare(routers, SCENARIOS[name], options.rounds)
            failed |= any(measured.bad for measured in result.values())
            for row in table(name, SCENARIOS[name], result, options.base):
                print(row, flush=True)
    if options.save:
        about = {"python": platform.python_version(), "base": options.base}
        save(options.save, figures(results), about, options.rounds)
    return int(failed)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router", description=(__doc__ or "").splitlines()[0])

    def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def some(text: str) -> list[str]:
            names = list(known) if text == "all" else text.split(",")
            for name in names:
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
            return names

        return some

    default = "small,32k,256k,1m,chunk"
    targets, everything = "smetric,sglang-rr", ", ".join(TARGETS)
    parser.add_argument("--targets", type=some_of(list(TARGETS)), default=targets, help=f"{everything}; or `all`")
    parser.add_argument(
        "--scenarios", type=some_of(list(SCENARIOS)), default=default, help=f"{', '.join(SCENARIOS)}; or `all`"
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds that count (default 4)")
    parser.add_argument("--save", type=Path, help="JSON file for the medians; those of other scenarios stay")
    parser.add_argument("--base", choices=TARGETS, default="sglang-rr", help="the router that ratios are against")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

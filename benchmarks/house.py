"""Size of the package, what `smetric serve` loads of it, and how many modules one request goes through.

    python benchmarks/house.py [--turns 7] [--tree CHECKOUT] [--json] [--write]

`--write` puts the figures beside their targets into docs/internals/architecture.md, between `<!-- house:begin -->`
and `<!-- house:end -->`. `--tree` measures another checkout, with the Python of its `.venv` if it has one; figures of
two checkouts are comparable.

**Size** counts the .py files of `smetric/` and their lines, blank ones included, without the laboratory: `lab/`, and
`sim/`, `emulator/` and `demo/` where a checkout has these still.

**Loaded** counts the files of smetric in `sys.modules` of a router process with default settings, after requests.

**A request** is the second turn of a session, streamed over a connection that is kept, while nothing else is sent.
Its answer has five chunks and `[DONE]`, each in a packet of its own. The router runs under `sys.setprofile`, which
sees each call and each resumption of a coroutine in the thread of the event loop. *Enters* counts the modules whose
code is called. *Moves* counts pairs of consecutive calls of smetric code that lie in different modules. Returns,
other packages and generated code (policies, methods of dataclasses) do not count. A request starts when its bytes
arrive and ends `SETTLE_S` after the last byte of its answer: its lease is released, its metrics are counted and its
spans end right after that byte.

Background work does not count: scrapes, probes, timers. `QUIET_S` without any request show which callbacks and
coroutines the event loop calls anyway; all calls below those are dropped. The median of several turns is printed,
with the least and the most.

**With traces** is the same with an OTLP collector and every trace recorded, as the default is.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

from benchmarks.kit import probe
from benchmarks.kit.collector import collector, serving
from benchmarks.kit.load import free_ports, is_ready
from benchmarks.kit.process import Process, running

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals" / "architecture.md"
BEGIN, END = "<!-- house:begin -->", "<!-- house:end -->"
LABORATORY = ("lab", "sim", "emulator", "demo")
#: Seconds between two chunks of an answer.
CHUNK_S = 0.01
#: Seconds after an answer that still belong to its request; the access log is written in batches after 50 ms.
SETTLE_S = 0.025
#: Seconds without a request that show the background work; most of it repeats each second.
QUIET_S = 2.5
#: Words of a first message: enough for several blocks of a KV cache.
WORDS = 2000
CHUNKS = 5


@dataclass(frozen=True, slots=True)
class Size:
    """Number of modules and of their lines."""

    modules: int
    lines: int


@dataclass(frozen=True, slots=True)
class RequestPath:
    """Modules that a request enters and moves between them: the median turn, and the least and the most of all turns.

    Args:
        enters: modules.
        moves: from one module to another.
        enters_range: least and most.
        moves_range: least and most.
        modules: those of the median turn, in order of entry.
        background: roots of the calls that were dropped.
    """

    enters: int
    moves: int
    enters_range: tuple[int, int]
    moves_range: tuple[int, int]
    modules: tuple[str, ...]
    background: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class House:
    """All figures of one checkout; None for what was not measured."""

    package: Size
    loaded: Size | None = None
    request: RequestPath | None = None
    traced: RequestPath | None = None

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Name, figure and target of each figure."""
        yield "modules in `smetric/` without the laboratory", self.package.modules, 180
        yield "lines in them", self.package.lines, 37_000
        if self.loaded is not None:
            yield "modules that `smetric serve` loads with default settings", self.loaded.modules, 130
            yield "lines in them", self.loaded.lines, 28_000
        if self.request is not None:
            yield "modules that a warm streaming request enters", self.request.enters, 45
            yield "moves between them", self.request.moves, 160
        if self.traced is not None:
            yield "modules that it enters with traces exported", self.traced.enters, 60
            yield "moves between them", self.traced.moves, 250


def size(files: Sequence[Path]) -> Size:
    """Count *files* and their lines."""
    return Size(len(files), sum(len(file.read_text().splitlines()) for file in files))


def package_size(tree: Path) -> Size:
    """Count the package of *tree* without the laboratory."""
    package = tree / "smetric"
    return size([file for file in package.rglob("*.py") if file.relative_to(package).parts[0] not in LABORATORY])


class _Instance(BaseHTTPRequestHandler):
    """Fake vLLM instance: an idle metrics page for each GET, a stream for each POST."""

    protocol_version = "HTTP/1.1"
    page = b'vllm:num_requests_running{model_name="m"} 0\nvllm:num_requests_waiting{model_name="m"} 0\n'

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        event = json.dumps({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "w"}}]})
        for _ in range(CHUNKS):
            time.sleep(CHUNK_S)
            self.wfile.write(_chunk(f"data: {event}\n\n".encode()))
        time.sleep(CHUNK_S)
        self.wfile.write(_chunk(b"data: [DONE]\n\n") + _chunk(b""))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class ProbedRouter:
    """A router process under `kit/probe.py`, and one connection to it."""

    def __init__(self, process: Process, port: int, report: Path) -> None:
        self._process = process
        self._report = report
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def ask(self, messages: Sequence[dict[str, str]]) -> None:
        """Send a streaming chat request and read its answer."""
        body = json.dumps({"model": "m", "stream": True, "messages": messages})
        self._connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200 or not data.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"the router answered {answer.status}: {data[-500:]!r}")

    def start(self) -> None:
        """Start a recording."""
        self._report.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.02)  # until the handler has run

    def stop(self) -> dict[str, Any]:
        """End the recording and return its report."""
        self._process.send_signal(signal.SIGUSR2)
        self._process.wait_until(self._report.exists, within_s=20, every_s=0.01)
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@contextmanager
def probed_router(tree: Path, collector_url: str = "") -> Iterator[ProbedRouter]:
    """Run the router of *tree* with default settings and one fake instance."""
    python = tree / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="smetric-house-") as name, serving(_Instance) as instance:
        folder = Path(name)
        port, report = free_ports(2), folder / "report.json"
        command = [str(python if python.exists() else sys.executable), probe.__file__, str(tree), str(report)]
        command += [collector_url, "serve", "--instance", instance, "--port", str(port), "--admin-port", str(port + 1)]
        with running("smetric", command, folder / "smetric.log") as process:
            process.wait_until(lambda: is_ready(port), within_s=60, every_s=0.05)
            router = ProbedRouter(process, port, report)
            try:
                yield router
            finally:
                router.close()


def measure_request(router: ProbedRouter, turns: int, quiet_s: float) -> tuple[RequestPath, list[str]]:
    """The path of the second turns of *turns* sessions, and the files that the process has loaded."""
    _second_turn(router, "warm-up")
    time.sleep(0.2)  # the work of the warm-up ends
    router.start()
    time.sleep(quiet_s)
    background = {root for _, root, _ in router.stop()["calls"]}
    paths: list[list[str]] = []
    for number in range(turns):
        ended, report = _second_turn(router, f"session {number}")
        calls = report["calls"]
        paths.append([file for at, root, file in calls if at <= ended + SETTLE_S * 1e9 and root not in background])
    moves = [sum(one != other for one, other in pairwise(path)) for path in paths]
    enters = [len(set(path)) for path in paths]
    median = paths[moves.index(median_low(moves))]
    path = RequestPath(
        enters=median_low(enters),
        moves=median_low(moves),
        enters_range=(min(enters), max(enters)),
        moves_range=(min(moves), max(moves)),
        modules=tuple(dict.fromkeys(median)),
        background=tuple(sorted(background)),
    )
    return path, report["modules"]


def _second_turn(router: ProbedRouter, session: str) -> tuple[int, dict[str, Any]]:
    """Send two turns of *session*; when the second one ended, and the report on it."""
    messages = [{"role": "user", "content": f"{session} {'word ' * WORDS}"}]
    router.ask(messages)
    messages += [{"role": "assistant", "content": "w" * CHUNKS}, {"role": "user", "content": "And then?"}]
    time.sleep(0.2)  # the work of the first turn ends
    router.start()
    router.ask(messages)
    ended = time.monotonic_ns()
    time.sleep(SETTLE_S)
    return ended, router.stop()


def measure(tree: Path, turns: int, quiet_s: float = QUIET_S, traced: bool = True) -> House:
    """Measure *tree*; without the part with traces unless *traced*."""
    with probed_router(tree) as router:
        request, modules = measure_request(router, turns, quiet_s)
    exported = None
    if traced:
        with collector() as url, probed_router(tree, url) as router:
            exported, _ = measure_request(router, turns, quiet_s)
    return House(package_size(tree), size([tree / module for module in modules]), request, exported)


def table(house: House) -> str:
    """The figures beside their targets, as a table of Markdown."""
    lines = ["| | now | target |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {figure:,} | ≤ {target:,} |" for name, figure, target in house.rows()]
    return "\n".join(lines) + "\n"


def write(house: House, page: Path = PAGE) -> None:
    """Write the table between the markers of *page*.

    Raises:
        SystemExit: there is no such page, or it lacks the markers.
    """
    text = page.read_text() if page.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page}: no place for the figures: it needs the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{table(house)}\n{END}{after}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=7, help="requests that are recorded (default 7)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON, with the modules that are entered")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    house = measure(options.tree.resolve(), options.turns)
    if options.json:
        print(json.dumps(asdict(house), indent=1))
    else:
        for name, figure, target in house.rows():
            print(f"{name:60} {figure:7,}   (target {target:,})")
        for name, path in (("without traces", house.request), ("with traces", house.traced)):
            if path is not None:
                spread = [f"{least}-{most}" for least, most in (path.enters_range, path.moves_range)]
                print(f"{options.turns} requests {name}: {spread[0]} modules, {spread[1]} moves")
    if options.write:
        write(house)
    return 0


if __name__ == "__main__":
    sys.exit(main())

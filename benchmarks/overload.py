"""More than an engine can serve: what is served, how soon the rest is refused, and when service is as before.

    python benchmarks/overload.py [--seconds 5] [--times 1,2,5] [--in-flight 32]

An engine in this process serves `--in-flight` requests at a time, each in a quarter of a second; SMetric runs on
another core with `overload.in_flight` at that number. Requests come at a fixed pace, whether or not those before were
answered. What is served counts from the first second on.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import cast

import uvloop

from benchmarks.kit.load import free_ports, is_ready
from benchmarks.kit.process import OTHER_CORE, on_core, running

SERVICE_S = 0.25
#: Seconds at the beginning of a load that do not count.
RAMP_S = 1.0
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)
ANSWER = b'{"choices":[{"message":{"role":"assistant","content":"hi"}}]}'
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
MODELS = b'{"object":"list","data":[{"id":"m"}]}'
METRICS = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"


class Engine(asyncio.Protocol):
    """One connection to the engine: answers one request after the other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """A request, or a piece of one."""
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end or (head.startswith(b"POST") and len(body) < len(BODY)):
            return
        self._data = b""
        if head.startswith(b"POST"):
            asyncio.get_running_loop().call_later(SERVICE_S, self._write, OK)
        else:
            page = METRICS if b"/metrics" in head else MODELS
            self._write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


@dataclass
class Tally:
    """What became of the requests of one run: seconds until each answer, by status."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    served_at: list[float] = field(default_factory=list)
    without_retry_after: int = 0

    def goodput(self, since: float, until: float) -> float:
        """Answers 200 a second between two times of the loop's clock."""
        return sum(since <= at < until for at in self.served_at) / (until - since)

    def refused_s(self) -> list[float]:
        """The times of those refused with 429 or 503."""
        return [seconds for status in (429, 503) for seconds in self.seconds.get(status, ())]


class Clients:
    """Connections that are used again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, tally: Tally) -> None:
        """One request."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = head.lower()
        await reader.readexactly(int(fields.partition(b"content-length:")[2].split(b"\r\n")[0]))
        status = int(head.split(b" ", 2)[1])
        now = loop.time()
        tally.seconds.setdefault(status, []).append(now - began)
        if status == 200:
            tally.served_at.append(now)
        tally.without_retry_after += status in (429, 503) and b"\r\nretry-after:" not in fields
        if b"connection: close" in fields:
            writer.close()
        else:
            self._idle.append((reader, writer))

    async def closed_loop(self, count: int, seconds: float) -> Tally:
        """*count* clients that each ask again as soon as they are answered."""
        loop, tally = asyncio.get_running_loop(), Tally()
        end = loop.time() + seconds

        async def one() -> None:
            while loop.time() < end:
                await self.ask(tally)

        await asyncio.gather(*(one() for _ in range(count)))
        return tally

    async def open_loop(self, per_second: float, seconds: float) -> Tally:
        """Requests at a fixed pace."""
        loop, tally = asyncio.get_running_loop(), Tally()
        began = loop.time()
        tasks: list[asyncio.Task[None]] = []
        while (now := loop.time() - began) < seconds:
            while len(tasks) < now * per_second:
                tasks.append(asyncio.create_task(self.ask(tally)))
            await asyncio.sleep(0.002)
        await asyncio.gather(*tasks)
        return tally

    def close(self) -> None:
        """Close them."""
        for _, writer in self._idle:
            writer.close()


async def recovery_s(clients: Clients) -> float:
    """Seconds until a single request is answered as it is by an idle engine."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        tally = Tally()
        await clients.ask(tally)
        if tally.seconds.get(200, [1.0])[0] < 1.5 * SERVICE_S:
            return loop.time() - began


async def measure(port: int, in_flight: int, times: Sequence[float], seconds: float) -> bool:
    """Print a row for each load; whether every refusal said when to come back."""
    clients = Clients(port)
    await clients.closed_loop(in_flight, 1.0)
    clock = asyncio.get_running_loop().time
    began = clock()
    peak = (await clients.closed_loop(in_flight, seconds)).goodput(began + RAMP_S, began + seconds)
    print(f"peak {peak:.0f} requests a second (at best {in_flight / SERVICE_S:.0f})")
    print("offered   served   of peak   refused   median ms    p99 ms   served p50 ms   as before after s")
    is_fine = True
    for factor in times:
        began = clock()
        tally = await clients.open_loop(factor * peak, seconds)
        again_s = await recovery_s(clients)
        refused = tally.refused_s()
        middle, late = (median(refused), quantiles(refused, n=100)[98]) if len(refused) > 1 else (0.0, 0.0)
        goodput = tally.goodput(began + RAMP_S, began + seconds)
        print(
            f"{factor:6g}x {goodput:8.0f} {goodput / peak:8.0%} {len(refused):10} {1000 * middle:11.1f} "
            f"{1000 * late:9.1f} {1000 * median(tally.seconds[200]):15.1f} {again_s:19.2f}"
        )
        is_fine = is_fine and tally.without_retry_after == 0 and tally.seconds.keys() <= {200, 429, 503}
    clients.close()
    return is_fine


async def run(folder: Path, in_flight: int, times: Sequence[float], seconds: float) -> bool:
    """Start an engine and a router, and measure."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    engine, port = server.sockets[0].getsockname()[1], free_ports(2)
    command = [str(Path(sys.executable).with_name("smetric")), "serve", "--policy", "smetric"]
    command += ["--port", str(port), "--admin-port", str(port + 1), "--instance", f"http://127.0.0.1:{engine}"]
    environ = {"SMETRIC_OVERLOAD__IN_FLIGHT": str(in_flight), "SMETRIC_OVERLOAD__WAIT": "500ms"}
    try:
        with running("smetric", command, folder / "smetric.log", environ=environ) as router:
            await asyncio.to_thread(router.wait_until, lambda: is_ready(port), within_s=30.0)
            return await measure(port, in_flight, times, seconds)
    finally:
        server.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load (default 5, above 1)")
    parser.add_argument("--times", default="1,2,5", help="loads, in times of the peak (default 1,2,5)")
    parser.add_argument("--in-flight", type=int, default=32, help="requests the engine serves at once (default 32)")
    given = parser.parse_args(arguments)
    if given.seconds <= RAMP_S:
        parser.error(f"--seconds {given.seconds:g}: the first second does not count, so it takes more than one")
    times = [float(text) for text in given.times.split(",")]
    with (
        tempfile.TemporaryDirectory(prefix="smetric-bench-") as name,
        on_core(OTHER_CORE),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        is_fine = runner.run(run(Path(name), given.in_flight, times, given.seconds))
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())

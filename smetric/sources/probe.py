"""Asks each instance for `/health`, on a connection of its own, and tells its health what came of it.

How probes are judged is in `smetric.fleet.health`. Each instance has its own loop, so one that hangs delays no other.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import cache, partial
from urllib.parse import urlsplit

import structlog

from smetric.config.address import port_of
from smetric.fleet.health import Health
from smetric.fleet.instance import Instance
from smetric.fleet.own_fault import is_own_fault
from smetric.sources.addresses import Addresses, Resolve, resolve
from smetric.sources.pace import next_turn
from smetric.telemetry.log_limit import LogLimit

#: Longest first line of an answer, bytes.
MAX_BYTES = 8 * 1024
#: Seconds by which a probe's time-out may be noticed too late.
LATE_S = 0.5

log = structlog.get_logger("smetric.sources.probe")


class _Target:
    """Where one instance is."""

    def __init__(self, url: str, resolve: Resolve) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "the configuration takes only addresses with a host"
        self.host = parts.hostname
        self.is_tls = parts.scheme == "https"
        self.port = port_of(parts)
        self.authority = parts.netloc
        self.addresses = Addresses(self.host, self.port, resolve)


class Prober:
    """Probes instances from `start` to `stop`.

    A new connection for each probe proves that the instance still takes some, and costs a tenth of a client library.
    An answer below 500 is a good one: whoever says 401 or 404 is there.

    Args:
        instances: those to probe.
        health: told how each probe ended.
        interval_s: seconds between two probes of one instance.
        timeout_s: seconds one may take, connecting included.
        resolve: how names are looked up.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        health: Health,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 1.0,
        resolve: Resolve = resolve,
    ) -> None:
        self._targets = {instance: _Target(instance.url, resolve) for instance in instances}
        self._health = health
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        # Made for the first instance that needs it: reading the system's authorities takes 20 ms.
        self._tls = cache(ssl.create_default_context)
        self._log_limit = LogLimit()
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin one loop for each instance."""
        self._loops = [
            asyncio.create_task(self._probe_for_ever(instance, self._interval_s * number / len(self._targets)))
            for number, instance in enumerate(self._targets)
        ]

    async def stop(self) -> None:
        """End the loops."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        for target in self._targets.values():
            target.addresses.close()

    async def _probe_for_ever(self, instance: Instance, offset_s: float) -> None:
        clock = asyncio.get_running_loop().time
        due = clock() + offset_s
        while True:
            await asyncio.sleep(due - clock())
            try:
                await self.probe(instance)
                self._health.settle()
            except Exception:
                # A fault of ours must not blind the router to this instance for good.
                if (kept_back := self._log_limit.passes(instance.id)) is not None:
                    log.exception("smetric.probe.crashed", instance=instance.id, kept_back=kept_back)
            due = next_turn(due, self._interval_s, clock())

    async def probe(self, instance: Instance) -> None:
        """Probe *instance* once."""
        ok, refused, target = False, False, self._targets[instance]
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    reader, writer = await target.addresses.connect(partial(self._connect, target), self._timeout_s)
                except TimeoutError:
                    raise
                except OSError as error:
                    if is_own_fault(error):
                        return  # nothing was learnt
                    refused = True
                else:
                    ok = 100 <= await _ask(reader, writer, target.authority) < 500
        except TimeoutError:  # late is not good, but somebody may be there
            if clock() - began > self._timeout_s + LATE_S:
                return  # this process was late itself, suspended or busy: nothing was learnt
        self._health.probed(instance, ok=ok, refused=refused)

    async def _connect(self, target: _Target, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls, name = (self._tls(), target.host) if target.is_tls else (None, None)
        return await asyncio.open_connection(address, target.port, ssl=tls, server_hostname=name, limit=MAX_BYTES)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> int:
    """The status of `GET /health`; 0 when what came was not HTTP, or nothing. Closes the connection."""
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii"))
        line = await reader.readuntil(b"\r\n")
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return 0
    finally:
        writer.transport.abort()  # a polite end could take as long as the instance likes
    words = line.split(maxsplit=2)
    is_http = len(words) >= 2 and words[0].startswith(b"HTTP/1.") and words[1].isdigit() and len(words[1]) == 3
    return int(words[1]) if is_http else 0

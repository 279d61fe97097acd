"""HTTP client for the router's own requests: sessions, bounded bodies, circuit breaker.

Requests of clients go through `smetric.http.upstream`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from smetric.http.addresses import Addresses, Resolve


class _Resolver(AbstractResolver):
    """Resolver with the addresses that requests of clients use. Names come from the configuration, so they are few."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._addresses: dict[tuple[str, int], Addresses] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of *host*, best first.

        Raises:
            OSError: there are none.
        """
        addresses = self._addresses.get((host, port))
        if addresses is None:
            addresses = self._addresses[host, port] = Addresses(host, port, self._resolve)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await addresses.find()
        ]

    async def close(self) -> None:
        """Cancel look-ups that are running."""
        for addresses in self._addresses.values():
            addresses.close()


class PlainSession:
    """Session without cookies, environment proxies and compression. Create it within the loop that uses it.

    Args:
        resolve: how names are looked up.
        timeout_s: seconds an exchange may take, connecting included; None for no bound.
        most_to_one: connections to one host; 0 for no bound.
        headers: added to every request.
    """

    def __init__(
        self,
        resolve: Resolve,
        *,
        timeout_s: float | None,
        most_to_one: int = 0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._resolver = _Resolver(resolve)
        self.http = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(
                limit=0,
                limit_per_host=most_to_one,
                # Servers on uvicorn close idle connections after 5 s, and a POST on a closed one is lost.
                keepalive_timeout=3,
                resolver=self._resolver,
                use_dns_cache=False,
            ),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the connections, and cancel look-ups that are running."""
        await self.http.close()
        await self._resolver.close()


def is_plain(response: aiohttp.ClientResponse) -> bool:
    """Return whether the body of *response* is not compressed."""
    return response.headers.get("Content-Encoding", "identity").lower() == "identity"


async def read_within(response: aiohttp.ClientResponse, most: int) -> bytearray | None:
    """Return the body of *response*; None if it exceeds *most* bytes. Reading stops there."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most:
            return None
    return body


class Breaker:
    """Circuit breaker: after some failures in a row a service is not asked for a while, then tried with one request.

    Closed, it allows every request. *failures* in a row open it for *open_s* seconds. Then it allows one request at a
    time, until one succeeds, which closes it, or fails, which opens it again. The caller decides what a failure is, and
    reports each allowed request to exactly one of `succeeded`, `failed` and `abandoned`.

    Args:
        failures: failures in a row that open it; at least 1.
        open_s: seconds it stays open.
        clock: monotonic seconds.
    """

    def __init__(self, failures: int, open_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the service counts as failing. A single request may be allowed nevertheless."""
        return self._opened_at is not None

    def allows(self) -> bool:
        """Return whether a request may be sent now."""
        if self._opened_at is None:
            return True
        if self._probing or self._clock() < self._opened_at + self._open_s:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """Note that a request was answered well."""
        self._failures = 0
        self._opened_at = None
        self._probing = False

    def failed(self) -> None:
        """Note that a request got no valid answer in time."""
        self._failures += 1
        # Requests in flight when it opened fail late; that must not delay the next try.
        if self._probing or (self._opened_at is None and self._failures >= self._most):
            self._opened_at = self._clock()
        self._probing = False

    def abandoned(self) -> None:
        """Note that a request ended for reasons that say nothing about the service."""
        self._probing = False

"""HTTP client for the router's own requests: sessions, bounded bodies, circuit breaker."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from smetric.http.addresses import Addresses, Resolve

# HTTP sessions for what is no request of a client: scrapes, token ids, look-ups, what sidecars tell each other.
#
# Requests of clients go over `smetric.proxy.upstream`.


class _Resolver(AbstractResolver):
    """Names lead where they do for requests; those of the configuration, so that there are only so many."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._addresses: dict[tuple[str, int], Addresses] = {}

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of *host*, best first.

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
        """Give up look-ups that are running."""
        for addresses in self._addresses.values():
            addresses.close()


class PlainSession:
    """A session without cookies, proxies of the environment and compression. Made within the loop that uses it.

    Args:
        resolve: how names are looked up.
        timeout_s: seconds an exchange may take, connecting included; None for any time.
        most_to_one: connections to one host; 0 for any number.
        headers: of every request.
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
                # Servers on uvicorn close idle connections after 5 s; a POST on a closed one is lost.
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
        """Close the connections, and give up look-ups that are running."""
        await self.http.close()
        await self._resolver.close()


# The bodies of answers to what the router itself asks: as they are, and no longer than they may be.


def is_plain(response: aiohttp.ClientResponse) -> bool:
    """Whether the body of *response* is as it is, not compressed."""
    return response.headers.get("Content-Encoding", "identity").lower() == "identity"


async def read_within(response: aiohttp.ClientResponse, most: int) -> bytearray | None:
    """The body of *response*; None if it has more than *most* bytes, of which no more are read."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most:
            return None
    return body


# A circuit breaker: after some failures in a row a service is left alone for a while, then tried with one request.
#
# What counts as a failure is the caller's business.


class Breaker:
    """Says whether a service may be asked, from how it answered before.

    Closed, it lets everything through. *failures* in a row open it for *open_s* seconds; then it lets one request
    through at a time, until one succeeds (closed) or fails (open again).

    Args:
        failures: in a row, that open it; at least 1.
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
        """Whether the service counts as failing; a single request may be let through nevertheless."""
        return self._opened_at is not None

    def allows(self) -> bool:
        """Whether a request may be sent now. Whoever is told so reports its end to exactly one of the methods below."""
        if self._opened_at is None:
            return True
        if self._probing or self._clock() < self._opened_at + self._open_s:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """A request was answered well."""
        self._failures = 0
        self._opened_at = None
        self._probing = False

    def failed(self) -> None:
        """A request was not answered, too late, or with nonsense."""
        self._failures += 1
        # What was under way when it opened fails late; that must not hold the next try back for ever.
        if self._probing or (self._opened_at is None and self._failures >= self._most):
            self._opened_at = self._clock()
        self._probing = False

    def abandoned(self) -> None:
        """A request ended for reasons that say nothing of the service."""
        self._probing = False

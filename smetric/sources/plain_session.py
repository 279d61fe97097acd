"""HTTP sessions for what is no request of a client: scrapes, token ids, look-ups, what sidecars tell each other.

Requests of clients go over `smetric.proxy.upstream`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from smetric.sources.addresses import Addresses, Resolve


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

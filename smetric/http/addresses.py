"""Addresses of a host name: resolved anew every few seconds, kept while the resolver fails, tried in turn."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from urllib.parse import SplitResult

import structlog

from smetric.log_limit import LogLimit

log = structlog.get_logger("smetric.addresses")

#: Seconds an answer of the resolver is used, and how long a new one is waited for while there is an old one.
TTL_S = 10.0
PATIENCE_S = 0.25
#: Addresses of a name that are tried.
MAX_ADDRESSES = 8
#: Errors that say nothing of the other side.
_LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
_Connection = TypeVar("_Connection")


def is_own_fault(error: OSError) -> bool:
    """Return whether a connect error was caused by local resource exhaustion: no file, memory or port left."""
    return error.errno in _LOCAL_ERRORS


def _is_elsewhere(error: OSError) -> bool:
    """Return whether a connect error has another cause than a wrong address."""
    return isinstance(error, ssl.SSLError) or is_own_fault(error)


def port_of(parts: SplitResult) -> int:
    """Return the port of a split URL; the default of its scheme if it names none."""
    return parts.port or (443 if parts.scheme == "https" else 80)


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of *host* by the system's resolver.

    Raises:
        OSError: there are none, or the resolver fails.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError("not a host name") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def resolve_unless(unfit: Callable[[str], str]) -> Resolve:
    """Return `resolve` without unfit addresses, so that a host name that changes cannot lead there.

    Args:
        unfit: returns the reason why an address is no place for an instance, or an empty text.
    """
    limit = LogLimit()

    async def guarded(host: str, port: int) -> Sequence[str]:
        found = await resolve(host, port)
        fit = [address for address in found if not unfit(address)]
        if found and not fit:
            if (kept_back := limit.passes(host)) is not None:
                log.warning("smetric.instance.odd_address", host=host, reason=unfit(found[0]), kept_back=kept_back)
            raise OSError("the host name leads to addresses that are no place for an instance")
        return fit

    return guarded


class Addresses:
    """The addresses of one host.

    Args:
        host: name or IP address.
        port: passed to the resolver.
        resolve: the resolver.
    """

    def __init__(self, host: str, port: int, resolve: Resolve = resolve) -> None:
        self._host = host
        self._port = port
        self._resolve = resolve
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._patient_until = 0.0
        #: The address that accepted a connection last.
        self._preferred = ""
        try:
            ipaddress.ip_address(host)
        except ValueError:
            self._is_number = False
        else:
            self._is_number = True
        self._known: Sequence[str] = (host,) if self._is_number else ()

    async def find(self) -> Sequence[str]:
        """Return the addresses, the preferred one first; at least one.

        Raises:
            OSError: the name could not be resolved, now or before.
        """
        if self._is_number:
            return self._known
        loop = asyncio.get_running_loop()
        if not self._known or loop.time() - self._looked_at >= TTL_S:
            # One look-up serves all callers, and goes on if all of them are cancelled.
            if self._looking is None:
                self._looking = loop.create_task(self._look_up(), name=f"look up {self._host}")
                self._patient_until = loop.time() + PATIENCE_S
            patience_s = self._patient_until - loop.time()
            if patience_s > 0 or not self._known:
                await asyncio.wait({self._looking}, timeout=patience_s if self._known else None)
        if not self._known:
            raise OSError("the host name cannot be resolved")
        return self._known

    async def connect(self, to: Callable[[str], Awaitable[_Connection]], within_s: float) -> _Connection:
        """Return the connection that *to* makes to the first address that accepts one, within *within_s* seconds.

        If all addresses of an earlier look-up fail, the name is resolved again, and new addresses are tried too.

        Raises:
            OSError: none accepts, or the name could not be resolved; TimeoutError is one.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline, is_old = began + within_s, True
        try:
            async with asyncio.timeout(within_s):
                addresses = list(await self.find())
                is_old = self._looked_at <= began
                for nth, address in enumerate(addresses, 1):
                    # An address that drops packets must leave time for those after it.
                    share = (deadline - loop.time()) / (len(addresses) - nth + 1)
                    try:
                        async with asyncio.timeout(share):
                            made = await to(address)
                    except OSError as error:
                        if nth == len(addresses):
                            if is_old and not _is_elsewhere(error):
                                is_old, self._looked_at = False, float("-inf")
                                addresses += [one for one in await self.find() if one not in addresses]
                            if nth == len(addresses):
                                raise
                    else:
                        if address != self._known[0]:
                            self._preferred = address
                            self._known = self._in_order(self._known)
                        return made
                raise AssertionError("there is at least one address")
        except OSError as error:
            if is_old and not _is_elsewhere(error):
                self._looked_at = float("-inf")  # resolve the name before the next connection
            raise

    def _in_order(self, known: Sequence[str]) -> Sequence[str]:
        return tuple(sorted(known, key=lambda address: address != self._preferred))

    async def _look_up(self) -> None:
        try:
            known = await self._resolve(self._host, self._port)
        except OSError:
            known = ()  # the last good answer stays
        finally:
            self._looking = None
        self._known = self._in_order(known[:MAX_ADDRESSES]) or self._known
        self._looked_at = asyncio.get_running_loop().time()

    def close(self) -> None:
        """Cancel a look-up that is running."""
        if self._looking is not None:
            self._looking.cancel()

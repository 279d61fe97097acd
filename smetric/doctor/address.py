"""Where a URL leads: its IP address and port, and whether that is a port of this router."""

from __future__ import annotations

from urllib.parse import urlsplit

from smetric.config.address import port_of
from smetric.proxy.exposure import is_reached
from smetric.sources import addresses

#: What listens at all addresses, and one at which it is reached.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def resolve(url: str) -> tuple[str, int] | None:
    """IP address and port of *url*; None if its host has none."""
    parts = urlsplit(url)
    port = port_of(parts)
    try:
        return min(await addresses.resolve(parts.hostname or "", port)), port
    except OSError:
        return None


async def is_own(at: tuple[str, int] | None, host: str, port: int) -> bool:
    """Whether what listens at *host* and *port* of this machine is reached at the address and port *at*."""
    if at is None or at[1] != port:
        return False
    try:
        return any(is_reached(at[0], own) for own in await addresses.resolve(host, port))
    except OSError:
        return False


def local_url(host: str, port: int) -> str:
    """How what listens at *host* and *port* of this machine is reached."""
    reached = _LOOPBACK.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"

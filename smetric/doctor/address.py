"""Where a URL leads: its IP address and port, and whether that is this machine."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from smetric.sources import addresses

#: What listens at all addresses, and one at which it is reached.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def resolve(url: str) -> tuple[str, int] | None:
    """IP address and port of *url*; None if its host has none."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        return min(await addresses.resolve(parts.hostname or "", port)), port
    except OSError:
        return None


def is_here(ip: str) -> bool:
    """Whether *ip* is an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


async def is_own(at: tuple[str, int] | None, host: str, port: int) -> bool:
    """Whether what listens at *host* and *port* of this machine is reached at the address and port *at*."""
    if at is None or at[1] != port:
        return False
    if host in _LOOPBACK:
        return is_here(at[0])
    try:
        return at[0] in await addresses.resolve(host, port)
    except OSError:
        return False


def local_url(host: str, port: int) -> str:
    """How what listens at *host* and *port* of this machine is reached."""
    reached = _LOOPBACK.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"

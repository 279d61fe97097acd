"""Where a URL leads: its IP address and port, and whether that is this machine."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit


async def resolve(url: str) -> tuple[str, int] | None:
    """IP address and port of *url*; None if its host has none."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter where no name could look like this
        return None
    return sorted(str(one[4][0]) for one in infos)[0], port


def is_here(ip: str) -> bool:
    """Whether *ip* is an address of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError:
            return False
    return True


def local_url(host: str, port: int) -> str:
    """How what listens at *host* and *port* of this machine is reached."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"

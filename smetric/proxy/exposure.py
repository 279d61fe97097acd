"""What a router refuses to start with: an admin port open to the network, and itself as one of its instances."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from smetric.config.address import port_of
from smetric.errors import ConfigError


def refuse_open_admin(admin: socket.socket, *, has_token: bool) -> None:
    """Raise ConfigError if others than this machine's users reach the admin port, and it asks for no token."""
    host = admin.getsockname()[0]
    if not has_token and not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"admin.token: not set, but the admin port listens on {host}, where others reach it; set it or "
            "admin.token_file"
        )


def refuse_self(urls: Iterable[str], ports: Sequence[socket.socket]) -> None:
    """Raise ConfigError if one of *urls* leads to one of *ports*: requests would go round in circles."""
    own = [port.getsockname()[:2] for port in ports]
    for url in urls:
        parts = urlsplit(url)
        port = port_of(parts)
        hosts = [host for host, number in own if number == port]
        found = _addresses(parts.hostname or "", port) if hosts else ()
        if any(is_reached(address, host) for address in found for host in hosts):
            raise ConfigError(f"instances: {url} is this router itself; name the engines")


def _addresses(host: str, port: int) -> set[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()  # a name that leads nowhere now may lead to an engine later
    return {str(address[0]) for *_, address in found}


def is_reached(address: str, listening: str) -> bool:
    """Whether a listener on the address *listening* of this machine is reached at *address*."""
    if not ipaddress.ip_address(listening.partition("%")[0]).is_unspecified:
        return address == listening
    return (":" in listening or ":" not in address) and is_here(address)


def is_here(address: str) -> bool:
    """Whether *address* is one of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))  # no other can be bound
        except OSError:
            return False
    return True

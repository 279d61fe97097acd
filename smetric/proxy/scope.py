"""What the ASGI scopes of all requests of a connection have in common."""

from __future__ import annotations

import asyncio
from typing import Any


def scope_over(transport: asyncio.BaseTransport) -> dict[str, Any]:
    """A scope for a request that comes over *transport*; what is None is the request's own, and to be filled in."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": None,
        "method": None,
        "scheme": "http" if transport.get_extra_info("ssl_object") is None else "https",
        "path": None,
        "raw_path": None,
        "query_string": None,
        "root_path": "",
        "headers": None,
        "client": _address(transport, "peername"),
        "server": _address(transport, "sockname"),
        "state": None,
        "extensions": {},
    }


def _address(transport: asyncio.BaseTransport, name: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(name)
    return (address[0], address[1]) if isinstance(address, tuple) else None

"""The bodies of answers to what the router itself asks: as they are, and no longer than they may be."""

from __future__ import annotations

import aiohttp


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

"""Check of idle connections: engines keep them open longer than this router reuses them."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from smetric.config.address import port_of
from smetric.doctor.check import Skipped
from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, info, shown, warning
from smetric.doctor.site import Site
from smetric.proxy.pool import KEEPALIVE_S

#: How much longer than ours an engine must keep a connection, and how long is waited for it to close one, seconds.
MARGIN_S = 0.5
WATCHED_S = KEEPALIVE_S + 3.0


async def keep_alive(site: Site) -> list[Finding]:
    """No engine closes an idle connection that the router would still use."""
    if not site.reachable:
        raise Skipped("no instance answers")
    if not site.may_wait:
        return [
            info(
                engine.where,
                f"it is not vLLM's own server that answers (server: {shown(engine.server) or 'not told'})",
                f"if it closes idle connections within {KEEPALIVE_S:g} s, some requests are sent twice",
                "run `smetric doctor --slow`, which measures it",
            )
            for engine in site.reachable
            if engine.server.lower() != "uvicorn"
        ]
    found = await asyncio.gather(*(_of_instance(engine) for engine in site.reachable))
    return [one for one in found if one is not None]


async def _of_instance(engine: Engine) -> Finding | None:
    parts = urlsplit(engine.settings.url)
    is_tls = parts.scheme == "https"
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, port_of(parts), ssl=is_tls or None, limit=1 << 16
        )
    except OSError:
        return None  # found by the check of instances
    try:
        writer.write(b"GET /health HTTP/1.1\r\nhost: %b\r\n\r\n" % parts.netloc.encode())
        answered_at = time.monotonic()
        async with asyncio.timeout(WATCHED_S):
            while await reader.read(1 << 16):
                answered_at = time.monotonic()
    except TimeoutError:
        return None  # it is open still
    except OSError:
        pass  # closed with a reset, which is closed all the same
    finally:
        writer.close()
    kept_s = time.monotonic() - answered_at
    if kept_s >= KEEPALIVE_S + MARGIN_S:
        return None
    return warning(
        engine.where,
        f"it closes idle connections after {kept_s:.1f} s; the router reuses them for {KEEPALIVE_S:g} s",
        "a request on a connection that is just being closed is lost, and sent again",
        "set `VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5` or more for the engine, or raise the time-out of what stands before it",
    )

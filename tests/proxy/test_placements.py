"""The admin port's routes for placements: what they answer, and their bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from smetric.admin.operations import placement_routes
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.http.limits import HttpLimits
from smetric.http.listener import address_of, listen, serve_port
from smetric.proxy.intake import Intake
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.prefix_index.persistence import decode_image
from smetric.sources.shared.peers import MAX_BATCH_BYTES, PATH, Peers, encode_batch
from tests.fakes import fetch

TOKEN = "t" * 16
AUTHORIZED = [("Authorization", f"Bearer {TOKEN}")]


@asynccontextmanager
async def admin_port() -> AsyncIterator[str]:
    peers = Peers(PrefixIndexes([PrefixIndex()]), Fleet([], VOCABULARY), [], token=TOKEN)
    app, sock, stop = (
        Intake(Starlette(routes=placement_routes(peers)), HttpLimits()),
        listen("127.0.0.1", 0),
        asyncio.Event(),
    )
    server = asyncio.create_task(serve_port(app, sock, stop=stop.wait, drain_s=0.1))
    try:
        yield address_of(sock)
    finally:
        stop.set()
        await server


async def test_a_batch_is_taken_and_an_image_given() -> None:
    async with admin_port() as url:
        assert (await fetch(url, "POST", PATH, encode_batch("s", 0, []), AUTHORIZED)).status == 204
        answer = await fetch(url, "GET", PATH, b"", AUTHORIZED)
        assert answer.status == 200
        assert decode_image(answer.body).instances == []


async def test_what_is_no_batch_is_400_with_the_reason() -> None:
    async with admin_port() as url:
        answer = await fetch(url, "POST", PATH, b"nonsense", AUTHORIZED)
    assert (answer.status, answer.body) == (400, b"the batch cannot be read: it is no batch of placements")


async def test_without_the_token_nothing_is_taken_or_given() -> None:
    async with admin_port() as url:
        for headers in ([], [("Authorization", "Bearer guess")], [("Authorization", "Bearer \xff")]):
            assert (await fetch(url, "POST", PATH, encode_batch("s", 0, []), headers)).status == 403
            assert (await fetch(url, "GET", PATH, b"", headers)).status == 403


async def test_a_batch_beyond_the_bound_is_413() -> None:
    async with admin_port() as url:
        answer = await fetch(url, "POST", PATH, bytes(MAX_BATCH_BYTES + 1), AUTHORIZED)
    assert answer.status == 413

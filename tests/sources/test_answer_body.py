from __future__ import annotations

import aiohttp
import pytest

from smetric.http.addresses import resolve
from smetric.sources.client import PlainSession, is_plain, read_within
from tests.fakes import Call, FakeEngine


@pytest.mark.parametrize(("encoding", "plain"), [(None, True), (b"Identity", True), (b"gzip", False)])
async def test_what_is_not_compressed_is_plain(encoding: bytes | None, plain: bool) -> None:
    async def answer(call: Call) -> None:
        assert call.values(b"accept-encoding") == []
        await call.answer(200, b"page", *([(b"content-encoding", encoding)] if encoding else []))

    engine = FakeEngine(answer)
    await engine.start()
    session = PlainSession(resolve, timeout_s=5.0)
    async with session.http.get(engine.url + "/page") as response:
        assert is_plain(response) is plain
        assert await response.read() == b"page"
    await session.close()
    await engine.stop()


@pytest.mark.parametrize(("most", "body"), [(10, b"0123456789"), (9, None)])
async def test_a_body_is_read_up_to_its_bound(most: int, body: bytes | None) -> None:
    async def answer(call: Call) -> None:
        await call.answer(200, b"0123456789")

    engine = FakeEngine(answer)
    await engine.start()
    async with aiohttp.ClientSession() as session, session.post(engine.url + "/v1/x") as response:
        assert await read_within(response, most) == body
    await engine.stop()

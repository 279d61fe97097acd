"""Listening emulated instances."""

from __future__ import annotations

import asyncio
import math
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest

from smetric.errors import ConfigError
from smetric.lab.emulator import fleet as fleet_module
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings


async def test_fleet_instances_are_reachable_on_entry_and_share_nothing() -> None:
    body = {"prompt": "word " * 100, "max_tokens": 1}
    async with EmulatedFleet(2, EmulatedSettings(time_scale=50)) as fleet, aiohttp.ClientSession() as client:
        assert len(set(fleet.urls)) == 2
        cached = []
        for url in (fleet.urls[0], fleet.urls[0], fleet.urls[1]):
            async with client.post(url + "/v1/completions", json=body) as response:
                usage = (await response.json())["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    # 500 bytes are 125 tokens, of which 7 full blocks of 16 can be hit.
    assert cached == [0, 112, 0]


async def test_fleet_exit_aborts_open_streams_and_frees_ports() -> None:
    body = {"prompt": "once", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as client:
        async with EmulatedFleet(1) as fleet:
            url = fleet.urls[0]
            response = await client.post(url + "/v1/completions", json=body)
            await response.content.readany()
        text = await response.text()
    assert '"finish_reason":"abort"' in text
    assert text.endswith("data: [DONE]\n\n")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)


async def test_fleet_taken_port_is_an_error_and_leaves_no_socket_open() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            async with EmulatedFleet(1, port=port):
                pytest.fail("it listened on a port that is taken")


def test_fleet_rejects_invalid_settings() -> None:
    with pytest.raises(ValueError, match="count is 0"):
        EmulatedFleet(0)
    for scale in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"time_scale is {scale}"):
            EmulatedSettings(time_scale=scale)


async def test_fleet_closes_idle_connections_after_keep_alive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fleet_module.KEEP_ALIVE_S == 5
    monkeypatch.setattr(fleet_module, "KEEP_ALIVE_S", 0.1)
    async with EmulatedFleet(1) as fleet, asyncio.timeout(5):
        reader, writer = await asyncio.open_connection(urlsplit(fleet.urls[0]).hostname, urlsplit(fleet.urls[0]).port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" not in answer.lower()

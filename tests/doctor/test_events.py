from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec.structs import replace

from smetric.doctor.examination import examine
from smetric.doctor.site import Severity
from tests.doctor.front import publishing
from tests.doctor.lab import Lab, listening, told
from tests.sources.kv_events.kv_engine import stored

pytestmark = pytest.mark.slow

_SECOND_RANK = b'\nvllm:num_requests_running{engine="1",model_name="m"} 0.0\nvllm:num_requests_running'


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://127.0.0.1:9", "connection refused"),
        ("tcp://[::1:5557", "that is no address"),
        ("tcp://gpu..0:5557", "that is no address"),
    ],
)
async def test_an_endpoint_of_kv_events_that_is_dead_is_found(lab: Lab, address: str, why: str) -> None:
    async with publishing(lab.fronts[0]) as one, publishing(lab.fronts[1]) as two:
        settings = listening(lab, one, two)
        dead = replace(settings.instances[0], kv_events=address)
        no_zmq = replace(settings.instances[1], kv_events=lab.fronts[1].url.replace("http", "tcp"))
        found = told(await examine(replace(settings, instances=(dead, no_zmq)), may_probe=False))
    assert [(check, finding.where) for check, finding in found] == [
        ("kv-events", "instance e0"),
        ("kv-events", "instance e1"),
    ]
    assert f"{address}: {why}" in found[0][1].what
    assert "nothing greets there" in found[1][1].what
    assert all("--kv-events-config" in finding.remedy for _, finding in found)


async def test_engines_that_publish_nothing_and_ranks_nobody_listens_to_are_found(lab: Lab) -> None:
    async with publishing(lab.fronts[0]) as one, publishing(lab.fronts[1]) as two:
        lab.fronts[0].on_chat = None
        lab.fronts[1].edit("/metrics", b"\nvllm:num_requests_running", _SECOND_RANK)
        settings = listening(lab, one, two)
        found = told(await examine(settings))
    by_where = {finding.where: finding for check, finding in found if check == "kv-events"}
    assert "nothing was published" in by_where["instance e0"].what
    assert "prefix caching on" in by_where["instance e0"].remedy
    assert "set `kv_events.ranks: 2`" in by_where["instance e1"].remedy


async def test_a_missing_replay_socket_is_told(lab: Lab) -> None:
    async with publishing(lab.fronts[0], replay=False) as one, publishing(lab.fronts[1], replay=False) as two:
        found = told(await examine(listening(lab, one, two)))
    assert [(check, finding.where) for check, finding in found if finding.severity is Severity.WARNING] == [
        ("kv-events", "kv_events.replay")
    ]


async def test_engines_that_publish_at_one_address_are_found(lab: Lab) -> None:
    async with publishing(lab.fronts[0]) as one, publishing(lab.fronts[1]) as two:

        async def others() -> None:
            """The numbers of two more engines, in turns."""
            for number in range(1000):
                payload = msgspec.msgpack.encode([2e9 + number, [stored([1] * 9)], 0])
                await one.send_frames(b"", (900 - number if number % 2 else 5).to_bytes(8, "big"), payload)
                await asyncio.sleep(0.01)

        publishing_too = asyncio.create_task(others())
        found = told(await examine(listening(lab, one, two)))
        publishing_too.cancel()
    errors = [one for check, one in found if check == "kv-events" and one.severity is Severity.ERROR]
    assert [one.where for one in errors] == ["instance e0"]
    assert "began anew" in errors[0].what
    assert "an address of its own" in errors[0].remedy

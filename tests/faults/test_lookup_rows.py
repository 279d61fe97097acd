"""Rows E: failing, hanging and wrong lookup services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import orjson
import pytest

from smetric.config.settings import LmcacheSettings, LookupSettings, PrefixIndexSettings
from smetric.request.request import InferenceRequest
from tests.fakes import Call, FakeEngine, Script, chunk, hang, head, until
from tests.faults.harness import CANARY, Running, running

JSON = (b"content-type", b"application/json")
#: Deadline of all look-ups of these short prompts.
DEADLINE_S = 0.1
#: Delay that a busy machine may add.
SLACK_S = 0.4
FAILURES = 3
FOLLOW_UPS = 8
TOKENS = 1024


class Ids:
    """Ids of a prompt of `TOKENS` tokens, for every request."""

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        return range(TOKENS)

    def begin(self, request: InferenceRequest) -> None:
        return None


@asynccontextmanager
async def looking_up(script: Script, *, open_s: float = 60.0) -> AsyncIterator[tuple[Running, FakeEngine]]:
    """A router that knows hit lengths from a lookup service alone."""
    service = FakeEngine(script)
    await service.start()
    try:
        async with running(
            FakeEngine(),
            FakeEngine(),
            policy="smetric",
            token_ids=Ids(),
            prefix_index=PrefixIndexSettings(enabled=False),
            lookup=LookupSettings(deadline_base=DEADLINE_S, deadline_per_1k_tokens=0.0, deadline_cap=DEADLINE_S),
            lmcache=LmcacheSettings(
                url=service.url,
                mode="controller",
                answers_ttl=0.01,
                breaker_failures=FAILURES,
                breaker_open=open_s,
            ),
        ) as router:
            yield router, service
            await service.stop()
    finally:
        await service.stop()


async def follow_up(router: Running) -> str:
    """Send a session's second turn; returns the instance that served it."""
    history = [
        {"role": "user", "content": f"{CANARY} " * 300},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and?"},
    ]
    answer = await router.chat(messages=history)
    assert answer.status == 200
    return answer.value("x-smetric-instance")


async def metric(router: Running, series: str) -> float:
    """A series of the router's own metrics."""
    page = (await router.admin("/metrics")).body.decode()
    return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(series))


def layout(**owners: object) -> bytes:
    return orjson.dumps({"event_id": "x", "layout_info": owners})


def answer(body: bytes, status: int = 200) -> Script:
    return lambda call: call.answer(status, body, JSON)


async def refuse(call: Call) -> None:
    call.reset()


async def slow(call: Call) -> None:
    await asyncio.sleep(2.0)
    await call.answer(200, layout(e0=["LocalCPUBackend", TOKENS]), JSON)


async def trickle(call: Call) -> None:
    await call.send(head(200, JSON, (b"transfer-encoding", b"chunked")))
    while True:
        await asyncio.sleep(0.01)
        await call.send(chunk(b" "))


async def huge(call: Call) -> None:
    await call.send(head(200, JSON, (b"transfer-encoding", b"chunked")))
    while True:
        await call.send(chunk(b" " * (1 << 20)))


FAULTS = {
    "refused": (refuse, "connect_error"),
    "hanging": (hang, "late"),
    "slow": (slow, "late"),
    "trickling": (trickle, "late"),
    "broken": (answer(b'{"detail":""}', 500), "http_error"),
    "garbage": (answer(b"\x00\xff{{{"), "unreadable"),
    "of another kind": (answer(b'{"chunks":0,"results":[]}'), "unreadable"),
    "impossible": (answer(layout(e0=["LocalCPUBackend", 10**12])), "unreadable"),
    "huge": (huge, "unreadable"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_e3_failing_lookup_service_delays_few_decisions(fault: str) -> None:
    script, result = FAULTS[fault]
    async with looking_up(script) as (router, service):
        for _ in range(FOLLOW_UPS):
            await follow_up(router)
        made = [record for record in router.application.telemetry.decisions.recent(FOLLOW_UPS) if record.request.turn]
        assert len(made) == FOLLOW_UPS
        assert all(record.lookup_s < DEADLINE_S + SLACK_S for record in made)
        assert all(record.hit is None for record in made)
        assert len(service.calls) <= FAILURES
        assert await metric(router, 'smetric_lookup_suspended{source="lmcache"}') == 1.0
        assert await metric(router, f'smetric_lookups_total{{result="{result}",source="lmcache"}}') == FAILURES
        suspended = FOLLOW_UPS - FAILURES
        assert await metric(router, 'smetric_lookups_total{result="suspended",source="lmcache"}') == suspended
        assert len(router.lines("smetric.lookup.suspended")) == 1


async def test_e3_unknown_instance_named_by_a_service_gets_no_request() -> None:
    lies = layout(e0=["LocalCPUBackend", TOKENS])
    async with looking_up(answer(lies)) as (router, service):
        assert {await follow_up(router) for _ in range(4)} == {"e0"}
        draining = router.instance_of(router.engines[0])
        draining.draining = True
        assert {await follow_up(router) for _ in range(4)} == {"e1"}
        draining.draining = False
        service.script = answer(layout(**{"unknown": ["LocalCPUBackend", TOKENS], "": ["x", 1]}))
        await asyncio.sleep(0.02)  # till the last answer is too old to be used again
        assert {await follow_up(router) for _ in range(6)} == {"e0", "e1"}


async def test_e3_recovered_service_is_used_again() -> None:
    async with looking_up(hang, open_s=0.2) as (router, service):
        for _ in range(FAILURES):
            await follow_up(router)
        service.script = answer(layout(e1=["LocalCPUBackend", TOKENS]))
        served: list[str] = []

        async def home() -> bool:
            served.append(await follow_up(router))
            return served[-4:] == ["e1"] * 4

        deadline = asyncio.get_running_loop().time() + 5.0
        while not await home():
            assert asyncio.get_running_loop().time() < deadline
        await until(lambda: len(router.lines("smetric.lookup.resumed")) == 1)


async def test_e3_hundred_decisions_share_the_wait_for_a_hanging_service() -> None:
    async with looking_up(hang) as (router, _):
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.gather(*(follow_up(router) for _ in range(100)))
        assert loop.time() - started < 5.0
        made = [record for record in router.application.telemetry.decisions.recent(100) if record.request.turn]
        assert max(record.lookup_s for record in made) < DEADLINE_S + 2.0

"""Checks of engines."""

from __future__ import annotations

import asyncio
import re

import pytest
from msgspec.structs import replace

from smetric.config.settings import InstanceSettings, Listen
from smetric.doctor import engines
from smetric.doctor.examination import examine
from tests.doctor.broken import ERROR
from tests.doctor.lab import Edit, Lab, all_findings
from tests.fakes import Call, FakeEngine


def listen_at_second_engine(lab: Lab) -> None:
    _, second = lab.settings.instances
    port = int(lab.fronts[1].url.rpartition(":")[2])
    lab.set(listen=Listen(port=port), instances=(second,))


async def test_start_check_finds_the_router_itself(lab: Lab) -> None:
    listen_at_second_engine(lab)
    found = dict(await lab.findings())
    assert found["start"].what == f"{lab.fronts[1].url} is this router itself; name the engines"


async def test_start_check_accepts_the_same_port_at_another_address(lab: Lab) -> None:
    listen_at_second_engine(lab)
    lab.set(listen=replace(lab.settings.listen, host="127.0.0.2"))
    assert await lab.is_fine()


async def test_instances_check_finds_names_that_resolve_to_refused_addresses(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(url: str) -> tuple[str, int]:
        return ("169.254.169.254" if url == lab.fronts[0].url else "10.0.0.1"), 80

    monkeypatch.setattr(engines, "resolve", resolve)
    finding = await lab.only_finding("instances", ERROR)
    assert finding.where == "instance e0"
    assert "its name leads to 169.254.169.254" in finding.what
    assert "`instance_networks`" in finding.remedy


@pytest.mark.parametrize(("apart_s", "is_one"), [(0, True), (500, False)])
async def test_instances_check_finds_one_engine_under_two_names(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, apart_s: int, is_one: bool
) -> None:
    async def resolve(url: str) -> tuple[str, int]:
        return "10.0.0.1", 443

    def starting(at: int) -> Edit:
        return lambda page: re.sub(rb"(?m)^(process_start_time_seconds) .*", rb"\1 %d" % at, page)

    monkeypatch.setattr(engines, "resolve", resolve)
    for nth, front in enumerate(lab.fronts):
        front.edits["/metrics"] = starting(1000 + nth * apart_s)
    found = await lab.findings()
    assert ["it is the same engine" in finding.what for _, finding in found] == [True] * is_one


async def test_keep_alive_check_measures_early_closes(lab: Lab) -> None:
    async def close_soon(call: Call) -> None:
        await call.answer(200, b"")
        await asyncio.sleep(0.2)
        call.close()

    engine = FakeEngine()
    engine.health = close_soon
    await engine.start()
    try:
        instances = (InstanceSettings(id="short", url=engine.url),)
        examination = await examine(replace(lab.settings, instances=instances), may_probe=False, may_wait=True)
    finally:
        await engine.stop()
    found = dict(all_findings(examination))
    assert "closes idle connections after 0." in found["keep-alive"].what
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" in found["keep-alive"].remedy

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from smetric.config.settings import Listen
from smetric.doctor import engines
from smetric.doctor.examination import examine
from tests.doctor.front import Edit
from tests.doctor.lab import Lab, the_only, told


def circle(lab: Lab) -> None:
    _, second = lab.settings.instances
    port = int(lab.fronts[1].url.rpartition(":")[2])
    lab.settings = replace(lab.settings, listen=Listen(port=port), instances=(second,))


async def test_an_instance_that_is_the_router_itself_is_found(lab: Lab) -> None:
    circle(lab)
    found = told(await examine(lab.settings, may_probe=False))
    assert ("instances", True) in [(check, "this router itself listens" in finding.what) for check, finding in found]


async def test_an_engine_at_the_routers_port_of_another_address_is_none_of_it(lab: Lab) -> None:
    circle(lab)
    lab.settings = replace(lab.settings, listen=replace(lab.settings.listen, host="127.0.0.2"))
    assert told(await examine(lab.settings, may_probe=False)) == []


async def test_a_name_that_leads_where_no_instance_can_be_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(url: str) -> tuple[str, int]:
        return ("169.254.169.254" if url == lab.fronts[0].url else "10.0.0.1"), 80

    monkeypatch.setattr(engines, "resolve", resolve)
    check, finding = the_only(await examine(lab.settings, may_probe=False))
    assert (check, finding.where) == ("instances", "instance e0")
    assert "its name leads to 169.254.169.254" in finding.what
    assert "`instance_networks`" in finding.remedy


@pytest.mark.parametrize(("apart_s", "is_one"), [(0, True), (500, False)])
async def test_two_names_at_one_address_are_one_engine_unless_they_are_two_processes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, apart_s: int, is_one: bool
) -> None:
    async def resolve(url: str) -> tuple[str, int]:
        return "10.0.0.1", 443

    def starting(at: int) -> Edit:
        return lambda page: re.sub(rb"(?m)^(process_start_time_seconds) .*", rb"\1 %d" % at, page)

    monkeypatch.setattr(engines, "resolve", resolve)
    for nth, front in enumerate(lab.fronts):
        front.edits["/metrics"] = starting(1000 + nth * apart_s)
    found = told(await examine(lab.settings, may_probe=False))
    assert ["it is the same engine" in finding.what for _, finding in found] == [True] * is_one

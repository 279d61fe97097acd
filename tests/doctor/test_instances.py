from __future__ import annotations

from dataclasses import replace

import pytest

from smetric.config.settings import Listen
from smetric.doctor import instances
from smetric.doctor.examination import examine
from tests.doctor.lab import Lab, the_only, told


def circle(lab: Lab) -> None:
    _, second = lab.settings.instances
    port = int(lab.fronts[1].url.rpartition(":")[2])
    lab.settings = replace(lab.settings, listen=Listen(port=port), instances=(second,))


async def test_an_instance_that_is_the_router_itself_is_found(lab: Lab) -> None:
    circle(lab)
    found = told(await examine(lab.settings, may_probe=False))
    assert ("instances", True) in [(check, "this router itself listens" in finding.what) for check, finding in found]


async def test_a_name_that_leads_where_no_instance_can_be_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(url: str) -> tuple[str, int]:
        return ("169.254.169.254" if url == lab.fronts[0].url else "10.0.0.1"), 80

    monkeypatch.setattr(instances, "resolve", resolve)
    check, finding = the_only(await examine(lab.settings, may_probe=False))
    assert (check, finding.where) == ("instances", "instance e0")
    assert "its name leads to 169.254.169.254" in finding.what
    assert "`instance_networks`" in finding.remedy

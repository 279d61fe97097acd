from __future__ import annotations

from dataclasses import replace

from smetric.config.settings import Listen
from smetric.doctor.examination import examine
from tests.doctor.lab import Lab, told


def circle(lab: Lab) -> None:
    _, second = lab.settings.instances
    port = int(lab.fronts[1].url.rpartition(":")[2])
    lab.settings = replace(lab.settings, listen=Listen(port=port), instances=(second,))


async def test_an_instance_that_is_the_router_itself_is_found(lab: Lab) -> None:
    circle(lab)
    found = told(await examine(lab.settings, may_probe=False))
    assert ("instances", True) in [(check, "this router itself listens" in finding.what) for check, finding in found]

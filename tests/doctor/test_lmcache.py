from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

from msgspec.structs import replace

from smetric.doctor.examination import as_text, examine
from tests.doctor.lab import Lab, the_only, told


async def test_lmcache_check_finds_unregistered_instances(lab: Lab) -> None:
    lab.lmcache()
    ids = {**lab.settings.lmcache.instances, "e1": "nobody"}
    lab.settings = replace(lab.settings, lmcache=replace(lab.settings.lmcache, instances=ids))
    check, finding = the_only(await examine(lab.settings))
    assert (check, finding.where) == ("lmcache", "instance e1")
    assert "knows no instance nobody; it knows 127.0.0.1:" in finding.what
    assert "set `lmcache.instances: {e1: ID}`" in finding.remedy


async def test_lmcache_check_uses_the_clock_of_the_service(lab: Lab) -> None:
    behind = time.time() - 3600

    def beat(answer: Any) -> None:
        for worker in answer["workers"]:
            worker |= {"registration_time": behind - 1000, "last_heartbeat_time": behind - 5}

    lab.lmcache(mode="controller")
    lab.store.edit_json("/controller/workers", beat)
    lab.store.headers = {"date": formatdate(behind, usegmt=True)}
    examination = await examine(lab.settings, may_probe=False)
    found = [finding.what for check, finding in told(examination) if "heartbeat" in finding.what]
    assert found == [], as_text(examination)

from __future__ import annotations

from dataclasses import replace

from smetric.doctor.examination import examine
from tests.doctor.lab import Lab, the_only


async def test_an_instance_that_lmcache_does_not_know_is_found(lab: Lab) -> None:
    lab.lmcache()
    ids = {**lab.settings.lmcache.instances, "e1": "nobody"}
    lab.settings = replace(lab.settings, lmcache=replace(lab.settings.lmcache, instances=ids))
    check, finding = the_only(await examine(lab.settings))
    assert (check, finding.where) == ("lmcache", "instance e1")
    assert "knows no instance nobody; it knows 127.0.0.1:" in finding.what
    assert "set `lmcache.instances: {e1: ID}`" in finding.remedy

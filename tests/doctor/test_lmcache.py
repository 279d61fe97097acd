from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

from tests.doctor.lab import Lab


async def test_lmcache_check_uses_the_clock_of_the_service(lab: Lab) -> None:
    behind = time.time() - 3600

    def beat(answer: Any) -> None:
        for worker in answer["workers"]:
            worker |= {"registration_time": behind - 1000, "last_heartbeat_time": behind - 5}

    lab.lmcache(mode="controller")
    lab.store.edit_json("/controller/workers", beat)
    lab.store.headers = {"date": formatdate(behind, usegmt=True)}
    assert not [finding.what for _, finding in await lab.findings() if "heartbeat" in finding.what]

from __future__ import annotations

import pytest

from tests.fakes import FakeEngine, fetch
from tests.faults.harness import Running, running

pytestmark = pytest.mark.slow


async def readiness(router: Running) -> tuple[int, str]:
    """Return the answer of `/readyz`, which is the same on both ports."""
    answers = [await fetch(url, "GET", "/readyz") for url in (router.url, router.admin_url)]
    (answer,) = {(answer.status, answer.body.decode()) for answer in answers}
    return answer


async def test_router_that_starts_or_drains_is_alive_but_not_ready() -> None:
    async with running(FakeEngine()) as router:
        assert await readiness(router) == (200, "ready\n")
        router.application.is_ready = False
        assert await readiness(router) == (503, "starting\n")
        router.application.drain()
        assert await readiness(router) == (503, "draining\n")
        for url in (router.url, router.admin_url):
            assert (await fetch(url, "GET", "/healthz")).body == b"ok\n"


async def test_router_with_drained_instances_only_is_not_ready() -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        for id in ("e0", "e1"):
            assert await readiness(router) == (200, "ready\n")
            assert (await fetch(router.admin_url, "POST", f"/admin/instances/{id}/drain")).status == 200
        assert await readiness(router) == (503, "all instances are drained, stopping or asleep\n")
        assert (await router.chat()).status == 503
        assert (await fetch(router.admin_url, "POST", "/admin/instances/e1/undrain")).status == 200
        assert await readiness(router) == (200, "ready\n")
        assert (await router.chat()).status == 200


async def test_stopping_engines_count_as_drained() -> None:
    async with running(FakeEngine()) as router:
        (instance,) = router.application.fleet.instances
        router.application.fleet.health.stopping(instance)
        assert await readiness(router) == (503, "all instances are drained, stopping or asleep\n")
        router.application.fleet.health.restarted(instance)
        assert await readiness(router) == (200, "ready\n")


async def test_router_with_unhealthy_instances_stays_ready() -> None:
    async with running(FakeEngine(), FakeEngine()) as router:
        first, second = router.application.fleet.instances
        for _ in range(2):
            router.application.fleet.health.probed(first, ok=False)
        router.application.fleet.health.refused(second)
        assert not any(one.healthy for one in router.application.fleet.instances)
        assert await readiness(router) == (200, "ready\n")
        assert (await router.chat()).status == 200


async def test_router_without_instances_is_not_ready() -> None:
    async with running(warm=False, check_after=False) as router:
        assert await readiness(router) == (503, "no instance is configured\n")
        assert (await router.chat()).status == 503

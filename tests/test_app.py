"""Application built from settings; its parts have their own tests."""

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from smetric.app import Application
from smetric.config.settings import InstanceSettings, Settings
from tests.fakes import FakeEngine
from tests.faults.harness import chat, running
from tests.product import pytest_asyncio_loop_factories  # noqa: F401

pytestmark = pytest.mark.slow

BY_TENANT = 'policy by_tenant\n\nreject 429 "not today" when req.tenant == "blue"\nroute rr_argmin(requests)\n'


@pytest.mark.parametrize(
    ("settings", "statuses"), [({"tenant_header": "X-Tenant"}, [429, 200, 200]), ({}, [200, 200, 200])]
)
async def test_application_reads_the_tenant_from_the_configured_header_only(
    tmp_path: Path, settings: dict[str, Any], statuses: list[int]
) -> None:
    path = tmp_path / "by_tenant.policy"
    path.write_text(BY_TENANT)
    async with running(FakeEngine(), policy=str(path), **settings) as router:
        answers = [
            await router.ask("POST", "/v1/chat/completions", chat(), header)
            for header in (("x-tenant", "blue"), ("x-tenant", "red"), ("x-team", "blue"))
        ]
    assert [answer.status for answer in answers] == statuses


class Part:
    """A background part that ends, or cannot."""

    def __init__(self, ended: list[str], name: str, error: Exception | None = None) -> None:
        self._ended, self._name, self._error = ended, name, error

    async def start(self) -> None: ...

    async def stop(self) -> None:
        if self._error is not None:
            raise self._error
        self._ended.append(self._name)


async def test_application_stops_all_parts_though_one_fails() -> None:
    application = Application(Settings(instances=(InstanceSettings(url="http://127.0.0.1:1", id="a"),)), environ={})
    ended: list[str] = []
    application.sources.background[:] = [Part(ended, "first"), Part(ended, "", OSError("full")), Part(ended, "last")]
    await application.start()
    with capture_logs() as logs:
        await application.stop()
    assert ended == ["first", "last"]
    assert [(line["event"], line["part"]) for line in logs] == [("smetric.stop.failed", "Part")]

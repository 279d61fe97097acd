"""Live page after a disconnect or a stall of the stream of decisions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from smetric.app import Application
from tests.admin.ui.chromium import Page, chromium, executable
from tests.admin.ui.traffic import Traffic, simulated
from tests.fakes import until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(executable() is None, reason="no Chromium on this machine: apt-get install chromium"),
]

LINK = "document.getElementById('link').textContent"
PAUSE = "document.getElementById('pause').textContent"
ROWS = "document.querySelectorAll('.row')"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Page]:
    async with chromium() as page:
        yield page


async def break_off(application: Application) -> None:
    """End the page's stream and wait until it is connected again."""
    feed = application.live.feed
    before = list(feed._viewers)
    for viewer in before:
        viewer.leave("slow")
    await until(lambda: bool(set(feed._viewers) - set(before)))


async def test_feed_of_silent_router_is_not_live(browser: Page) -> None:
    async with simulated(2) as (application, url):
        await browser.go(f"{url}/admin/ui")
        await browser.until(f"{LINK} === 'live'")
        task = application.live.feed._task
        assert task is not None
        task.cancel()  # the connection stays open without data
        await browser.until(f"{LINK} === 'the router says nothing; trying again'", 15.0)
        await browser.until(f"{LINK} === 'live'")
        await browser.go("about:blank")


async def test_feed_keeps_newest_first_after_a_disconnect(browser: Page) -> None:
    async with simulated(8) as (application, url):
        traffic = Traffic(application, 40)
        await browser.go(f"{url}/admin/ui")
        await browser.until(f"{LINK} === 'live'")
        for _ in range(100):  # more than the page shows at once
            traffic.request()
        await browser.until(f"{ROWS}.length > 0")
        before = await browser.run(f"{ROWS}.length")
        await break_off(application)
        await browser.until(f"{ROWS}.length > {before}")
        times = await browser.run(f"[...{ROWS}].map(row => row.querySelector('.at').textContent)")
        assert times == sorted(times, reverse=True)
        await browser.go("about:blank")


async def test_feed_repeats_no_waiting_decision_after_a_disconnect(browser: Page) -> None:
    async with simulated(8) as (application, url):
        traffic = Traffic(application, 40)
        for _ in range(5):
            traffic.request()
        await browser.go(f"{url}/admin/ui")
        await browser.until(f"{ROWS}.length === 5")
        await browser.press(" ")
        for _ in range(3):
            traffic.request()
        await browser.until(f"{PAUSE} === 'Go on (3 newer)'")
        await break_off(application)
        traffic.request()
        await browser.until(f"{PAUSE} === 'Go on (4 newer)'")
        await browser.press(" ")
        await browser.until(f"{ROWS}.length === 9")
        await browser.go("about:blank")

"""Take the pictures of docs/guide/live-page.md: `python -m tests.admin.ui.pictures`, with Chromium, in two minutes.

The router has eight simulated instances. One is slower than the others, so that sessions move away from it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from smetric.config.settings import Trace
from smetric.features import VOCABULARY
from smetric.files import policy_path
from smetric.routing.policy_files import PolicyFile
from tests.admin.ui.chromium import Page, chromium
from tests.admin.ui.traffic import Traffic, simulated

FOLDER = Path(__file__).parents[3] / "docs" / "images"
SECONDS = 100.0
ANSWERED = "document.querySelector('.answer p')"
#: Conditions on the row of the decision in a picture.
MOVED = "row.querySelector('.why').textContent.includes('not_overloaded, moved from') && data.endsWith('ms')"
STUCK = "row.querySelector('.rule').textContent === 'stick' && data.endsWith('ms')"


async def opened(page: Page, which: str) -> None:
    """Open the first decision for which *which* is true."""
    find = (
        f"[...document.querySelectorAll('.row')].find(row => {{ const data = row.innerText.trim(); return {which}; }})"
    )
    await page.until(find, 90.0)
    await page.run(f"{find}.click()")
    await page.until(ANSWERED)


async def take(page: Page, name: str, mark: str) -> None:
    """Take a picture with a frame around each element of the selector *mark*."""
    await page.run(f"document.querySelectorAll({mark!r}).forEach(e => e.style.outline = '3px solid #d9480f')")
    await page.shoot(FOLDER / f"{name}.png")
    await page.run(f"document.querySelectorAll({mark!r}).forEach(e => e.style.outline = '')")


async def main() -> None:
    """Take all pictures."""
    await asyncio.to_thread(FOLDER.mkdir, exist_ok=True)
    bailian = PolicyFile(policy_path("bailian"), VOCABULARY).current.policy
    trace = Trace(ui_url="http://127.0.0.1:6006/redirects/traces/{trace_id}")
    async with simulated(8, trace=trace) as (application, url), chromium() as page:
        traffic = Traffic(application, 160, 1.6, shadows=[bailian])
        running = asyncio.create_task(traffic.run(40.0))
        for second in range(int(SECONDS)):
            traffic.slow = {"vllm-05": 3.0} if second % 30 < 14 else {}
            await asyncio.sleep(1.0)
        traffic.slow = {"vllm-05": 3.0}
        await page.look(1180, 680)
        await page.go(f"{url}/admin/ui")
        await asyncio.sleep(4.0)
        await page.shoot(FOLDER / "live-page.png")
        await page.look(1280, 800)

        await opened(page, STUCK)
        id = await page.run("document.querySelector('.copy').textContent")
        await page.press("Escape", "/")
        await page.type(id)
        await page.press("Enter")
        await page.until("document.querySelectorAll('.row').length === 1")
        await page.press("ArrowDown", "Enter")
        await page.until(ANSWERED)
        await take(page, "live-which-instance", "#text, .opened h3")
        await take(page, "live-age-of-load", ".candidates thead th:nth-child(3), .candidates .chosen td:nth-child(3)")
        await page.press("Escape", "x", "m")
        await opened(page, MOVED)
        await take(page, "live-which-guard", ".opened h3 .no, .why > .rules > li:not(.fired)")
        await take(page, "live-other-policy", ".what-if")
        await page.look(1280, 800, dark=True)
        await asyncio.sleep(0.5)
        await page.shoot(FOLDER / "live-page-dark.png")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())

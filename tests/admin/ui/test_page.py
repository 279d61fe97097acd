"""Live page in a browser."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from smetric.admin.feed import MOST_A_SECOND
from smetric.app import Application
from smetric.config.settings import Trace
from tests.admin.ui.chromium import Page, chromium, executable
from tests.admin.ui.traffic import Traffic, simulated

#: A test's `record_property`.
Tell = Callable[[str, object], None]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(executable() is None, reason="no Chromium on this machine: apt-get install chromium"),
]

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
ROWS = "document.querySelectorAll('.row')"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Page]:
    async with chromium() as page:
        yield page


@dataclass
class Shown:
    """Page of a router with eight simulated instances."""

    page: Page
    url: str
    application: Application
    traffic: Traffic

    def decide(self, count: int) -> None:
        """Make *count* decisions at once."""
        for _ in range(count):
            self.traffic.request()
            self.traffic.pass_time(0.03)
        self.traffic.scrape()

    async def filter_by(self, rule: str) -> None:
        """Filter by a rule, with the keyboard."""
        await self.page.press("/")
        assert await self.page.run("document.activeElement.id") == "text"
        await self.page.type(rule)
        await self.page.press("Enter")
        every = f"[...{ROWS}].every(row => row.querySelector('.rule').textContent === '{rule}')"
        await self.page.until(f"{ROWS}.length > 0 && {every}")

    async def texts(self, selector: str) -> list[str]:
        """Return the text of each element of *selector*."""
        found: list[str] = await self.page.run(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")
        return found


@pytest_asyncio.fixture(loop_scope="module")
async def shown(browser: Page) -> AsyncIterator[Shown]:
    trace = Trace(ui_url="http://127.0.0.1:6006/traces/{trace_id}")
    async with simulated(8, trace=trace) as (application, url):
        shown = Shown(browser, url, application, Traffic(application, 40))
        shown.decide(60)
        await browser.look(1440, 900)
        browser.problems.clear()
        browser.asked.clear()
        await browser.go(f"{url}/admin/ui")
        await browser.until(f"{ROWS}.length >= 40")
        yield shown
        assert browser.problems == []
        assert [url for url in browser.asked if not url.startswith(shown.url)] == []
        await browser.go("about:blank")


async def test_page_shows_router_instances_and_decisions(shown: Shown) -> None:
    await shown.page.until("document.querySelectorAll('#fleet tbody tr').length === 8")
    assert await shown.texts("#fleet tbody th button") == [f"vllm-{i:02}" for i in range(8)]
    assert await shown.texts("#link") == ["live"]
    assert await shown.texts("#up") == ["8/8"]
    (policy,) = await shown.texts("#policies > span")
    assert policy.startswith("smetric@")
    assert set(await shown.texts(".row .rule")) == {"stick", "balance"}
    assert await shown.texts("#series figcaption") == [
        *("Decisions a second", "Time to first token", "Imbalance", "Cache hits", "Age of load figures"),
    ]


async def test_page_shows_new_decisions_and_their_end(shown: Shown) -> None:
    record = shown.traffic.request()
    assert record.instance is not None
    await shown.page.until(f"{ROWS}[0].title.startsWith('{record.rule}: {record.instance.id} ')")
    assert (await shown.texts(".row:first-child .end")) == ["…"]
    shown.traffic.pass_time(60.0)
    await shown.page.until(f"{ROWS}[0].querySelector('.end').textContent.startsWith('TTFT')")


async def test_page_draws_heat_map_and_lines(shown: Shown) -> None:
    blank = """canvas => {
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size < 2;
    }"""
    for _ in range(3):
        shown.decide(10)
        await asyncio.sleep(0.4)
    await shown.page.until(f"![...document.querySelectorAll('.heat canvas, #series canvas')].some({blank})", 15)


async def test_page_filters_by_keyboard_on_the_router(shown: Shown) -> None:
    page = shown.page
    await shown.filter_by("balance")
    assert any("text=balance" in url for url in page.asked)
    shown.decide(30)
    await page.until(f"{ROWS}.length > 3")
    assert set(await shown.texts(".row .rule")) == {"balance"}
    await page.press("x")
    await page.until(f"[...{ROWS}].some(row => row.querySelector('.rule').textContent === 'stick')")


async def test_page_reports_filter_without_match(shown: Shown) -> None:
    await shown.page.press("/")
    await shown.page.type("no such thing")
    await shown.page.until(f"{ROWS}.length === 0 && !document.getElementById('list-empty').hidden")
    assert await shown.texts("#list-empty") == ["No decision fits the filter yet."]
    await shown.page.press("Escape", "x")
    await shown.page.until(f"{ROWS}.length > 0")


async def test_page_filters_by_click_on_instance(shown: Shown) -> None:
    await shown.page.run("[...document.querySelectorAll('#fleet th button')][3].click()")
    await shown.page.until(
        f"{ROWS}.length && [...{ROWS}].every(r => r.querySelector('.who').textContent === 'vllm-03')"
    )
    assert await shown.texts("#fleet tr.picked th button") == ["vllm-03"]


async def test_page_shows_no_stale_filter_after_return(shown: Shown) -> None:
    page = shown.page
    # The browser reloads this page on return, and restores the values of its fields.
    await page.run("addEventListener('unload', () => {}); document.querySelector('[name=outcome]').value = 'rejected'")
    await page.go("about:blank")
    await page.run("history.back()")
    await page.until("document.readyState === 'complete' && document.querySelectorAll('.row').length")
    assert await page.run("performance.getEntriesByType('navigation')[0].type") == "back_forward"
    assert await page.run("document.querySelector('[name=outcome]').value") == ""


async def test_page_offers_every_instance_of_large_fleet(shown: Shown) -> None:
    chosen = await shown.page.run("""(async () => {
        const { Filters } = await import(`${location.href}/filters.js`);
        const filters = new Filters(() => {});
        filters.offer("instance", Array.from({ length: 400 }, (_, i) => `vllm-${i}`));
        filters.set("instance", "vllm-399");
        return filters.get("instance");
    })()""")
    assert chosen == "vllm-399"


async def test_page_opens_later_turn_by_keys_and_explains_it(shown: Shown) -> None:
    page = shown.page
    await shown.filter_by("stick")
    await page.press("ArrowDown", "ArrowDown", "Enter")
    await page.until("document.querySelector('.answer p')")
    chosen = await shown.texts(".row[aria-selected=true] .who")
    assert (await shown.texts(".opened h3 strong"))[0].strip() == chosen[0]
    assert await shown.texts(".opened .rules > .fired .name") == ["→ stick"]
    guards = await shown.texts(".opened section.why > .rules > .fired li")
    assert [guard[0] for guard in guards] == ["✓", "✓", "✓"]
    assert guards[1].startswith("✓ not_overloaded ")
    assert "≤" in guards[1]
    heads = await shown.texts(".candidates thead th")
    assert heads[0] == "instance"
    assert heads[1].startswith("hit_len")
    assert heads[2].startswith("requests")
    assert "old" in heads[2]
    assert len(await shown.texts(".candidates tbody tr")) == 8
    assert await shown.texts(".candidates tr.chosen th") == chosen
    assert (await shown.texts(".candidates tr.chosen td small"))[0] == "prefix_index"
    assert (await shown.texts(".policy mark"))[0] == "route s  when req.turn != 0"
    assert await page.run("document.querySelector('.what-if select').value") == "bailian"
    assert "has the lowest f" in (await shown.texts(".answer"))[0]
    await page.press("ArrowDown")
    await page.until("document.querySelectorAll('.opened-row').length === 1")
    await page.press("Escape")
    await page.until("document.getElementById('opened').hidden")


async def test_page_links_decision_to_its_trace(shown: Shown) -> None:
    record = shown.traffic.request()
    record.trace_id, record.is_traced = "0af7651916cd43dd8448eb211c80319c", True
    shown.decide(1)
    await shown.page.press("/")
    await shown.page.type("0af7651916cd")
    await shown.page.press("Enter")
    await shown.page.until(f"{ROWS}.length === 1")
    await shown.page.press("ArrowDown", "Enter")
    await shown.page.until("document.querySelector('.details a')")
    links = await shown.page.run("[...document.querySelectorAll('.details a')].map(a => [a.href, a.rel])")
    assert links == [["http://127.0.0.1:6006/traces/0af7651916cd43dd8448eb211c80319c", "noopener noreferrer"]]


async def test_page_has_no_link_to_unrecorded_trace(shown: Shown) -> None:
    shown.traffic.request().trace_id = "1af7651916cd43dd8448eb211c80319c"
    shown.decide(1)
    await shown.page.press("Escape", "x", "/")
    await shown.page.type("1af7651916cd")
    await shown.page.press("Enter")
    await shown.page.until(f"{ROWS}.length === 1")
    await shown.page.press("ArrowDown", "Enter")
    await shown.page.until("[...document.querySelectorAll('.details dt')].some(e => e.textContent === 'trace')")
    assert await shown.page.run("document.querySelectorAll('.details a').length") == 0
    assert await shown.texts(".details small") == ["not recorded"]
    await shown.page.press("Escape", "x")


async def test_page_marks_unread_features_of_first_turn(shown: Shown) -> None:
    page = shown.page
    await shown.filter_by("balance")
    first = f"[...{ROWS}].find(row => row.querySelector('.about').textContent.startsWith('first turn'))"
    await page.until(first)
    await page.run(f"{first}.click()")
    await page.until("document.querySelector('.answer p')")
    assert await shown.texts(".answer") == ["not answerable: hit_len not read"]
    await page.run("document.querySelector('.what-if select').focus()")
    await page.run("""(() => { const select = document.querySelector('.what-if select');
        select.value = 'load_only'; select.dispatchEvent(new Event('change')); })()""")
    await page.until("document.querySelector('.answer').textContent.includes('fewest requests')")
    await page.run("sessionStorage.clear()")
    await page.press("Escape", "Escape")


async def test_page_pauses_and_continues_by_space(shown: Shown) -> None:
    page = shown.page
    await page.press(" ")
    assert await shown.texts("#pause") == ["Go on"]
    newest = (await shown.texts(".row .at"))[0]
    shown.decide(4)
    await page.until("document.getElementById('pause').textContent.includes('newer')")
    assert (await shown.texts(".row .at"))[0] == newest
    await page.press(" ")
    await page.until(f"document.getElementById('pause').textContent === 'Pause' && {ROWS}[0].innerText.length")
    assert (await shown.texts(".row .at"))[0] != newest


async def test_page_filter_restarts_count_of_waiting_decisions(shown: Shown) -> None:
    page = shown.page
    await page.press(" ")
    shown.decide(4)
    await page.until("document.getElementById('pause').textContent === 'Go on (4 newer)'")
    await page.press("/")
    await page.type("no such thing")
    await page.press("Enter")
    await page.until(f"{ROWS}.length === 0 && document.getElementById('pause').textContent === 'Go on'")


async def test_page_list_stands_still_while_a_decision_is_open(shown: Shown) -> None:
    page = shown.page
    await page.press("ArrowDown", "Enter")
    await page.until("document.querySelector('.answer p')")
    assert await shown.texts("#pause") == ["Go on"]
    shown.decide(3)
    await page.until("document.getElementById('pause').textContent === 'Go on (3 newer)'")
    await page.press("Escape")
    await page.until("document.getElementById('pause').textContent === 'Pause'")
    await page.press("ArrowDown", "Enter", "/")
    await page.type("balance")
    await page.press("Enter")
    await page.until(
        f"[...{ROWS}].length && [...{ROWS}].every(r => r.querySelector('.rule').textContent === 'balance')"
    )
    assert await shown.texts("#pause") == ["Pause"]


async def test_page_help_lists_keys(shown: Shown) -> None:
    await shown.page.press("?")
    assert await shown.page.run("document.getElementById('help').open")
    await shown.page.press("Escape")
    await shown.page.until("!document.getElementById('help').open")


async def test_page_escapes_text_of_clients(shown: Shown) -> None:
    before = await shown.page.run(f"{ROWS}.length")
    shown.traffic.request("<img src=x onerror=alert(1)>")
    await shown.page.until(f"{ROWS}.length > {before}")
    await shown.page.press("Home", "Enter")
    await shown.page.until("document.querySelector('.details')?.textContent.includes('onerror')")
    assert await shown.page.run("document.images.length") == 0
    await shown.page.press("Escape")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_page_text_has_enough_contrast(shown: Shown, dark: bool) -> None:
    page = shown.page
    await page.look(1440, 900, dark=dark)
    await page.press("ArrowDown", "Enter")
    await page.until("document.querySelector('.answer p')")
    assert await page.run("getComputedStyle(document.body).backgroundColor") == (
        "rgb(18, 22, 28)" if dark else "rgb(255, 255, 255)"
    )
    assert await page.run(CONTRAST) == []
    await page.press("Escape")


@pytest.mark.parametrize("width", [360, 800, 1100, 1920])
async def test_page_fits_every_screen(shown: Shown, width: int) -> None:
    page = shown.page
    await page.look(width, 900)
    assert await page.run("document.documentElement.scrollWidth") <= width
    await page.press("ArrowDown", "Enter")
    await page.until("document.querySelector('.answer p')")
    assert await page.run("document.documentElement.scrollWidth") <= width
    await page.press("Escape")


@pytest.mark.parametrize("width", [360, 1100, 1440, 1920])
async def test_page_cuts_off_no_long_names_and_shadow_policies(shown: Shown, width: int) -> None:
    page = shown.page
    await page.look(width, 900)
    await page.run(
        "document.getElementById('shadows').textContent = 'a_policy_in_shadow 100 %, '.repeat(8);"
        "document.getElementById('shadows').parentElement.hidden = false;"
        "for (const name of ['--who', '--rule']) document.getElementById('list').style.setProperty(name, 15)"
    )
    assert await page.run("document.documentElement.scrollWidth") <= width
    await page.press("ArrowDown", "Enter")
    await page.until("document.querySelector('.answer p')")
    right = "getBoundingClientRect().right"
    assert await page.run(f"{ROWS}[0].querySelector('.end').{right} <= document.getElementById('list').{right}")
    await page.press("Escape")


async def test_page_reaches_each_part_by_tab(shown: Shown) -> None:
    wanted = ["help-button", "fleet-scroll", "text", "outcome", "pause", "list"]
    seen = []
    for _ in range(40):
        await shown.page.press("Tab")
        seen.append(await shown.page.run("document.activeElement.id || document.activeElement.name"))
    assert [name for name in seen if name in wanted][: len(wanted)] == wanted


async def test_page_asks_for_token_and_keeps_it_in_the_tab(browser: Page) -> None:
    async with simulated(2, token="a-token-of-some-length") as (application, url):
        Traffic(application, 4).request()
        browser.problems.clear()
        await browser.go(f"{url}/admin/ui")
        await browser.until("document.getElementById('token').open")
        assert await browser.run(f"{ROWS}.length") == 0
        for text, hint in (("wrong", "That was not the token"), ("a-token-of-some-length", "")):
            await browser.type(text)
            await browser.press("Enter")
            if hint:
                await browser.until(f"document.getElementById('token-why').textContent.startsWith({hint!r})")
        await browser.until(f"{ROWS}.length === 1")
        await browser.go("about:blank")
        await browser.go(f"{url}/admin/ui")
        await browser.until(f"{ROWS}.length === 1")
        assert await browser.run("localStorage.length") == 0
        # The browser reports each 401 itself.
        assert all("401" in problem for problem in browser.problems)
        await browser.go("about:blank")


async def test_page_reports_unreachable_router(browser: Page) -> None:
    async with simulated(2) as (application, url):
        Traffic(application, 4).request()
        await browser.go(f"{url}/admin/ui")
        await browser.until(f"{ROWS}.length === 1")
    await browser.until("document.getElementById('link').textContent.endsWith('; trying again')")
    assert not await browser.run("document.getElementById('link').classList.contains('up')")
    await browser.go("about:blank")


async def test_page_stays_light_at_500_decisions_a_second(browser: Page, record_property: Tell) -> None:
    async with simulated(64) as (application, url):
        traffic = Traffic(application, 400)
        running = asyncio.create_task(traffic.run(500.0))
        await browser.look(1440, 900)
        browser.problems.clear()
        await browser.go(f"{url}/admin/ui")
        await browser.until(f"document.querySelectorAll('#fleet tbody tr').length === 64 && {ROWS}.length > 40")
        await browser.run("""(() => {
            window.tasks = []; window.added = 0;
            new PerformanceObserver(list => window.tasks.push(...list.getEntries().map(e => e.duration)))
                .observe({type: 'longtask'});
            new MutationObserver(all => { for (const one of all) window.added += one.addedNodes.length; })
                .observe(document.getElementById('list'), {childList: true});
        })()""")
        made = traffic.made
        await asyncio.sleep(3.0)
        tasks = await browser.run("window.tasks")
        added = await browser.run("window.added")
        record_property("live_page.decisions_a_second", round((traffic.made - made) / 3))
        record_property("live_page.longest_task_ms", round(max(tasks, default=0)))
        record_property("live_page.tasks_over_50_ms", len(tasks))
        # The router sends a sample of the decisions, and the page reuses rows.
        assert 0 < added <= 5 * MOST_A_SECOND
        assert await browser.run(f"{ROWS}.length") <= 200
        await browser.press("ArrowDown", "Enter")
        await browser.until("document.querySelector('.answer p')")
        assert browser.problems == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await browser.go("about:blank")

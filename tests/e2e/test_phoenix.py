"""Decisions in a real tracing UI: Phoenix, a router process, emulated engines, and pictures to look at.

    pytest -m e2e tests/e2e/test_phoenix.py

`examples/tracing/setup_phoenix.sh` installs Phoenix first, where it is not there ($PHOENIX_FOLDER). With
PICTURES_TO=docs/images the pictures of docs/guide/tracing.md are taken anew; look at them before they are committed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from examples.tracing.phoenix import PROJECT, Found, export_to, find, phoenix, set_up
from examples.tracing.router import router
from examples.tracing.traffic import INSTANCES, REQUESTS, SESSIONS, HotSpot, Session, engines, play
from tests.admin.ui.chromium import chromium, executable
from tests.ports import free_ports

pytestmark = pytest.mark.e2e

#: What comes of them, and of one more that is rejected.
SPANS = {
    "POST /v1/chat/completions": REQUESTS + 1,
    "route smetric": REQUESTS,
    "route picky": 1,
    "shadow bailian": REQUESTS + 1,
    "chat emulated": REQUESTS,
}
#: Seconds until Phoenix has stored what it was sent.
STORED_S = 60.0
#: A page of Phoenix on two busy cores.
SHOWN_S = 60.0
PICKY = 'policy picky\nreject 429 "too long" when req.prompt_len > 500 as long\nroute argmin(requests) as least\n'


@dataclass(frozen=True)
class Stage:
    """A Phoenix that has been sent everything."""

    url: str
    seen: HotSpot

    def find(self, condition: str) -> list[Found]:
        return find(self.url, condition)

    def decision(self, id: str, name: str = "route") -> Found:
        (found,) = self.find(f"{ATTRIBUTE}['decision']['id'] == '{id}' and '{name}' in name")
        return found


ATTRIBUTE = "attributes['smetric']"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    set_up()
    work = tmp_path_factory.mktemp("phoenix")
    (work / "picky.policy").write_text(PICKY)
    port, grpc_port = free_ports(2)
    with phoenix(work, port=port, grpc_port=grpc_port) as url:
        seen = asyncio.run(traffic(url, work))
        until(lambda: counts(url) == SPANS)
        yield Stage(url, seen)


async def traffic(ui: str, work: Path) -> HotSpot:
    """The hot spot under `smetric`, then one request that another policy rejects."""
    async with engines() as fleet:
        with ExitStack() as stack:
            seen = await play(await asyncio.to_thread(stack.enter_context, serving(fleet.urls, ui, work / "one")))
        with ExitStack() as stack:
            policy = str(work / "picky.policy")
            url = await asyncio.to_thread(stack.enter_context, serving(fleet.urls, ui, work / "two", policy=policy))
            async with aiohttp.ClientSession() as client:
                with pytest.raises(aiohttp.ClientResponseError, match="429"):
                    await Session(0).ask(client, url, 8)
    return seen


def serving(urls: list[str], ui: str, work: Path, **options: Any) -> Any:
    port, admin_port = free_ports(2)
    return router(urls, work, export_to(ui), port=port, admin_port=admin_port, ui=ui, **options)


def counts(url: str) -> Counter[str]:
    return Counter(one.name for one in find(url))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STORED_S
    while not condition():
        assert time.monotonic() < deadline, "Phoenix has not stored all spans"
        time.sleep(0.5)


def test_every_request_is_a_trace_of_four_spans(stage: Stage) -> None:
    assert counts(stage.url) == SPANS
    spans = stage.find(f"trace_id == '{stage.decision(stage.seen.moved.decision).trace_id}'")
    assert sorted(one.name for one in spans) == [
        "POST /v1/chat/completions",
        "chat emulated",
        "route smetric",
        "shadow bailian",
    ]


def test_it_says_which_instance_served_a_request_and_why(stage: Stage) -> None:
    seen = stage.seen.stayed
    about = stage.decision(seen.decision).attributes["smetric"]
    assert about["instance"]["id"] == seen.instance == stage.seen.hot
    assert about["rule"] == seen.rule == "stick"
    assert about["decision"]["summary"].startswith(f"stick: {seen.instance} has the highest hit_len")
    (attempt,) = stage.find(f"{ATTRIBUTE}['decision']['id'] == '{seen.decision}' and name == 'chat emulated'")
    assert attempt.attributes["smetric"]["instance"]["id"] == seen.instance
    assert attempt.attributes["smetric"]["prefix"]["actual_hit_tokens"] > 0


def test_it_says_which_guard_sent_a_request_away_from_its_warm_instance(stage: Stage) -> None:
    (found,) = stage.find(f"{ATTRIBUTE}['guard']['failed'] == 'not_overloaded'")
    about = found.attributes["smetric"]
    assert about["decision"]["id"] == stage.seen.moved.decision
    assert about["migration"] == {
        "from": stage.seen.hot,
        "guard": "not_overloaded",
        "left_tokens": about["migration"]["left_tokens"],
    }
    assert about["instance"]["id"] == stage.seen.moved.instance != stage.seen.hot
    assert "✗ not_overloaded (7 > 2 × 3.25)" in found.attributes["output"]["value"]


def test_it_says_how_old_the_load_figure_was(stage: Stage) -> None:
    found = stage.decision(stage.seen.moved.decision)
    age = found.attributes["smetric"]["telemetry"]["chosen_age"]
    assert 0 <= age <= found.attributes["smetric"]["telemetry"]["max_age"] < 30
    assert f"requests {age:.2g}"[:12] in found.attributes["output"]["value"]


def test_it_says_what_bailian_would_have_picked(stage: Stage) -> None:
    moved = stage.decision(stage.seen.moved.decision)
    shadow = moved.attributes["smetric"]["shadow"]
    assert (shadow["policy"], shadow["instance"]["id"], shadow["agrees"]) == ("bailian", stage.seen.hot, False)
    assert f"shadow   bailian would choose {stage.seen.hot}" in moved.attributes["output"]["value"]
    (own,) = stage.find(f"trace_id == '{moved.trace_id}' and 'shadow' in name")
    assert own.attributes["smetric"]["instance"]["id"] == stage.seen.hot


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        (f"{ATTRIBUTE}['decision']['outcome'] == 'rejected' and 'route' in name", 1),
        (f"{ATTRIBUTE}['decision']['outcome'] == 'routed' and name == 'route smetric'", REQUESTS),
        (f"{ATTRIBUTE}['prefix']['hit_ratio'] > 0.5 and span_kind == 'CHAIN'", 14),
        (f"{ATTRIBUTE}['request']['turn'] == 0 and {ATTRIBUTE}['rule'] == 'balance'", SESSIONS),
        ("'picky' in name", 1),
    ],
)
def test_the_filters_of_the_manual_find_what_they_should(stage: Stage, condition: str, count: int) -> None:
    assert len(stage.find(condition)) == count


async def test_rest_tells_what_the_pages_show(stage: Stage) -> None:
    page = f"{stage.url}/v1/projects/{PROJECT}/spans?limit=100"
    async with aiohttp.ClientSession() as client, client.get(page) as answer:
        spans = (await answer.json())["data"]
    assert len(spans) == 100
    route = next(one for one in spans if one["name"] == "route smetric")
    assert isinstance(route["attributes"]["smetric.telemetry.chosen_age"], float)
    assert route["attributes"]["smetric.candidate.count"] == INSTANCES


#: The picture, which request and span of it, and a word of the line that answers.
PICTURES = {
    "phoenix-served": ("stayed", "POST", "has the highest hit_len"),
    "phoenix-guard": ("moved", "route", "✗"),
    "phoenix-age": ("moved", "route", "s old on"),
    "phoenix-shadow": ("moved", "shadow", "(shadow)"),
}
#: Marks the last place of some words, as a reader's mouse would; behind the span lies the list, which has them too.
MARKED = """(words) => {
  const style = document.createElement("style");
  style.textContent = "::selection { background: #ffd54a !important; color: #111 !important }";
  document.head.append(style);
  return window.find(words, true, true, true);
}"""


@pytest.mark.skipif(executable() is None, reason="needs Chromium (Debian: chromium), or its path in CHROMIUM")
async def test_the_pages_answer_at_first_sight(stage: Stage, tmp_path: Path) -> None:
    pictures = Path(os.environ.get("PICTURES_TO", tmp_path))
    async with chromium() as page:
        await page.look(1360, 880)
        await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        for picture, (which, kind, word) in PICTURES.items():
            decision = (stage.seen.stayed if which == "stayed" else stage.seen.moved).decision
            found = stage.decision(decision, "route" if kind == "shadow" else kind)
            if kind == "shadow":
                (found,) = stage.find(f"trace_id == '{found.trace_id}' and 'shadow' in name")
            parts = [part for line in found.attributes["output"]["value"].splitlines() for part in line.split("   ")]
            answer = next(part.strip() for part in parts if word in part)
            await page.call("Page.navigate", url=found.page)
            await page.until(f"document.body?.innerText.includes({answer!r})", SHOWN_S)
            await asyncio.sleep(1.5)
            assert await page.run(f"({MARKED})({answer!r})"), answer
            await asyncio.sleep(0.5)
            await page.shoot(pictures / f"{picture}.png")
            assert (pictures / f"{picture}.png").stat().st_size < 200_000

"""Cache report of the whole router: `/admin/cache` and metrics, without any text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import Call, FakeEngine
from tests.faults.harness import CANARY, Running, running

pytestmark = pytest.mark.slow

JSON = (b"content-type", b"application/json")
LONG = "A rule among many. " * 400
PAGE = (
    b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:prefix_cache_queries_total 100.0\n"
    b"vllm:prefix_cache_hits_total 60.0\nvllm:external_prefix_cache_hits_total 30.0\n"
)


def reporting(cached: Callable[[], int]) -> FakeEngine:
    """Engine that reports how many of 1,000 prompt tokens were cached."""

    async def answer(call: Call) -> None:
        usage = {"prompt_tokens": 1000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached()}}
        document = {"id": "c", "choices": [{"index": 0, "message": {"content": "ok"}}], "usage": usage}
        await call.answer(200, json.dumps(document).encode(), JSON)

    engine = FakeEngine(answer)

    async def page(call: Call) -> None:
        await call.answer(200, PAGE, (b"content-type", b"text/plain; version=0.0.4"))

    engine.metrics = page
    return engine


async def follow_up(router: Running, turn: int, system: str) -> None:
    messages = [{"role": "system", "content": system + "rule " * 300}, {"role": "user", "content": "task " * 100}]
    for number in range(turn):
        messages.append({"role": "assistant", "content": f"reply {number} " * 20})
        messages.append({"role": "user", "content": f"more {number} " * 20})
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    answer = await router.ask("POST", "/v1/chat/completions", body, ("user-agent", "claude-cli/2.0.1"))
    assert answer.status == 200


async def report(router: Running) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await router.admin("/admin/cache")).body)
    return found


async def test_cache_report_names_a_time_in_the_system_prompt() -> None:
    async with running(reporting(lambda: 0), policy="smetric") as router:
        for turn in range(5):
            await follow_up(router, turn, f"{CANARY} it is 12:0{turn}. ")
        found = await report(router)
        [broken] = found["breaks"]
        assert broken["summary"] == "claude-code: messages[0] (system) changes each request, 1 session"
        assert (broken["client"], broken["part"], broken["place"]) == ("claude-code", "system", "messages[0]")
        assert (broken["change"], broken["count"], broken["sessions"]) == ("changed", 4, 1)
        assert broken["lost_tokens"] > 1000
        assert found["follow_ups"] == {"compared": 4, "short": 4, "short_though_unbroken": 0}
        read = router.application.metrics.registry.get_sample_value
        assert read("smetric_cache_breaks_total", {"part": "system", "change": "changed"}) == 4
        assert CANARY not in json.dumps(found)


async def test_cache_report_compares_predictions_with_reports() -> None:
    async with running(reporting(lambda: 0), policy="smetric") as router:
        await follow_up(router, 0, "")
        assert (await report(router))["predictions"] == []
        for turn in range(1, 4):
            await follow_up(router, turn, "")
        [prediction] = (await report(router))["predictions"]
        assert (prediction["instance"], prediction["source"]) == ("e0", "prefix_index")
        assert (prediction["answers"], prediction["actual_tokens"], prediction["disagrees"]) == (3, 0, False)
        assert prediction["predicted_tokens"] == prediction["wrong_tokens"] > 1500
        read = router.application.metrics.registry.get_sample_value
        labels = {"instance": "e0", "source": "prefix_index", "result": "over"}
        assert read("smetric_prefix_checks_total", labels) == 3
        assert read("smetric_prefix_wrong_tokens_total", labels) == prediction["wrong_tokens"]
        assert read("smetric_prefix_disagreement", {"instance": "e0", "source": "prefix_index"}) == 0


async def test_cache_report_shows_tokens_found_by_each_instance() -> None:
    async with running(reporting(lambda: 0)) as router:
        assert (await report(router))["instances"] == [{"id": "e0", "local": 60, "external": 30, "missed": 10}]
        read = router.application.metrics.registry.get_sample_value
        assert read("smetric_instance_prefix_tokens_total", {"instance": "e0", "found": "missed"}) == 10


async def test_prefix_index_clears_a_cache_that_answers_report_as_empty() -> None:
    """Three complete answers without an expected hit clear the cache."""
    cached = 900
    async with running(reporting(lambda: cached), policy="smetric") as router:
        await follow_up(router, 0, LONG)
        await follow_up(router, 1, LONG)
        cached = 0
        for turn in range(2, 5):
            await follow_up(router, turn, LONG)
        assert len(router.lines("smetric.index.cleared")) == 1

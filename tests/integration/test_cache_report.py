"""What an answer says about caches, through the whole router: on `/admin/cache`, as metrics, without any text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from smetric.telemetry.cache_breaks import Breaks, Cause
from smetric.telemetry.hit_truth import summary
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
    """An engine that says how many of 1,000 prompt tokens it had cached."""

    async def answer(call: Call) -> None:
        usage = {"prompt_tokens": 1000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached()}}
        told = {"id": "c", "choices": [{"index": 0, "message": {"content": "ok"}}], "usage": usage}
        await call.answer(200, json.dumps(told).encode(), JSON)

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


async def test_a_time_in_the_system_prompt_is_named_for_its_client() -> None:
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


async def test_predictions_are_held_against_reports_and_first_turns_predict_nothing() -> None:
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


async def test_tokens_found_in_caches_are_shown_for_each_instance() -> None:
    async with running(reporting(lambda: 0)) as router:
        assert (await report(router))["instances"] == [{"id": "e0", "local": 60, "external": 30, "missed": 10}]
        read = router.application.metrics.registry.get_sample_value
        assert read("smetric_instance_prefix_tokens_total", {"instance": "e0", "found": "missed"}) == 10


async def test_the_prefix_index_learns_from_what_answers_report() -> None:
    """It is told of whole answers: three without a hit where one was believed, and the cache counts as cleared."""
    cached = 900
    async with running(reporting(lambda: cached), policy="smetric") as router:
        await follow_up(router, 0, LONG)
        await follow_up(router, 1, LONG)
        cached = 0
        for turn in range(2, 5):
            await follow_up(router, turn, LONG)
        assert len(router.lines("smetric.index.cleared")) == 1


@pytest.mark.parametrize(
    ("cause", "breaks", "line"),
    [
        (Cause("codex", "tools", "tools", "reordered"), Breaks(5, 2, 5), "codex: tools is reordered each request"),
        (Cause("codex", "tools", "tools", "added"), Breaks(1, 1, 4), "codex: tools was added 1 time"),
        (Cause("o", "user", "messages[3]", "changed"), Breaks(2, 2, 9), "o: messages[3] (user) changed 2 times"),
        (Cause("o", "system", "system[0]", "changed"), Breaks(9, 2, 9), "o: system[0] changes each request"),
        (Cause("o", "cache_salt", "cache_salt", "changed"), Breaks(9, 2, 9), "o: cache_salt changes each request"),
    ],
)
def test_a_break_is_told_in_a_line(cause: Cause, breaks: Breaks, line: str) -> None:
    sessions = "2 sessions" if breaks.sessions == 2 else "1 session"
    assert summary(cause, breaks) == f"{line}, {sessions}"

"""A whole router with token ids: when engines are asked for them, and what the trace shows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from smetric.config.settings import LmcacheSettings, LookupSettings, PrefixIndexSettings, TokenizerSettings
from smetric.sources.tokens.chat import ChatPrompt
from smetric.sources.tokens.local import ModelFolder
from tests.fakes import Call, FakeEngine, hang, healthy
from tests.faults.harness import Running, running
from tests.sources.tokens.recorded import model_folder

pytestmark = pytest.mark.slow

JSON = (b"content-type", b"application/json")
FIRST = [{"role": "system", "content": "Be terse. " * 40}, {"role": "user", "content": "one"}]
SECOND = [*FIRST, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "two"}]


class Engine(FakeEngine):
    """Engine that tokenises like vLLM and reports as many prompt tokens as ids, plus `more`."""

    def __init__(self, model: ModelFolder) -> None:
        super().__init__(self.serve)
        self.model = model
        self.more = 0
        self.questions: list[Call] = []

    async def serve(self, call: Call) -> None:
        if call.target != b"/tokenize":
            usage = {"prompt_tokens": len(self.ids(SECOND)) + self.more, "completion_tokens": 1}
            answer = {"id": "c", "choices": [{"index": 0, "message": {"content": "ok"}}], "usage": usage}
            await call.answer(200, json.dumps(answer).encode(), JSON)
            return
        self.questions.append(call)
        ids = self.ids(json.loads(call.body)["messages"])
        await call.answer(200, json.dumps({"count": len(ids), "tokens": ids}).encode(), JSON)

    def ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.model.encode(ChatPrompt(messages)).tolist()


@asynccontextmanager
async def routing(
    folder: Path, source: Literal["engine", "local"] = "engine", deadline_s: float = 1.0
) -> AsyncIterator[tuple[Running, Engine, list[list[int]]]]:
    """A router before one engine and a lookup service, and the ids that the service was asked for."""
    path = model_folder(folder, "plain")
    engine = Engine(ModelFolder(path, max_bytes=1 << 20))
    asked: list[list[int]] = []

    async def look_up(call: Call) -> None:
        asked.append(json.loads(call.body)["tokens"])
        await call.answer(200, b'{"event_id":"x","layout_info":{}}', JSON)

    service = FakeEngine(look_up)
    await service.start()
    try:
        async with running(
            engine,
            policy="smetric",
            prefix_index=PrefixIndexSettings(enabled=False),
            tokenizer=TokenizerSettings(source=source, folders={"*": str(path)}, timeout=2 * deadline_s),
            lookup=LookupSettings(deadline_base=deadline_s, deadline_per_1k_tokens=0.0, deadline_cap=deadline_s),
            lmcache=LmcacheSettings(url=service.url, mode="controller", chunk_size=16, answers_ttl=0.01),
        ) as router:
            yield router, engine, asked
            await service.stop()  # the check that the router is well waits for idle connections
    finally:
        await service.stop()


async def decision(router: Running) -> dict[str, Any]:
    """The last decision, as operators see it."""
    found: dict[str, Any] = json.loads((await router.admin("/admin/decisions")).body)["decisions"][0]
    return found


async def test_first_turn_needs_no_tokens_and_no_lookup(tmp_path: Path) -> None:
    async with routing(tmp_path) as (router, engine, asked):
        assert (await router.chat(messages=FIRST)).status == 200
        assert (engine.questions, asked) == ([], [])


@pytest.mark.parametrize("source", ["engine", "local"])
async def test_follow_up_is_looked_up_by_ids_of_its_engine(tmp_path: Path, source: Literal["engine", "local"]) -> None:
    async with routing(tmp_path, source) as (router, engine, asked):
        assert (await router.chat(messages=SECOND)).status == 200
        ids = engine.ids(SECOND)
        assert asked == [ids[: len(ids) // 16 * 16]]
        assert len(engine.questions) == (1 if source == "engine" else 0)
        page = (await router.admin("/metrics")).body.decode()
        assert f'smetric_tokenizations_total{{result="ok",source="{source}"}} 1.0' in page
        assert 'smetric_tokenize_checks_total{result="equal"} 1.0' in page
        made = await decision(router)
        assert (made["prompt_len"], made["tokens_source"]) == (len(ids), "exact")
        assert 0 < made["est_hit"] < len(ids)
        assert made["est_hit"] % 16 == 0


async def test_ids_with_wrong_counts_are_dropped(tmp_path: Path) -> None:
    async with routing(tmp_path) as (router, engine, _):
        engine.more = 1
        for _turn in range(5):
            await router.chat(messages=SECOND)
        assert len(engine.questions) == 3
        assert len(router.lines("smetric.tokenize.distrusted")) == 1
        page = (await router.admin("/metrics")).body.decode()
        assert 'smetric_tokenizations_total{result="distrusted",source="engine"} 2.0' in page


async def test_hanging_tokenizer_delays_request_by_lookup_deadline(tmp_path: Path) -> None:
    async with routing(tmp_path, deadline_s=0.1) as (router, engine, asked):

        async def deaf(call: Call) -> None:
            await (hang if call.target == b"/tokenize" else healthy)(call)

        engine.script = deaf
        assert (await router.chat(messages=SECOND)).status == 200
        assert asked == []

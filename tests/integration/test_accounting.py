"""Agreement of ledger, token counts and records under faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from smetric.config.settings import RecordSettings
from smetric.telemetry.metrics import PAGE_TTL_S
from tests.fakes import DONE, USAGE, Call, FakeEngine, RawClient, chunk, delta, head, healthy, request, until
from tests.faults.harness import Running, running
from tests.product import pytest_asyncio_loop_factories  # noqa: F401

pytestmark = pytest.mark.slow

EVENTS = head(200, (b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked"))
CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
#: Hits are looked up for every turn; requests wait while all instances are busy, and very long ones are rejected.
POLICY = """
policy books
reject 429 "too long" when req.prompt_len > 2000
hold for 100ms when min(requests) > 0
route rr_argmin(norm(requests) + norm(unprefilled) - hit_len / req.prompt_len)
"""
ENGINES, CLIENTS, TURNS = 3, 12, 6
#: Metrics that are 0 once all requests have ended.
AT_REST = (
    "smetric_requests_in_progress",
    "smetric_queue_requests",
    "smetric_queue_bytes",
    "smetric_body_bytes",
    "smetric_connections ",
    "smetric_inflight_requests{",
    "smetric_unprefilled_tokens{",
)


async def whole(call: Call) -> None:
    """Stream to the end, with usage."""
    await call.stream(delta("o"), b'data: {"choices":[],%b}\n\n' % USAGE, DONE)


async def slow(call: Call) -> None:
    await asyncio.sleep(0.03)
    await healthy(call)


async def cut(call: Call) -> None:
    await call.send(EVENTS + chunk(delta("a")))
    call.close()


async def torn(call: Call) -> None:
    await call.send(EVENTS + chunk(delta("a")))
    await asyncio.sleep(0.005)
    call.reset()


async def reset(call: Call) -> None:
    call.reset()


async def broken(call: Call) -> None:
    await call.answer(500, b'{"error":{}}')


async def busy(call: Call) -> None:
    await call.answer(503, b'{"error":{}}')


async def bad(call: Call) -> None:
    await call.answer(400, b'{"error":{}}')


SCRIPTS: list[Callable[[Call], Awaitable[None]]] = [whole, slow, healthy, cut, torn, reset, broken, busy, bad]
WEIGHTS = [6, 3, 4, 1, 1, 1, 1, 1, 1]


async def session(router: Running, rng: random.Random, number: int) -> int:
    """Play a conversation whose client may disconnect at any point; return how many requests arrived whole."""
    messages = [{"role": "user", "content": f"{number} " + "word " * (rng.randint(1, 1200) if number else 2000)}]
    arrived = 0
    for turn in range(TURNS):
        fields = {"messages": messages, "stream": rng.random() < 0.7, "n": rng.choice([1, 1, 3]), "max_tokens": 9}
        path = rng.choices([CHAT, MESSAGES, COUNT], [6, 1, 2])[0]
        raw = request("POST", path, orjson.dumps({"model": "tiny", **fields}))
        async with await RawClient.connect(router.url) as client:
            match rng.choices(["read", "leave", "half"], [7, 2, 1])[0]:
                case "read":
                    await client.send(raw)
                    await client.response()
                    arrived += 1
                case "leave":
                    await client.send(raw)
                    await client.head()
                    client.reset()
                    arrived += 1
                case _:
                    await client.send(raw[: len(raw) // 2])
        messages += [{"role": "assistant", "content": f"said {turn}"}, {"role": "user", "content": "and " * 50}]
    return arrived


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("seed", [1, 2])
async def test_ledger_metrics_and_records_agree_after_faults(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    policy, decisions, trace = tmp_path / "books.policy", tmp_path / "decisions.jsonl", tmp_path / "trace.jsonl"
    policy.write_text(POLICY)
    record = RecordSettings(path=str(decisions), trace=str(trace))
    engines = [FakeEngine() for _ in range(ENGINES)]
    async with running(*engines, policy=str(policy), record=record, warm=False, check_after=False) as router:

        async def script(call: Call) -> None:
            await rng.choices(SCRIPTS, WEIGHTS)[0](call)

        for engine in engines:
            engine.script = script
        async with asyncio.TaskGroup() as group:
            sessions = [group.create_task(session(router, rng, number)) for number in range(CLIENTS)]
        await until(lambda: router.counted() == (0, 0, 0))
        for one in router.application.fleet.instances:
            assert (one.uncomputed, one.uncomputed_pairs, one.repeated, one.decoding) == (0, 0, 0, set())
        await asyncio.sleep(PAGE_TTL_S)
        page = {
            start: await router.figure(start)
            for start in (
                *AT_REST,
                "smetric_requests_total{",
                "smetric_prompt_tokens_total{",
                "smetric_prefix_hit_tokens_total{",
                "smetric_hit_tokens_total{",
                "smetric_time_to_first_chunk_seconds_count{",
            )
        }
        told = router.lines("request")
    made = [line for line in lines(decisions) if line["kind"] == "decision"]
    first = [line for line in made if not line["rank"]]
    by_policy = [line for line in first if line["instance"] and line["ids"]]
    looked_up = [line for line in by_policy if len(line["columns"]["hit_len"].get("unknown", ())) < len(line["ids"])]

    def tokens(of: list[dict[str, Any]]) -> int:
        return sum(line["request"]["prompt_len"] for line in of)

    assert {line["outcome"] for line in first} == {"routed", "held", "rejected"}
    assert {line["instance"] is None for line in made if line["rank"]} <= {False}
    assert page == {
        **dict.fromkeys(AT_REST, 0),
        "smetric_requests_total{": len(told),
        "smetric_prompt_tokens_total{": tokens(by_policy),
        "smetric_prefix_hit_tokens_total{": sum(line["hit"]["tokens"] for line in by_policy if line["hit"]),
        "smetric_hit_tokens_total{": tokens(looked_up),
        "smetric_time_to_first_chunk_seconds_count{": sum("ttft_s" in line and line["path"] != COUNT for line in told),
    }
    assert sum(task.result() for task in sessions) <= len(told)
    cells = [value for line in made for column in line["columns"].values() for value in column["values"]]
    assert min(value for value in cells if isinstance(value, int | float)) >= 0
    assert all(line["ttft_s"] is None for line in made if not line["ids"])
    # The trace has each computation once, by the last decision on it.
    traced = [line["chat_id"] for line in lines(trace)]
    assert sorted(traced) == sorted(line["id"] for line in made if line["ids"] and line["instance"] and line["status"])
    assert len(traced) == len(by_policy)

"""Trace of the traffic."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from smetric import names
from smetric.fleet.record import DecisionRecord
from smetric.records.traffic import TRACE_BLOCK_BYTES, Traffic, Trigger, trigger_of
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio, Usage
from tests.fakes import exchange_of
from tests.records.drive import make_writer
from tests.telemetry import samples

# Trigger of a request, by its last message

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "files: a b"}
CALL = {"type": "tool_use", "id": "t1", "name": "ls", "input": {}}
SUMMARY = (
    "Your task is to create a detailed summary of the conversation so far, paying attention to the user's requests."
)


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def read(api: Api, body: dict[str, Any], *headers: tuple[bytes, bytes]) -> InferenceRequest:
    return parse(api, orjson.dumps({"model": "m", **body}), list(headers), TokenRatio(), ReaderSettings())


def last_message(api: Api, body: dict[str, Any]) -> Any:
    prompt = read(api, body).prompt
    assert prompt is not None
    return prompt.last_message()


def trigger(api: Api, messages: list[dict[str, Any]], **more: Any) -> Trigger:
    field = "input" if api is Api.RESPONSES else "messages"
    return trigger_of(last_message(api, {field: messages, **more}))


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([said("user", "list the files")], Trigger.USER),
        ([said("user", "a"), said("assistant", [CALL]), said("user", [RESULT])], Trigger.AGENT),
        (
            [said("user", "a"), said("assistant", [CALL]), said("user", [RESULT, {"type": "text", "text": "note"}])],
            Trigger.AGENT,
        ),
        ([said("user", "a"), said("assistant", "b"), said("user", "c")], Trigger.USER),
        ([said("user", "a"), said("assistant", "b"), said("user", SUMMARY)], Trigger.COMPACTION),
        ([said("user", "a"), said("assistant", [CALL]), said("user", [RESULT, {"type": "text", "text": SUMMARY}])],
         Trigger.COMPACTION),
        ([said("user", "a"), said("assistant", "an answer begun")], Trigger.USER),
        ([said("user", SUMMARY), said("assistant", "b"), said("user", "c")], Trigger.USER),
    ],
)  # fmt: skip
def test_trigger_of_messages(messages: list[dict[str, Any]], wanted: Trigger) -> None:
    assert trigger(Api.MESSAGES, messages, system="be brief", tools=[{"name": "ls"}]) is wanted


def test_trigger_of_chat_reads_tool_messages() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    begun = [said("system", "s"), said("user", "a"), said("assistant", None, tool_calls=[call, call])]
    results = [said("tool", "files", tool_call_id="t1"), said("tool", "more", tool_call_id="t2")]
    assert trigger(Api.CHAT, begun + results) is Trigger.AGENT
    assert trigger(Api.CHAT, [*begun, *results, said("user", "go on")]) is Trigger.USER


def test_trigger_of_responses_reads_output_items() -> None:
    call = {"type": "function_call", "call_id": "t1", "name": "ls", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "t1", "output": "files"}
    assert trigger(Api.RESPONSES, [said("user", "a"), call, output]) is Trigger.AGENT
    assert trigger(Api.RESPONSES, [said("user", "You are performing a CONTEXT CHECKPOINT COMPACTION.")]) is (
        Trigger.COMPACTION
    )


def test_traffic_without_conversation_is_triggered_by_user() -> None:
    assert last_message(Api.COMPLETIONS, {"prompt": SUMMARY}) == []
    assert trigger_of([]) is Trigger.USER


def test_traffic_hashes_the_beginning_of_a_long_message() -> None:
    message = last_message(Api.CHAT, {"messages": [said("user", "x" * 1_000_000)]})
    assert sum(len(text) for _, text in message) < 10_000


# Parents, sessions and bounds

SESSION = b"x-claude-code-session-id"


class Desk:
    """Requests that arrive, are hashed and end, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = make_writer(path, {}, first_line=lambda: b"")
        self.traffic = Traffic(self.writer)
        self.now_ns = 1_700_000_000_000_000_000

    def decide(self, *texts: str, session: str = "", outcome: str = names.ROUTED) -> DecisionRecord:
        """Decide on a request whose conversation has these texts."""
        messages = [said(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
        record = samples.record(outcome)
        record.request = read(Api.CHAT, {"messages": messages}, *[(SESSION, session.encode())] * bool(session))
        self.traffic.decided(exchange_of(record, arrival_ns=self.now_ns), record)
        return record

    def end(self, record: DecisionRecord) -> None:
        self.traffic.ended(exchange_of(record, arrival_ns=self.now_ns))

    async def serve(self, *texts: str, session: str = "", usage: Usage | None = None) -> DecisionRecord:
        """Serve a request whose conversation has these texts."""
        self.now_ns += 5_000_000
        record = self.decide(*texts, session=session)
        await asyncio.sleep(0)
        record.status, record.ttft_s, record.duration_s, record.usage = 200, 0.1, 0.2, usage
        self.end(record)
        return record

    def lines(self) -> list[dict[str, Any]]:
        self.writer.flush()
        text = self.path.read_bytes() if self.path.exists() else b""
        return [orjson.loads(line) for line in text.splitlines()]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path / "trace.jsonl")


async def test_traffic_parent_is_the_request_of_the_prior_prompt(desk: Desk) -> None:
    first = await desk.serve("a" * 5000)
    await desk.serve("b" * 5000)
    await desk.serve("a" * 5000, "answer", "more")
    lines = desk.lines()
    assert [line["parent_chat_id"] for line in lines] == [None, None, first.id]
    assert lines[2]["session"] == lines[0]["session"] != lines[1]["session"]
    assert [line["timestamp"] for line in lines] == [0, 5, 10]
    assert lines[0]["unix_ms"] == 1_700_000_000_005


async def test_timestamps_count_from_the_first_arrival(desk: Desk) -> None:
    arrival_ns, first = desk.now_ns, desk.decide("a")
    await asyncio.sleep(0)
    await desk.serve("b")
    desk.now_ns = arrival_ns
    desk.end(first)
    assert [line["timestamp"] for line in desk.lines()] == [5, 0]


async def test_traffic_parent_follows_the_session_header(desk: Desk) -> None:
    first = await desk.serve("a" * 5000, session="s")
    await desk.serve("edited", "answer", "more", session="s")
    await desk.serve("edited", "answer", "more", session="another")
    assert [line["parent_chat_id"] for line in desk.lines()] == [None, first.id, None]


async def test_traffic_new_conversation_has_no_parent(desk: Desk) -> None:
    await desk.serve("a" * 5000, session="s")
    await desk.serve("b" * 5000, session="s")
    lines = desk.lines()
    assert [line["parent_chat_id"] for line in lines] == [None, None]
    assert lines[0]["session"] == lines[1]["session"]


async def test_hashes_are_equal_within_a_run_only(desk: Desk, tmp_path: Path) -> None:
    blocks = "".join(f"{i:<{TRACE_BLOCK_BYTES // 4}}" for i in range(12))
    await desk.serve(blocks + "one")
    await desk.serve(blocks + "two")
    other = Desk(tmp_path / "other.jsonl")
    await other.serve(blocks + "one")
    (one, two), (elsewhere,) = desk.lines(), other.lines()
    assert one["hash_ids"] == two["hash_ids"]
    assert len(one["hash_ids"]) == len(set(one["hash_ids"])) == 3
    assert set(one["hash_ids"]).isdisjoint(elsewhere["hash_ids"])
    assert one["session"] != elsewhere["session"]
    assert one["model"] != elsewhere["model"]


async def test_lengths_are_those_reported_by_the_instance(desk: Desk) -> None:
    await desk.serve("a" * 4000, usage=Usage(777, 33, 512))
    await desk.serve("b" * 4000)
    counted, estimated = desk.lines()
    assert (counted["input_length"], counted["output_length"], counted["cached_tokens"]) == (777, 33, 512)
    assert 900 < estimated["input_length"] < 1100
    assert (estimated["output_length"], estimated["cached_tokens"]) == (None, None)


async def test_traffic_leaves_out_requests_that_end_before_hashing(desk: Desk) -> None:
    record = desk.decide(outcome=names.REJECTED)
    record.request.let_go()
    desk.end(record)
    await asyncio.sleep(0)
    assert desk.lines() == []
    assert desk.traffic._glances == {}


async def test_traffic_memory_is_bounded(desk: Desk) -> None:
    desk.traffic = Traffic(desk.writer, most_parents=4)
    first = await desk.serve("first " * 900)
    for i in range(20):
        await desk.serve(f"{i} " * 900)
    await desk.serve("first " * 900, "answer", "more")
    assert desk.lines()[-1]["parent_chat_id"] is None
    assert first.id


async def test_traffic_failure_does_not_reach_the_request(desk: Desk) -> None:
    record = desk.decide()
    await asyncio.sleep(0)
    record.status = object()  # type: ignore[assignment]  # simulates a bug
    desk.end(record)
    assert desk.lines() == []

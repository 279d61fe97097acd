"""Records of a whole router."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from click.testing import CliRunner, Result

from smetric.cli import main
from smetric.config.settings import RecordSettings, ShadowSettings
from smetric.files import shipped_policies
from smetric.lab.traces import arrivals
from smetric.records.reader import Reading
from smetric.records.replay import RECORDED, Comparison, Judges, replay
from tests.agent_sessions import Gateway, agents, engines, instances
from tests.fakes import Call, FakeEngine, delta, healthy, until
from tests.faults.harness import CANARY, Running, chat, running
from tests.records.drive import policy

pytestmark = pytest.mark.slow

SESSION = "x-claude-code-session-id"
BY_SESSION = """
policy by_session
reject 429 "not today" when req.tenant == "blue"
route argmax(hrw(req.session)) when req.session != "" as home
route argmin(requests) when bucket(req.id) < 0.9 as spread
route rr_argmin(requests) as rest
"""


def compare(path: Path, name: str = "", **settings: float) -> Comparison:
    acting = policy(shipped_policies()[name].read_text()) if name else None
    found = Comparison(RECORDED, name)
    replay(Reading([path]), Judges(acting, settings), None, found)
    return found


def talk(turns: int, number: int = 0) -> list[dict[str, str]]:
    """A conversation of so many turns, the last one a user's."""
    said = [{"role": "user", "content": f"{CANARY} {number} " + "word " * 900}]
    for turn in range(turns):
        said += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"{CANARY} {turn}"}]
    return said


async def ask(router: Running, turns: int, *headers: tuple[str, str], number: int = 0) -> int:
    body = chat(messages=talk(turns, number))
    return (await router.ask("POST", "/v1/chat/completions", body, *headers)).status


def recording(path: Path, *engines: FakeEngine, **settings: Any) -> AbstractAsyncContextManager[Running]:
    """Run a router that records its decisions to *path* and has decided nothing yet."""
    return running(*engines, record=RecordSettings(path=str(path)), check_after=False, warm=False, **settings)


def written(router: Running, result: str = "written", record: str = "decisions") -> float:
    labels = {"record": record, "result": result}
    return router.application.metrics.registry.get_sample_value("smetric_record_lines_total", labels) or 0.0


async def test_replay_repeats_the_decisions_of_sessions(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl.gz"
    observe = (ShadowSettings(policy="bailian"),)
    async with (
        engines() as fleet,
        recording(path, policy="smetric", instances=instances(fleet), observe=observe) as router,
        aiohttp.ClientSession() as client,
    ):
        gateway, players = Gateway([router.url], client), agents()
        for _ in range(5):
            await gateway.turn(players)
    found = compare(path)
    assert (found.compared, found.agreed, found.renamed.total()) == (5 * len(players), 5 * len(players), 0)
    assert found.rules_after.keys() == {"balance", "stick"}
    assert len(found.instances) == 4
    assert found.late == 0  # it sees what it saw then
    # SMetric never looks up a first turn's hits; as they were observed, Bailian can be asked about it all the same.
    other = compare(path, "bailian")
    assert other.unanswered == Counter()
    assert other.compared == 5 * len(players)
    assert other.late >= len(players)
    assert other.late_s / other.late < 1


@pytest.mark.parametrize("place", ["observe", "shadow"])
async def test_observed_policy_follows_its_file(place: str, tmp_path: Path) -> None:
    path, beside = tmp_path / "decisions.jsonl", tmp_path / "beside.policy"
    beside.write_text("policy beside\nroute rr_argmin(requests)\n")
    settings: dict[str, Any] = {place: (ShadowSettings(policy=str(beside)),)}
    async with recording(path, FakeEngine(), FakeEngine(), tenant_header="x-tenant", **settings) as router:
        assert await ask(router, 0, ("x-tenant", "blue")) == 200
        beside.write_text(
            'policy beside\nreject 429 "no" when req.tenant == "blue"\n'
            "route rr_argmin(norm(decode_blocks) + req.class_share)\n"
        )
        await until(lambda: router.lines("smetric.policy.reloaded") != [], within_s=10)
        assert await ask(router, 0, ("x-tenant", "blue")) == 200
        beside.write_text("policy beside\nroute argmin(nonsense)\n")
        await until(lambda: router.lines("smetric.policy.kept") != [], within_s=10)
        (line,) = router.lines("smetric.policy.kept")
        assert line["route"] == {"observe": "observe-1", "shadow": "default:shadow-1"}[place]
        page = (await router.admin("/metrics")).body
        assert b'smetric_policy_reloads_total{result="ok"} 1.0' in page
    before, after = list(Reading([path]))
    assert "decode_blocks" not in before.line.columns
    assert after.line.columns.keys() >= {"requests", "decode_blocks"}
    assert set(after.policy.fields) - set(before.policy.fields) == {"tenant", "class_share"}
    assert after.line.request.tenant == "blue"  # as the policy beside names it


async def test_observed_parameter_decides_the_recorded_features(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    observed = ShadowSettings(policy="smetric", params={"LOAD": "unprefilled"})
    async with recording(path, FakeEngine(), observe=(observed,)) as router:
        assert await ask(router, 0) == 200
    (one,) = Reading([path])
    assert "unprefilled" in one.line.columns


async def explained(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, ["explain", *arguments])


async def test_explanation_is_the_same_from_record_and_router(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with recording(path, *(FakeEngine() for _ in range(3)), policy="smetric") as router:
        answers = [await router.chat(messages=talk(turn)) for turn in range(3)]
        await until(lambda: written(router) == 3)
        for answer in answers:
            decision = ("--decision", answer.value("x-smetric-decision-id"))
            for what in ((), ("--set", "OVERLOAD=1.5"), ("load_only",)):
                kept = await explained(*what, *decision, "--admin", router.admin_url)
                recorded = await explained(*what, *decision, "--record", str(path))
                assert kept.exit_code == 0, kept.output
                assert kept.output == recorded.output
            kept = await explained(*decision, "--admin", router.admin_url)
            assert kept.output.startswith("smetric: route to e")
            assert "\n  flips at " in kept.output
            assert "\nanswered 200 after " in kept.output
        first = answers[0].value("x-smetric-decision-id")
        unread = await explained("bailian", "--decision", first, "--admin", router.admin_url)
        assert (unread.exit_code, "not answerable: hit_len not read" in unread.output) == (1, True)
        kept_record = await router.admin(f"/admin/decisions/{first}/record")
        assert CANARY.encode() not in kept_record.body


async def test_explanation_marks_a_running_request() -> None:
    may_answer = asyncio.Event()

    async def slow(call: Call) -> None:
        await may_answer.wait()
        await healthy(call)

    async with running(FakeEngine(slow), policy="smetric", check_after=False, warm=False) as router:
        asked = asyncio.create_task(router.chat())
        await until(lambda: len(router.application.telemetry.decisions) == 1)
        (record,) = router.application.telemetry.decisions.recent(1)
        kept = await explained("--decision", record.id, "--admin", router.admin_url)
        assert kept.output.endswith("not answered yet, or another decision of the same request followed\n")
        may_answer.set()
        assert (await asked).status == 200


async def test_record_replaces_client_texts_by_pseudonyms(tmp_path: Path) -> None:
    path, acting = tmp_path / "decisions.jsonl", tmp_path / "by_session.policy"
    acting.write_text(BY_SESSION)
    engines = (FakeEngine() for _ in range(3))
    async with recording(path, *engines, policy=str(acting), tenant_header="x-tenant") as router:
        statuses = [
            await ask(router, turns, (SESSION, session), ("x-tenant", tenant), ("x-request-id", f"{CANARY}-{turns}"))
            for session in ("", f"{CANARY}-1", f"{CANARY}-2")
            for tenant in ("blue", f"{CANARY}-tenant")
            for turns in range(6)
        ]
    assert Counter(statuses) == {200: 18, 429: 18}
    text = path.read_bytes()
    assert CANARY.encode() not in text
    assert b'"tenant":"blue"' in text
    found = compare(path)
    assert found.compared == found.agreed == 36
    assert found.renamed.total() == 0
    assert found.rules_after.keys() >= {"reject_1", "home", "spread"}


async def test_record_line_has_the_end_of_its_request(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"

    async def broken(call: Any) -> None:
        await call.answer(500, b"{}")

    pair = FakeEngine(), FakeEngine()
    async with running(*pair, record=RecordSettings(path=str(path)), check_after=False) as router:
        before = written(router)
        pair[0].script = broken
        answers = [await router.ask("POST", "/v1/chat/completions", chat()) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]
        ids = [answer.value("x-smetric-decision-id") for answer in answers]
        await until(lambda: written(router) >= before + 4)
    lines = [one.line for one in Reading([path])][-4:]
    # Both were sent to the broken engine first, and then elsewhere.
    assert [(line.rank, line.instance, line.status) for line in lines] == [(0, "e0", None), (1, "e1", 200)] * 2
    assert [line.id for line in lines if line.status == 200] == ids
    assert all(line.usage and line.usage.cached_tokens == 16 for line in lines if line.status == 200)
    assert all(line.duration_s and line.ttft_s for line in lines if line.status == 200)


async def test_failing_disk_costs_record_lines_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    record = RecordSettings(path=str(tmp_path / "file" / "decisions.jsonl"))
    async with running(FakeEngine(), record=record) as router:
        assert [await ask(router, 0) for _ in range(5)] == [200] * 5
        await until(lambda: written(router, "failed") >= 5)
        assert len(router.lines("smetric.record.not_written")) == 1


async def test_traffic_record_is_a_trace_with_sessions_and_parents(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with running(FakeEngine(), record=RecordSettings(trace=str(path)), check_after=False) as router:
        for turns in range(3):
            assert await ask(router, turns, (SESSION, f"{CANARY}-1")) == 200
        assert await ask(router, 0, number=1) == 200
        assert await ask(router, 1, number=1) == 200
        await router.ask("POST", "/v1/embeddings", b'{"model":"tiny","input":"x"}')
        await asyncio.sleep(0)
    text = path.read_bytes()
    assert CANARY.encode() not in text
    lines = [orjson.loads(line) for line in text.splitlines()][1:]  # the first one warmed it up
    named, other = lines[:3], lines[3:]
    assert [line["turn"] for line in lines] == [0, 1, 2, 0, 1]
    assert [line["parent_chat_id"] for line in named] == [None, named[0]["chat_id"], named[1]["chat_id"]]
    assert [line["parent_chat_id"] for line in other] == [None, other[0]["chat_id"]]
    assert len({line["session"] for line in named}) == len({line["session"] for line in other}) == 1
    assert named[0]["session"] != other[0]["session"]
    assert named[0]["hash_ids"] == named[1]["hash_ids"] == named[2]["hash_ids"] != []
    assert set(named[0]["hash_ids"]).isdisjoint(other[0]["hash_ids"])
    assert all(0 <= id < 2**53 for id in named[0]["hash_ids"])
    assert {line["trigger"] for line in lines} == {"user"}
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    for line in lines:
        assert (line["status"], line["input_length"], line["output_length"], line["cached_tokens"]) == (200, 20, 2, 16)
        assert 0 < line["ttft_ms"] <= line["duration_ms"]
    simulated = arrivals([path])[1:]
    assert [(one.id, one.parent) for one in simulated] == [
        (line["chat_id"], line["parent_chat_id"] or "") for line in lines
    ]
    assert {(one.sequence.prompt_len, one.sequence.output_len) for one in simulated} == {(20, 2)}


async def test_traffic_record_marks_a_broken_stream_as_incomplete(tmp_path: Path) -> None:
    async def broken(call: Call) -> None:
        await call.stream(delta("a"), end=False)
        call.close()

    path = tmp_path / "trace.jsonl"
    async with running(FakeEngine(), record=RecordSettings(trace=str(path)), check_after=False) as router:
        router.engines[0].script = broken
        await router.chat(stream=True)
        await asyncio.sleep(0)
    whole, torn = map(orjson.loads, path.read_bytes().splitlines())
    assert [(line["status"], line["error_type"]) for line in (whole, torn)] == [(200, ""), (200, "upstream_closed")]
    assert [one.id for one in arrivals([path])] == [whole["chat_id"]]

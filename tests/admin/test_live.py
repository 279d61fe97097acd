"""Live page: decision details, what-if and routes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from smetric import names
from smetric.admin.feed import MOST_VIEWERS, DecisionFilter
from smetric.admin.live import IN_FORCE, MOST_ROWS, OtherPolicies, account
from smetric.config.settings import Admin, ShadowSettings
from smetric.fleet.record import DecisionRecord, Migration
from tests.fakes import FakeEngine, RawClient, request
from tests.faults.harness import Running, running
from tests.records.drive import Fleet, policy
from tests.telemetry import samples


def test_table_has_value_age_and_source_of_each_cell() -> None:
    record = samples.record(hits=(0, 880, 0), loads=(2, 3, 1), known=[False, True, True])
    table = account(record)["table"]
    assert [column["name"] for column in table["columns"]] == ["requests", "hit_len"] or [
        column["name"] for column in table["columns"]
    ] == ["hit_len", "requests"]
    hit = next(i for i, column in enumerate(table["columns"]) if column["name"] == "hit_len")
    assert table["columns"][hit]["unit"] == "tokens"
    rows = {row["id"]: row for row in table["rows"]}
    assert rows["gpu-1"]["chosen"]
    assert rows["gpu-1"]["cells"][hit]["value"] == "880"
    assert rows["gpu-0"]["cells"][hit] == {"value": "0", "unknown": True}


def test_rules_have_both_sides_of_comparisons_and_their_lines() -> None:
    record = samples.record(hits=(0, 880, 0), loads=(0, 30, 1))
    told = account(record)
    full, stick, balance = told["rules"]
    assert (full["kind"], full["result"]) == ("reject", "passed over")
    assert stick["guards"] == [
        {"guard": "req.turn != 0", "held": True, "numbers": "req.turn is 3"},
        {"guard": "not_overloaded", "held": False, "numbers": "30 > 2 × 10.33"},
    ]
    assert (balance["fired"], balance["result"]) == (True, "fired")
    first, last = balance["lines"]
    assert told["text"].splitlines()[first - 1 : last] == ["route rr_argmin(requests) as balance"]


def test_rules_mark_those_not_reached() -> None:
    told = account(samples.record(names.REJECTED))
    assert [rule["result"] for rule in told["rules"]] == ["fired", "not reached", "not reached"]
    assert [rule["fired"] for rule in told["rules"]] == [True, False, False]


def test_table_always_shows_the_instance_a_migration_left() -> None:
    count = MOST_ROWS + 40
    hits = [0.0] * (count - 1) + [880.0]
    record = samples.record(hits=hits, loads=[1.0] * (count - 1) + [2000.0])
    record.migration = Migration(f"gpu-{count - 1}", "not_overloaded", 880)
    table = account(record)["table"]
    assert len(table["rows"]) == MOST_ROWS
    assert table["more"] == count - MOST_ROWS
    assert [row["id"] for row in table["rows"] if row.get("left")] == [table["rows"][1]["id"]] == [f"gpu-{count - 1}"]


def test_decision_without_a_policy_has_a_sentence_only() -> None:
    told = account(samples.record(names.PINNED))
    assert "table" not in told
    assert told["sentence"].startswith("pinned: ")


# What-if: the choice of another policy.

REJECT = 'policy strict\nreject {} "no" when req.turn == 0\nroute rr_argmin(requests)\n'
HOLD = "policy patient\nhold for 5s when req.turn == 0\nroute rr_argmin(requests)\n"


@pytest.mark.parametrize(("other", "agrees"), [(REJECT.format(503), True), (REJECT.format(429), False), (HOLD, False)])
async def test_what_if_compares_reasons_of_refusals(other: str, agrees: bool) -> None:
    fleet = Fleet(random.Random(3), 4)
    record = fleet.decide(policy(REJECT.format(503)), fleet.request(turn=0))
    assert record.instance is None
    others = OtherPolicies(lambda: {"other": policy(other)}, {})
    assert (await others.judge(record, f"{IN_FORCE}other"))["agrees"] is agrees


pytestmark = pytest.mark.slow

FILES = [file.name for file in (Path(__file__).parents[2] / "smetric" / "admin" / "ui").iterdir()]
TOKEN = "a-token-of-some-length"


def fresh(*engines: FakeEngine, **settings: Any) -> AbstractAsyncContextManager[Running]:
    """A router that has decided nothing yet."""
    return running(*engines, policy="smetric", warm=False, check_after=False, **settings)


@asynccontextmanager
async def stream(router: Running, query: str = "", token: str = "") -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The events of the feed, as name and data."""

    async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
        name = ""
        async for line in answer.content:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield name, orjson.loads(line[6:])

    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with (
        asyncio.timeout(10),
        aiohttp.ClientSession(read_bufsize=1 << 20) as client,
        client.get(f"{router.admin_url}/admin/decisions/stream{query}", headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events(answer)


async def of_kind(events: AsyncIterator[tuple[str, Any]], kind: str) -> Any:
    async for name, data in events:
        if name == kind:
            return data
    raise AssertionError(f"the stream ended without {kind}")


async def test_page_has_a_strict_content_security_policy_and_etags() -> None:
    async with fresh(FakeEngine()) as router:
        for path in ("/admin/ui", *(f"/admin/ui/{name}" for name in FILES)):
            answer = await router.admin(path)
            assert answer.status == 200, path
            assert answer.value("content-security-policy").startswith("default-src 'self'; ")
            assert answer.value("x-content-type-options") == "nosniff"
        page = (await router.admin("/admin/ui")).body
        assert b"<style" not in page
        assert b" style=" not in page
        assert b"http" not in page
        assert (await router.admin("/admin/ui/nothing.js")).status == 404
        assert (await router.admin("/admin/ui/..%2Fapp.py")).status == 404
        same = {"if-none-match": answer.value("etag")}
        async with aiohttp.ClientSession() as client, client.get(router.admin_url + path, headers=same) as unchanged:
            assert (unchanged.status, await unchanged.read()) == (304, b"")


async def test_stream_begins_with_the_past_and_continues() -> None:
    async with fresh(FakeEngine()) as router:
        first = (await router.chat()).value("x-smetric-decision-id")
        async with stream(router) as events:
            history = await of_kind(events, "history")
            assert set(history) == {"times_ms", "loads", "series"}
            state = await of_kind(events, "state")
            assert [row["id"] for row in state["instances"]] == ["e0"]
            assert state["policies"][0]["name"] == "smetric"
            assert "bailian" in state["what_if"]
            assert [row["id"] for row in (await of_kind(events, "decisions"))["rows"]] == [first]
            second = (await router.chat()).value("x-smetric-decision-id")
            (row,) = (await of_kind(events, "decisions"))["rows"]
            assert (row["id"], row["instance"], row["rule"]) == (second, "e0", "balance")
            assert row["sentence"].startswith("balance: e0")


async def test_stream_answers_head_without_a_body() -> None:
    async with fresh(FakeEngine()) as router, await RawClient.connect(router.admin_url) as client:
        await client.send(request("HEAD", "/admin/decisions/stream") + request("GET", "/healthz"))
        head = await client.response("HEAD")
        assert (head.status, head.value("content-type")) == (200, "text/event-stream; charset=utf-8")
        assert (await client.response()).body == b"ok\n"


async def test_state_lists_acting_policies_and_all_for_what_if() -> None:
    async with fresh(FakeEngine(), shadow=(ShadowSettings(policy="bailian"),)) as router:
        state = orjson.loads((await router.admin("/admin/state")).body)
        assert [(one["route"], one["name"], one["generation"]) for one in state["policies"]] == [
            ("default", "smetric", 1)
        ]
        assert [name for name in state["what_if"] if name.startswith("in force: ")] == [
            *("in force: default", "in force: default:shadow-1"),
        ]


async def test_stream_sends_the_end_of_each_decision() -> None:
    async with fresh(FakeEngine()) as router:
        gate = asyncio.Event()
        answer_well = router.engines[0].script

        async def script(call: Any) -> None:
            await gate.wait()
            await answer_well(call)

        async with stream(router, "?history=0") as events:
            await of_kind(events, "state")
            router.engines[0].script = script
            asked = asyncio.create_task(router.chat())
            (row,) = (await of_kind(events, "decisions"))["rows"]
            assert row["status"] is None
            gate.set()
            (end,) = await of_kind(events, "ended")
            assert (end["id"], end["status"]) == (row["id"], 200)
            assert end["duration_s"] > 0
            await asked


async def test_filter_applies_before_sampling() -> None:
    async with fresh(FakeEngine(), FakeEngine()) as router:
        ids = {(answer := await router.chat()).value("x-smetric-instance"): answer for _ in range(2)}
        assert set(ids) == {"e0", "e1"}
        async with stream(router, "?history=0&instance=e1&rule=balance") as events:
            data = await of_kind(events, "decisions")
            assert [row["instance"] for row in data["rows"]] == ["e1"]


async def test_invalid_filter_is_refused() -> None:
    async with fresh(FakeEngine()) as router:
        for query, problem in (
            ("outcome=good", "outcome='good': one of routed, pinned, held, rejected, no_candidate, error, or odd"),
            ("margin=7", "margin='7': a share between 0 and 1, such as 0.05"),
            ("migrated=yes", "migrated='yes': 0 or 1"),
            (f"text={'x' * 201}", "text: longer than 200 characters"),
        ):
            answer = await router.admin(f"/admin/decisions/stream?{query}")
            assert (answer.status, orjson.loads(answer.body)) == (400, {"error": problem})


async def test_disconnected_viewer_leaves_nothing_behind() -> None:
    async with running(FakeEngine()) as router, stream(router) as events:
        await of_kind(events, "state")
        assert (await router.chat()).status == 200
        await of_kind(events, "decisions")


async def test_viewers_are_bounded_and_free_their_slots() -> None:
    async with fresh(FakeEngine()) as router:
        feed = router.application.live.feed
        async with stream(router, "?history=0") as events:
            await of_kind(events, "state")
            others = [feed.join(DecisionFilter(), history=False) for _ in range(MOST_VIEWERS - 1)]
            answer = await router.admin("/admin/decisions/stream")
            assert (answer.status, orjson.loads(answer.body)["error"]) == (503, "16 viewers already; close a page")
            for one in others:
                feed.leave(one)
        async with stream(router, "?history=0") as events:
            assert await of_kind(events, "state")


async def test_token_guards_the_data_but_not_the_page() -> None:
    async with fresh(FakeEngine(), admin=Admin(port=0, token=TOKEN)) as router:
        id = (await router.chat()).value("x-smetric-decision-id")
        assert (await router.admin("/admin/ui")).status == 200
        assert (await router.admin("/admin/ui/main.js")).status == 200
        for path in ("state", "decisions/stream", f"decisions/{id}/account", f"decisions/{id}/what-if?policy=bailian"):
            assert (await router.admin(f"/admin/{path}")).status == 401, path
        async with stream(router, token=TOKEN) as events:
            assert await of_kind(events, "state")


async def test_decision_detail_is_complete() -> None:
    async with fresh(FakeEngine(), FakeEngine()) as router:
        id = (await router.chat()).value("x-smetric-decision-id")
        account = orjson.loads((await router.admin(f"/admin/decisions/{id}/account")).body)
        stick, balance = account["rules"]
        assert [guard["held"] for guard in stick["guards"]] == [False, None, None]
        assert stick["guards"][0]["numbers"] == "req.turn is 0"
        assert (stick["fired"], balance["fired"]) == (False, True)
        first, last = balance["lines"]
        assert account["text"].splitlines()[first - 1 : last] == ["route rr_argmin(l)                       as balance"]
        assert [column["name"] for column in account["table"]["columns"]] == ["requests"]
        assert [row.get("chosen", False) for row in account["table"]["rows"]] == [True, False]
        assert (await router.admin("/admin/decisions/nothing/account")).status == 404


async def test_what_if_gives_the_choice_of_another_policy() -> None:
    async with fresh(FakeEngine(), FakeEngine()) as router:
        answer = await router.chat()
        id, instance = answer.value("x-smetric-decision-id"), answer.value("x-smetric-instance")

        async def would(policy: str) -> Any:
            return orjson.loads((await router.admin(f"/admin/decisions/{id}/what-if?policy={policy}")).body)

        # A first turn looks no hit up, and what was not read is not made up.
        assert (await would("bailian"))["why"] == "not answerable: hit_len not read"
        found = await would("load_only")
        assert found["answerable"]
        assert found["origin"] == "replay"
        assert found["instance"] in ("e0", "e1")
        same = await would("in%20force:%20default")
        assert (same["instance"], same["agrees"], same["rule"]) == (instance, True, "balance")
        assert (await would("nothing"))["error"].startswith("no such policy; there are ")


async def test_what_if_reports_a_bug_as_500_not_as_an_unknown_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: OtherPolicies, record: DecisionRecord, name: str) -> Any:
        raise KeyError(name)

    monkeypatch.setattr(OtherPolicies, "judge", broken)
    async with fresh(FakeEngine()) as router:
        id = (await router.chat()).value("x-smetric-decision-id")
        assert (await router.admin(f"/admin/decisions/{id}/what-if?policy=bailian")).status == 500
        assert (await router.admin(f"/admin/decisions/{id}/what-if?policy=nothing")).status == 404
        assert (await router.admin(f"/admin/decisions/{id}/what-if")).status == 400

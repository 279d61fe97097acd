from __future__ import annotations

import asyncio
import gc
import weakref

import orjson

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.record import decision_id
from smetric.policy import Snapshot
from smetric.request.prompt import BlockKeys, Prompt
from smetric.request.request import Usage
from smetric.telemetry.decisions import AT_HAND, Activity, AtHand, DecisionLog, brief, full
from tests.fakes import exchange_of
from tests.telemetry.samples import fleet, record, run_one, telemetry


def test_decision_ids_are_ulids_in_order_of_time() -> None:
    ids = [decision_id(ms * 1_000_000) for ms in range(1_700_000_000_000, 1_700_000_000_050)]
    assert ids == sorted(ids)
    assert all(len(each) == 26 and set(each) <= set("0123456789ABCDEFGHJKMNPQRSTVWXYZ") for each in ids)
    assert decision_id(0)[:10] == "0" * 10
    # The worked example of the ULID specification.
    assert decision_id(1_469_918_176_385 * 1_000_000)[:10] == "01ARYZ6S41"


def test_decision_log_keeps_the_newest_and_finds_by_id() -> None:
    log = DecisionLog(kept=3)
    made = [record() for _ in range(5)]
    for each in made:
        log.decided(exchange_of(), each)
    assert log.recent(10) == made[:1:-1]
    assert log.recent(1) == [made[4]]
    assert log.recent(-1) == []
    assert log.get(made[0].id) is None
    assert log.get(made[2].id) is made[2]
    assert len(log) == 3


def test_decision_log_keeps_fewer_decisions_with_large_tables() -> None:
    log = DecisionLog(max_tables=20_000)
    made = [record(hits=[0.0] * 40, loads=[1.0] * 40) for _ in range(5)]
    for each in made:
        log.decided(exchange_of(), each)
    assert log.recent(10) == made[:1:-1]
    log.sampled(Snapshot(["a"] * 100, {"running": [1.0] * 100, "waiting": [0.0] * 100}))
    for each in made[:3]:  # they share the sample
        log.decided(exchange_of(), each)
    assert log.recent(10) == made[2:0:-1]
    assert made[1].at_hand is made[2].at_hand is not None
    made[0].beside = ((Snapshot(["a"], {"running": [1.0], "waiting": [0.0]}), None),) * 400
    log.decided(exchange_of(), made[0])
    assert log.recent(10) == [made[0]]
    log.decided(exchange_of(), record(names.PINNED))
    assert len(log) == 1


async def test_sample_has_every_feature_that_needs_no_look_up() -> None:
    log, instances = DecisionLog(), fleet()
    sampler = AtHand(Fleet(instances, VOCABULARY), log)
    await sampler.start()
    await asyncio.sleep(0)
    await sampler.stop()
    made = record(instances=instances)
    log.decided(exchange_of(), made)
    assert made.at_hand is not None
    assert made.at_hand.columns.keys() == AT_HAND
    assert {"running", "waiting", "kv_usage", "unprefilled", "pool", "healthy"} < AT_HAND
    assert not AT_HAND & {"hit_len", "decode_blocks"}


def test_full_shows_table_and_result() -> None:
    app = telemetry()
    made = record(loads=(2, 30, 1), time_ns=1_700_000_000_123_000_000)
    run_one(app, made)
    made.usage = Usage(1000, 5, 0)
    shown = orjson.loads(orjson.dumps(full(made)))
    assert shown["time"] == "2023-11-14T22:13:20.123+00:00"
    assert shown["outcome"] == "routed"
    assert shown["rule"] == "balance"
    assert shown["instance"] == "gpu-2"
    assert shown["status"] == 200
    assert shown["usage"] == {"prompt_tokens": 1000, "completion_tokens": 5, "cached_tokens": 0}
    assert shown["hit"] == {"tokens": 0, "source": "prefix_index"}
    assert shown["candidates"][0]["id"] == "gpu-2"
    assert shown["candidate_count"] == 3
    stick = next(each for each in shown["guards"] if each["rule"] == "stick")
    assert {"guard": "req.turn != 0", "held": True} in stick["guards"]
    assert {"guard": "not_overloaded", "held": False} in stick["guards"]
    assert "gpu-2" in shown["explanation"]
    assert "s-1" not in str(shown)
    assert set(brief(made)) <= set(shown)


def test_full_shows_outcomes_without_a_policy() -> None:
    for outcome in (names.PINNED, names.NO_CANDIDATE, names.ERROR):
        shown = orjson.loads(orjson.dumps(full(record(outcome))))
        assert shown["outcome"] == outcome
        assert shown["summary"]
        assert "explanation" not in shown


def test_full_shows_a_rejection() -> None:
    shown = orjson.loads(orjson.dumps(full(record(names.REJECTED))))
    assert shown["instance"] is None
    assert shown["rule"] == "full"
    assert not any(row.get("chosen") for row in shown["candidates"])


class Body(Prompt):
    """A prompt that can be referred to weakly."""


def test_decision_log_keeps_no_body_alive() -> None:
    app = telemetry()
    made = record()
    body = Body([b"how are you"], 4.0)
    gone = weakref.ref(body)
    made.request.prompt, made.request.block_keys = body, {16: BlockKeys([1] * 16, 16)}
    del body
    run_one(app, made)
    gc.collect()
    assert gone() is None
    assert not made.request.block_keys
    assert app.decisions.get(made.id) is made
    assert (made.status, made.ttft_s is not None) == (200, True)


def test_activity_returns_each_record_once_in_order() -> None:
    activity = Activity()
    first, second = record(), record()
    activity.decided(exchange_of(), first)
    activity.decided(exchange_of(), second)
    activity.ended(exchange_of(first))
    assert activity.take() == ([first, second], [first])
    assert activity.take() == ([], [])


def test_activity_keeps_the_latest_records() -> None:
    activity = Activity(most=2)
    records = [record() for _ in range(3)]
    for one in records:
        activity.decided(exchange_of(), one)
    assert activity.take() == (records[1:], [])

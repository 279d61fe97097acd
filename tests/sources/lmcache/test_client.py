"""Client of the lookup services: wire formats, failures, suspension."""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from smetric import names
from smetric.http import addresses
from smetric.sources.lmcache import client
from smetric.sources.lmcache.client import (
    DISK,
    HOST,
    INLINE_TOKENS,
    MAX_ANSWER_BYTES,
    NOTHING,
    Controller,
    Coordinator,
    LmcacheHits,
    LmcacheQuestion,
    LookupService,
    UnreadableError,
)
from tests.fakes import Call, chunk, hang, head, until
from tests.resolver import Resolver
from tests.sources.lmcache import captures
from tests.sources.lmcache.captures import exchange, question
from tests.sources.lmcache.fakes import JSON, answering, asking, request

#: Both A's and B's prefixes of 1,024 tokens.
BOTH = exchange("coordinator_20_lookup_both")[2]
HELD = LmcacheHits(host={"mpA": 1024, "mpB": 512}, own={"mpA": 1024, "mpB": 512}, shared=1024)

#: How captures that are no answers count: 4xx blames the question, all else the service.
REFUSED = {400, 413, 422}


@pytest.mark.parametrize("name", captures.names("c", "mpreal"))
async def test_client_takes_every_capture_and_refusals_do_not_suspend(name: str) -> None:
    _, status, body = exchange(name)
    kind: LookupService = Controller() if name.startswith("controller") else Coordinator(256, 1)
    async with asking(answering(status, body), service=kind, failures=1) as asked:
        holdings = await asked.lookup.of(request())
        assert len(asked.service.calls) == 1
        if status == 200:
            assert asked.results[0] in (names.LOOKUP_OK, names.LOOKUP_UNREADABLE)
        else:
            assert (asked.results, holdings) == ([names.LOOKUP_HTTP_ERROR], NOTHING)
            assert asked.suspended == ([] if status in REFUSED else [True])


async def test_client_posts_question_and_reads_answer() -> None:
    async with asking(answering(200, BOTH)) as asked:
        assert await asked.lookup.of(request()) == HELD
        (call,) = asked.service.calls
        assert (call.method, call.target) == (b"POST", b"/directory/lookup")
        assert call.values(b"content-type") == [b"application/json"]
        assert asked.questions == [
            {"token_ids": list(range(1000, 2024)), "model_name": "m/test-model", "world_size": 1, "cache_salt": ""}
        ]


async def test_client_keeps_address_while_resolver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = Resolver("127.0.0.1")
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    monkeypatch.setattr(client, "resolve", resolver)

    async def once(call: Call) -> None:
        await call.answer(200, BOTH, JSON, (b"connection", b"close"))

    async with asking(once, host="lmcache.test") as asked:
        assert await asked.lookup.of(request()) == HELD
        resolver.found = ()
        asked.clock.now += 1.0
        assert await asked.lookup.of(request()) == HELD
        assert len(resolver.asked) == 2


async def test_client_suspends_unreachable_service_and_resumes() -> None:
    async with asking(answering(200, BOTH)) as asked:
        port = int(asked.service.url.rpartition(":")[2])
        await asked.service.stop()
        with capture_logs() as logs:
            for _ in range(5):
                assert await asked.lookup.of(request()) is NOTHING
            assert asked.results == [names.LOOKUP_CONNECT_ERROR] * 3 + [names.LOOKUP_SUSPENDED] * 2
            assert asked.suspended == [True]
            await asked.service.start(port)
            assert await asked.lookup.of(request()) is NOTHING
            asked.clock.now += 5.0
            assert await asked.lookup.of(request()) == HELD
            assert asked.suspended == [True, False]
        assert [(line["event"], line["log_level"]) for line in logs] == [
            ("smetric.lookup.suspended", "warning"),
            ("smetric.lookup.resumed", "info"),
        ]


async def test_client_aborts_and_suspends_hanging_service() -> None:
    async with asking(hang, deadline_s=0.2, clock=time.monotonic) as asked:
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asked.lookup.of(request())
            assert time.monotonic() - started < 2.0
        assert asked.results == [names.LOOKUP_LATE] * 3
        assert asked.suspended == [True]
        assert await asked.lookup.of(request()) is NOTHING
        await until(lambda: len(asked.service.aborted) == 3)


async def test_client_ignores_disconnect_as_failure() -> None:
    async with asking(hang, failures=1, deadline_s=30.0, clock=time.monotonic) as asked:
        asking_it = asyncio.create_task(asked.lookup.of(request()))
        await until(lambda: len(asked.service.calls) == 1)
        asking_it.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking_it
        assert (asked.results, asked.suspended) == ([], [])
        await until(lambda: len(asked.service.aborted) == 1)


async def test_client_ignores_slow_tokens_as_failure() -> None:
    async with asking(answering(200, BOTH), failures=1, deadline_s=0.05, clock=time.monotonic) as asked:
        asked.ids.delay_s = 5.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asked.lookup.of(request())
        assert (asked.service.calls, asked.suspended) == ([], [])


async def endless(call: Call) -> None:
    await call.send(head(200, JSON, (b"transfer-encoding", b"chunked")))
    while True:
        await call.send(chunk(b" " * 65536))


async def nonsense(call: Call) -> None:
    await call.send(b"SMTP ready\r\n\r\n")
    call.close()


async def cut_short(call: Call) -> None:
    await call.send(head(200, JSON, (b"content-length", b"%d" % len(BOTH))) + BOTH[:-1])
    call.close()


async def encoded(call: Call) -> None:
    await call.answer(200, BOTH, JSON, (b"content-encoding", b"gzip"))


async def elsewhere(call: Call) -> None:
    await call.answer(307, b"", (b"location", b"http://127.0.0.1:1/directory/lookup"))


@pytest.mark.parametrize("script", [endless, nonsense, cut_short, encoded, elsewhere, answering(200, b"{}")])
async def test_client_suspends_service_with_invalid_answers(script: Any) -> None:
    async with asking(script, failures=2) as asked:
        for _ in range(3):
            assert await asked.lookup.of(request()) is NOTHING
        assert asked.suspended == [True]
        assert len(asked.service.calls) == 2
        assert names.LOOKUP_OK not in asked.results
        assert set(asked.results) <= set(names.LOOKUP_RESULTS)


@pytest.mark.parametrize(("chunks", "holders"), [(4, 1000), (512, 100), (3906, 30)])
def test_coordinator_bound_fits_real_answers(chunks: int, holders: int) -> None:
    tokens, placement = 256 * len("123456,"), len('{"instance_id":"gpu-12","incarnation":1795986298,"tier":"l1",')
    placement += len('"backend":"dram","size_bytes":1048576,"shared":false},')
    question = LmcacheQuestion(array("I", bytes(4 * 256 * chunks)), "m", "")
    bound = min(Coordinator(256, 1).largest(question), MAX_ANSWER_BYTES)
    assert chunks * (250 + tokens + holders * placement) < bound


class Threads(Coordinator):
    """Notes which threads it works in."""

    def __init__(self) -> None:
        super().__init__(256, 1)
        self.seen: list[bool] = []

    def body(self, question: LmcacheQuestion) -> bytes:
        self.seen.append(threading.current_thread() is threading.main_thread())
        return super().body(question)

    def read(self, body: bytes, question: LmcacheQuestion) -> LmcacheHits:
        self.seen.append(threading.current_thread() is threading.main_thread())
        return NOTHING


@pytest.mark.parametrize("tokens", [INLINE_TOKENS, INLINE_TOKENS + 256])
async def test_client_encodes_long_prompts_in_a_thread(tokens: int) -> None:
    kind = Threads()
    async with asking(answering(200, b"{}"), service=kind, ids=range(tokens)) as asked:
        await asked.lookup.of(request())
        assert kind.seen == [tokens <= INLINE_TOKENS] * 2


class Broken(Coordinator):
    """Has a bug."""

    def read(self, body: bytes, question: LmcacheQuestion) -> LmcacheHits:
        raise ZeroDivisionError


async def test_client_survives_bug_during_trial_request() -> None:
    kind = Broken(256, 1)
    async with asking(answering(500, b""), service=kind, failures=1) as asked:
        await asked.lookup.of(request())
        asked.service.script = answering(200, BOTH)
        asked.clock.now += 5.0
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await asked.lookup.of(request())
        assert len(asked.service.calls) == 3


async def test_client_asks_nothing_once_stopped() -> None:
    async with asking(answering(200, BOTH)) as asked:
        await asked.lookup.stop()
        await asked.lookup.stop()
        assert await asked.lookup.of(request()) is NOTHING
        assert asked.service.calls == []


CHUNK = 256

A_ALONE = LmcacheHits(host={"instA": 1024}, own={"instA": 1024})

#: Captures answered 200: tokens asked for, and what may be read from the answer.
CONTROLLER_READINGS = {
    "controller_00_lookup_no_workers": (1024, NOTHING),
    "controller_10_lookup_hit_one": (1024, A_ALONE),
    "controller_11_lookup_partial_hit": (1024, LmcacheHits(host={"instA": 512}, own={"instA": 512})),
    "controller_12_lookup_partial_last_chunk": (1024, A_ALONE),
    "controller_13_lookup_short_of_chunk": (256, LmcacheHits(host={"instA": 256}, own={"instA": 256})),
    "controller_14_lookup_miss": (1024, NOTHING),
    "controller_15_lookup_empty_tokens": (256, NOTHING),
    # A reaches to 16384, B to 32768: likely B's, and nothing certain of A
    "controller_16_lookup_32k_tokens": (32768, LmcacheHits(likely={"instB": 32768})),
    # B holds all of it too, and 512 of it in 21; it is unknown, not empty
    "controller_20_lookup_both_hold_all": (1024, A_ALONE),
    "controller_21_lookup_A4_B2": (1024, A_ALONE),
    # the truth is A 512, B 1024 in 22, but A 512, B 0 in 23: one answer for both
    "controller_22_lookup_A2_B4": (1024, LmcacheHits(likely={"instB": 1024})),
    "controller_23_lookup_split_false_prefix": (1024, LmcacheHits(likely={"instB": 1024})),
    # the truth is A 512, B 0
    "controller_24_lookup_interleaved_overstated": (1024, LmcacheHits(likely={"instA": 1024})),
    "controller_25_lookup_disk": (1024, LmcacheHits(own={"instA": 1024})),
    "controller_26_lookup_disk_and_cpu": (1024, LmcacheHits(own={"instA": 1024})),
    "controller_27_lookup_first_chunk_evicted": (1024, NOTHING),
    "controller_28_lookup_tp_one_rank_only": (512, LmcacheHits(host={"instA": 512}, own={"instA": 512})),
    "controller_29_lookup_after_reregister": (1024, LmcacheHits(host={"instB": 1024}, own={"instB": 1024})),
    "controller_33_tokens_numeric_strings": (1024, A_ALONE),
    "controller_34_tokens_negative": (256, NOTHING),
    "controller_3a_tokens_bigint": (256, NOTHING),
    "controller_60_lookup_dead_worker_still_listed": (1024, A_ALONE),
    "controller_62_lookup_while_health_hangs": (1024, A_ALONE),
    "controller_70_silent_miss_none_hash": (1024, NOTHING),
    "controller_72_same_root": (1024, LmcacheHits(host={"instV": 1024}, own={"instV": 1024})),
    "controller_80_real_worker_lookup": (1024, LmcacheHits(host={"realNoHB": 1024}, own={"realNoHB": 1024})),
    "controller_82_after_restart_no_heartbeat": (1024, NOTHING),
    "controller_85_reaped_silent_worker": (768, NOTHING),
}


def test_controller_captures_all_have_a_reading() -> None:
    look_ups = [name for name in captures.names("controller_") if name != "controller_47_controller_workers"]
    assert {name for name in look_ups if exchange(name)[1] == 200} == set(CONTROLLER_READINGS)


@pytest.mark.parametrize("name", CONTROLLER_READINGS)
def test_controller_reads_captured_answer(name: str) -> None:
    tokens, reading = CONTROLLER_READINGS[name]
    assert Controller().read(exchange(name)[2], question(tokens)) == reading


def test_controller_body_is_the_captured_question() -> None:
    # 300 tokens, of which 256 are a whole chunk; the rest is never held
    asked = orjson.loads(exchange("controller_13_lookup_short_of_chunk")[0])
    sent = orjson.loads(Controller().body(question(256)))
    assert sent == {"tokens": asked["tokens"][:256]}


@pytest.mark.parametrize(
    "layout",
    [
        b'{"instA":["LocalCPUBackend",1025]}',
        b'{"instA":["LocalCPUBackend",1180591620717411303424]}',
        b'{"instA":["LocalCPUBackend",0]}',
        b'{"instA":["LocalCPUBackend",-256]}',
        b'{"instA":["LocalCPUBackend",0.5]}',
        b'{"instA":["LocalCPUBackend",1e300]}',
        b'{"instA":["LocalCPUBackend","256"]}',
        b'{"instA":["LocalCPUBackend",null]}',
        b'{"instA":["LocalCPUBackend",true]}',
        b'{"instA":["LocalCPUBackend"]}',
        b'{"instA":"LocalCPUBackend"}',
        b'{"instA":["LocalCPUBackend",256],"instB":["LocalCPUBackend",4096]}',
        b'{"%b":["LocalCPUBackend",256]}' % (b"a" * 257),
        b'["instA"]',
        b"null",
    ],
)
def test_controller_refuses_impossible_lengths(layout: bytes) -> None:
    with pytest.raises(UnreadableError):
        Controller().read(b'{"event_id":"x","layout_info":%b}' % layout, question(1024))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b'{"layout_info":', b"\xff\xfe", b"<html>", b"1"])
def test_controller_refuses_garbage(body: bytes) -> None:
    with pytest.raises(UnreadableError):
        Controller().read(body, question(1024))


def test_controller_ignores_two_owners_of_last_chunk() -> None:
    body = orjson.dumps({"layout_info": {"a": [HOST, 512], "b": [HOST, 512]}})
    assert Controller().read(body, question(1024)) == NOTHING


def test_controller_ignores_unknown_backends() -> None:
    assert Controller().read(orjson.dumps({"layout_info": {"a": ["RemoteBackend", 512]}}), question(1024)) == NOTHING
    split = {"a": [HOST, 256], "b": [DISK, 512]}
    assert Controller().read(orjson.dumps({"layout_info": split}), question(1024)) == NOTHING


@given(st.lists(st.frozensets(st.sampled_from("abc")), min_size=1, max_size=8))
def test_controller_answer_with_one_instance_is_exact(holders: list[frozenset[str]]) -> None:
    # The controller's own rule: each chunk to the first registered holder, up to the first chunk without one.
    layout: dict[str, list[object]] = {}
    for number, holding in enumerate(holders, 1):
        if not holding:
            break
        layout[min(holding)] = [HOST, number * CHUNK]
    read = Controller().read(orjson.dumps({"layout_info": layout}), question(len(holders) * CHUNK))
    for id, length in read.host.items():
        truth = next((i for i, holding in enumerate(holders) if id not in holding), len(holders))
        assert length == truth * CHUNK
    # and a guess never reaches beyond what the fleet holds together
    together = next((i for i, holding in enumerate(holders) if not holding), len(holders))
    assert all(length == together * CHUNK for length in read.likely.values())


#: Captures answered 200: whole chunks' tokens, world size, and what is read from the answer.
COORDINATOR_READINGS = {
    "coordinator_02_lookup_unknown": (512, 1, NOTHING),
    "coordinator_20_lookup_both": (
        1024,
        1,
        LmcacheHits(host={"mpA": 1024, "mpB": 512}, own={"mpA": 1024, "mpB": 512}, shared=1024),
    ),
    "coordinator_21_lookup_partial_then_miss": (
        768,
        1,
        LmcacheHits(host={"mpA": 256, "mpB": 256}, own={"mpA": 256, "mpB": 256}, shared=256),
    ),
    "coordinator_22_lookup_tail_ignored": (
        256,
        1,
        LmcacheHits(host={"mpA": 256, "mpB": 256}, own={"mpA": 256, "mpB": 256}, shared=256),
    ),
    "coordinator_24_lookup_other_model": (512, 1, NOTHING),
    "coordinator_25_lookup_other_salt": (512, 1, NOTHING),
    "coordinator_26_lookup_world_size_2": (512, 2, NOTHING),
    # A's first chunk is gone: its second does not count
    "coordinator_46_lookup_after_delete": (512, 1, LmcacheHits(host={"mpB": 512}, own={"mpB": 512}, shared=512)),
    "coordinator_48_lookup_after_deregister": (512, 1, LmcacheHits(host={"mpB": 512}, own={"mpB": 512}, shared=512)),
    "mpreal_00_directory_lookup_real_store": (1024, 1, LmcacheHits(host={"mpreal": 1024}, own={"mpreal": 1024})),
    "mpreal_01_directory_lookup_other_tail": (1024, 1, LmcacheHits(host={"mpreal": 512}, own={"mpreal": 512})),
}
#: Less than a chunk is never asked for, and the list of instances is the doctor's.
NEVER_ASKED = {"coordinator_23_lookup_short", "coordinator_05_instances"}


def test_coordinator_captures_all_have_a_reading() -> None:
    answered = {name for name in captures.names("coordinator_", "mpreal_0") if exchange(name)[1] == 200}
    assert answered - NEVER_ASKED == set(COORDINATOR_READINGS)


@pytest.mark.parametrize("name", COORDINATOR_READINGS)
def test_coordinator_reads_captured_answer(name: str) -> None:
    tokens, world_size, reading = COORDINATOR_READINGS[name]
    assert Coordinator(CHUNK, world_size).read(exchange(name)[2], question(tokens)) == reading


@pytest.mark.parametrize(
    ("name", "tokens", "world_size", "model", "salt"),
    [
        ("coordinator_20_lookup_both", 1024, 1, "m/test-model", ""),
        ("coordinator_24_lookup_other_model", 512, 1, "m/other", ""),
        ("coordinator_25_lookup_other_salt", 512, 1, "m/test-model", "tenant1"),
        ("coordinator_26_lookup_world_size_2", 512, 2, "m/test-model", ""),
    ],
)
def test_coordinator_body_is_the_captured_question(
    name: str, tokens: int, world_size: int, model: str, salt: str
) -> None:
    captured = {"world_size": 1, "cache_salt": "", **orjson.loads(exchange(name)[0])}
    sent = orjson.loads(Coordinator(CHUNK, world_size).body(question(tokens, model, salt)))
    assert sent == captured


def test_coordinator_names_wrong_chunk_size() -> None:
    body = exchange("coordinator_20_lookup_both")[2]
    with pytest.raises(UnreadableError, match=r"lmcache.chunk_size is 128.*set it to the servers' chunk size"):
        Coordinator(128, 1).read(body, question(1024))


def test_coordinator_refuses_fewer_keys_than_ranks() -> None:
    with pytest.raises(UnreadableError, match=r"4 keys for 4 chunks and lmcache.world_size 2"):
        Coordinator(CHUNK, 2).read(exchange("coordinator_20_lookup_both")[2], question(1024))


def listing(*chunks: list[list[dict[str, Any]]]) -> bytes:
    results = [
        {"key": {"chunk_hash_hex": f"{number:064x}"}, "placements": placements}
        for number, ranks in enumerate(chunks)
        for placements in ranks
    ]
    return orjson.dumps({"chunks": len(chunks), "results": results})


def place(id: str, tier: str = "l1", shared: bool = False) -> dict[str, Any]:
    return {"instance_id": id, "incarnation": 1, "tier": tier, "backend": "x", "size_bytes": 1, "shared": shared}


def test_coordinator_counts_chunk_only_if_all_ranks_hold_it() -> None:
    both, one = [[place("a")], [place("a")]], [[place("a"), place("b")], [place("b")]]
    read = Coordinator(CHUNK, 2).read(listing(both, one, both), question(768))
    assert read.host == {"a": 256}


def test_coordinator_own_disk_extends_host_prefix() -> None:
    read = Coordinator(CHUNK, 1).read(listing([[place("a")]], [[place("a", "l2")]], [[place("a")]]), question(768))
    assert read == LmcacheHits(host={"a": 256}, own={"a": 768})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"<html>",
        b'{"chunks":1}',
        b'{"chunks":-1,"results":[]}',
        b'{"chunks":1e400,"results":[]}',
        b'{"chunks":4,"results":[]}',
        b'{"chunks":1,"results":[{"key":{"chunk_hash_hex":"00"},"placements":null}]}',
        b'{"chunks":1,"results":[{"key":{"chunk_hash_hex":"00"},"placements":[{"instance_id":7,"tier":"l1"}]}]}',
        b'{"chunks":1,"results":[{"placements":[]}]}',
        b'{"chunks":1,"results":[{"key":{"chunk_hash_hex":"00"},"placements":[{"instance_id":"%b","tier":"l1"}]}]}'
        % (b"a" * 257),
    ],
)
def test_coordinator_refuses_garbage(body: bytes) -> None:
    with pytest.raises(UnreadableError):
        Coordinator(CHUNK, 1).read(body, question(256))


def test_coordinator_refuses_scattered_keys_of_a_chunk() -> None:
    results = [{"key": {"chunk_hash_hex": f"{n % 2:02x}"}, "placements": []} for n in range(4)]
    with pytest.raises(UnreadableError, match="not adjacent"):
        Coordinator(CHUNK, 2).read(orjson.dumps({"chunks": 2, "results": results}), question(512))


IDS = ("a", "b", "c")
placements = st.lists(st.builds(place, st.sampled_from(IDS), st.sampled_from(("l1", "l2")), st.booleans()), max_size=5)


@given(
    st.integers(1, 2).flatmap(
        lambda ranks: st.lists(st.lists(placements, min_size=ranks, max_size=ranks), min_size=1, max_size=6)
    )
)
def test_coordinator_agrees_with_naive_walk(chunks: list[list[list[dict[str, Any]]]]) -> None:
    def prefix(held: Any) -> int:
        depth = next((i for i, ranks in enumerate(chunks) if not all(any(map(held, r)) for r in ranks)), len(chunks))
        return depth * CHUNK

    asked = LmcacheQuestion(array("I", range(len(chunks) * CHUNK)), "m", "")
    read = Coordinator(CHUNK, len(chunks[0])).read(listing(*chunks), asked)
    for id in IDS:
        own = prefix(lambda p, id=id: p["instance_id"] == id and not p["shared"])
        host = prefix(lambda p, id=id: p["instance_id"] == id and not p["shared"] and p["tier"] == "l1")
        assert (read.host.get(id, 0), read.own.get(id, 0)) == (host, own)
    assert (read.shared or 0) == prefix(lambda p: p["shared"])

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.sources.lmcache.client import DISK, HOST, NOTHING, Controller, Holdings, UnreadableError
from tests.sources import lmcache_captures
from tests.sources.lmcache_captures import exchange, question

CHUNK = 256

A_ALONE = Holdings(host={"instA": 1024}, own={"instA": 1024})

#: Captures answered 200: tokens asked for, and what may be read from the answer.
READINGS = {
    "controller_00_lookup_no_workers": (1024, NOTHING),
    "controller_10_lookup_hit_one": (1024, A_ALONE),
    "controller_11_lookup_partial_hit": (1024, Holdings(host={"instA": 512}, own={"instA": 512})),
    "controller_12_lookup_partial_last_chunk": (1024, A_ALONE),
    "controller_13_lookup_short_of_chunk": (256, Holdings(host={"instA": 256}, own={"instA": 256})),
    "controller_14_lookup_miss": (1024, NOTHING),
    "controller_15_lookup_empty_tokens": (256, NOTHING),
    # A reaches to 16384, B to 32768: likely B's, and nothing certain of A
    "controller_16_lookup_32k_tokens": (32768, Holdings(likely={"instB": 32768})),
    # B holds all of it too, and 512 of it in 21; it is unknown, not empty
    "controller_20_lookup_both_hold_all": (1024, A_ALONE),
    "controller_21_lookup_A4_B2": (1024, A_ALONE),
    # the truth is A 512, B 1024 in 22, but A 512, B 0 in 23: one answer for both
    "controller_22_lookup_A2_B4": (1024, Holdings(likely={"instB": 1024})),
    "controller_23_lookup_split_false_prefix": (1024, Holdings(likely={"instB": 1024})),
    # the truth is A 512, B 0
    "controller_24_lookup_interleaved_overstated": (1024, Holdings(likely={"instA": 1024})),
    "controller_25_lookup_disk": (1024, Holdings(own={"instA": 1024})),
    "controller_26_lookup_disk_and_cpu": (1024, Holdings(own={"instA": 1024})),
    "controller_27_lookup_first_chunk_evicted": (1024, NOTHING),
    "controller_28_lookup_tp_one_rank_only": (512, Holdings(host={"instA": 512}, own={"instA": 512})),
    "controller_29_lookup_after_reregister": (1024, Holdings(host={"instB": 1024}, own={"instB": 1024})),
    "controller_33_tokens_numeric_strings": (1024, A_ALONE),
    "controller_34_tokens_negative": (256, NOTHING),
    "controller_3a_tokens_bigint": (256, NOTHING),
    "controller_60_lookup_dead_worker_still_listed": (1024, A_ALONE),
    "controller_62_lookup_while_health_hangs": (1024, A_ALONE),
    "controller_70_silent_miss_none_hash": (1024, NOTHING),
    "controller_72_same_root": (1024, Holdings(host={"instV": 1024}, own={"instV": 1024})),
    "controller_80_real_worker_lookup": (1024, Holdings(host={"realNoHB": 1024}, own={"realNoHB": 1024})),
    "controller_82_after_restart_no_heartbeat": (1024, NOTHING),
    "controller_85_reaped_silent_worker": (768, NOTHING),
}


def test_every_capture_that_was_answered_has_a_reading() -> None:
    look_ups = [name for name in lmcache_captures.names("controller_") if name != "controller_47_controller_workers"]
    assert {name for name in look_ups if exchange(name)[1] == 200} == set(READINGS)


@pytest.mark.parametrize("name", READINGS)
def test_what_may_be_read_from_an_answer(name: str) -> None:
    tokens, reading = READINGS[name]
    assert Controller().read(exchange(name)[2], question(tokens)) == reading


def test_the_question_is_the_captured_one() -> None:
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
def test_lengths_that_cannot_be_are_no_answer(layout: bytes) -> None:
    with pytest.raises(UnreadableError):
        Controller().read(b'{"event_id":"x","layout_info":%b}' % layout, question(1024))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b'{"layout_info":', b"\xff\xfe", b"<html>", b"1"])
def test_garbage_is_no_answer(body: bytes) -> None:
    with pytest.raises(UnreadableError):
        Controller().read(body, question(1024))


def test_two_that_both_reach_furthest_are_a_contradiction_and_tell_nothing() -> None:
    body = orjson.dumps({"layout_info": {"a": [HOST, 512], "b": [HOST, 512]}})
    assert Controller().read(body, question(1024)) == NOTHING


def test_a_place_that_is_neither_memory_nor_disk_of_the_instance_tells_nothing() -> None:
    assert Controller().read(orjson.dumps({"layout_info": {"a": ["RemoteBackend", 512]}}), question(1024)) == NOTHING
    split = {"a": [HOST, 256], "b": [DISK, 512]}
    assert Controller().read(orjson.dumps({"layout_info": split}), question(1024)) == NOTHING


@given(st.lists(st.frozensets(st.sampled_from("abc")), min_size=1, max_size=8))
def test_a_single_name_is_exact_whatever_the_holdings_are(holders: list[frozenset[str]]) -> None:
    # The controller's own rule: each chunk to the first registered holder, up to the first chunk that nobody holds.
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

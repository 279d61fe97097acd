from __future__ import annotations

from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.sources.lmcache.client import NOTHING, Coordinator, Holdings, Question, UnreadableError
from tests.sources import lmcache_captures
from tests.sources.lmcache_captures import exchange, question

CHUNK = 256

#: Captures answered 200: whole chunks' tokens, world size, and what is read from the answer.
READINGS = {
    "coordinator_02_lookup_unknown": (512, 1, NOTHING),
    "coordinator_20_lookup_both": (
        1024,
        1,
        Holdings(host={"mpA": 1024, "mpB": 512}, own={"mpA": 1024, "mpB": 512}, shared=1024),
    ),
    "coordinator_21_lookup_partial_then_miss": (
        768,
        1,
        Holdings(host={"mpA": 256, "mpB": 256}, own={"mpA": 256, "mpB": 256}, shared=256),
    ),
    "coordinator_22_lookup_tail_ignored": (
        256,
        1,
        Holdings(host={"mpA": 256, "mpB": 256}, own={"mpA": 256, "mpB": 256}, shared=256),
    ),
    "coordinator_24_lookup_other_model": (512, 1, NOTHING),
    "coordinator_25_lookup_other_salt": (512, 1, NOTHING),
    "coordinator_26_lookup_world_size_2": (512, 2, NOTHING),
    # A's first chunk is gone: its second does not count
    "coordinator_46_lookup_after_delete": (512, 1, Holdings(host={"mpB": 512}, own={"mpB": 512}, shared=512)),
    "coordinator_48_lookup_after_deregister": (512, 1, Holdings(host={"mpB": 512}, own={"mpB": 512}, shared=512)),
    "mpreal_00_directory_lookup_real_store": (1024, 1, Holdings(host={"mpreal": 1024}, own={"mpreal": 1024})),
    "mpreal_01_directory_lookup_other_tail": (1024, 1, Holdings(host={"mpreal": 512}, own={"mpreal": 512})),
}
#: Less than a chunk is never asked for, and the list of instances is the doctor's.
NEVER_ASKED = {"coordinator_23_lookup_short", "coordinator_05_instances"}


def test_every_capture_that_was_answered_has_a_reading() -> None:
    answered = {name for name in lmcache_captures.names("coordinator_", "mpreal_0") if exchange(name)[1] == 200}
    assert answered - NEVER_ASKED == set(READINGS)


@pytest.mark.parametrize("name", READINGS)
def test_what_is_read_from_an_answer(name: str) -> None:
    tokens, world_size, reading = READINGS[name]
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
def test_the_question_is_the_captured_one(name: str, tokens: int, world_size: int, model: str, salt: str) -> None:
    captured = {"world_size": 1, "cache_salt": "", **orjson.loads(exchange(name)[0])}
    sent = orjson.loads(Coordinator(CHUNK, world_size).body(question(tokens, model, salt)))
    assert sent == captured


def test_a_chunk_size_that_is_not_the_servers_is_named() -> None:
    body = exchange("coordinator_20_lookup_both")[2]
    with pytest.raises(UnreadableError, match=r"lmcache.chunk_size is 128.*set it to the servers' chunk size"):
        Coordinator(128, 1).read(body, question(1024))


def test_fewer_keys_than_ranks_are_no_answer() -> None:
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


def test_a_chunk_counts_only_if_every_rank_has_its_part() -> None:
    both, one = [[place("a")], [place("a")]], [[place("a"), place("b")], [place("b")]]
    read = Coordinator(CHUNK, 2).read(listing(both, one, both), question(768))
    assert read.host == {"a": 256}


def test_a_disk_of_its_own_is_not_host_memory_and_continues_it() -> None:
    read = Coordinator(CHUNK, 1).read(listing([[place("a")]], [[place("a", "l2")]], [[place("a")]]), question(768))
    assert read == Holdings(host={"a": 256}, own={"a": 768})


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
def test_garbage_is_no_answer(body: bytes) -> None:
    with pytest.raises(UnreadableError):
        Coordinator(CHUNK, 1).read(body, question(256))


def test_keys_of_a_chunk_that_do_not_stand_together_are_no_answer() -> None:
    results = [{"key": {"chunk_hash_hex": f"{n % 2:02x}"}, "placements": []} for n in range(4)]
    with pytest.raises(UnreadableError, match="stand together"):
        Coordinator(CHUNK, 2).read(orjson.dumps({"chunks": 2, "results": results}), question(512))


IDS = ("a", "b", "c")
placements = st.lists(st.builds(place, st.sampled_from(IDS), st.sampled_from(("l1", "l2")), st.booleans()), max_size=5)


@given(
    st.integers(1, 2).flatmap(
        lambda ranks: st.lists(st.lists(placements, min_size=ranks, max_size=ranks), min_size=1, max_size=6)
    )
)
def test_the_walk_agrees_with_looking_at_every_chunk_by_itself(chunks: list[list[list[dict[str, Any]]]]) -> None:
    def prefix(held: Any) -> int:
        depth = next((i for i, ranks in enumerate(chunks) if not all(any(map(held, r)) for r in ranks)), len(chunks))
        return depth * CHUNK

    asked = Question(array("I", range(len(chunks) * CHUNK)), "m", "")
    read = Coordinator(CHUNK, len(chunks[0])).read(listing(*chunks), asked)
    for id in IDS:
        own = prefix(lambda p, id=id: p["instance_id"] == id and not p["shared"])
        host = prefix(lambda p, id=id: p["instance_id"] == id and not p["shared"] and p["tier"] == "l1")
        assert (read.host.get(id, 0), read.own.get(id, 0)) == (host, own)
    assert (read.shared or 0) == prefix(lambda p: p["shared"])

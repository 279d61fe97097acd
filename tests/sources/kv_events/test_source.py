import asyncio
import errno
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from smetric.fleet.instance import CacheConfig, Instance
from smetric.log_limit import CHANGE_LINES
from smetric.request.request import InferenceRequest
from smetric.sources.kv_events import source as kv_events
from smetric.sources.kv_events import subscriber
from smetric.sources.kv_events.publisher import Publisher
from smetric.sources.kv_events.source import CacheFigures, KvEvents
from smetric.sources.kv_events.subscriber import Subscriber
from tests.fakes import until
from tests.sources.kv_events.kv_engine import (
    BLOCK,
    CLEARED,
    KvEngine,
    captured,
    free_address,
    names_of,
    removed,
    stored,
)

pytestmark = pytest.mark.slow

PROMPT = list(range(100, 100 + 5 * BLOCK + 1))
ONE = Instance("one", "http://127.0.0.1:1")


class Tokens:
    """The ids a request has written into its session's name."""

    def __init__(self) -> None:
        self.asked = 0

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        self.asked += 1
        return [int(part) for part in request.session.split()] if request.session else None

    def begin(self, request: InferenceRequest) -> None:
        return None


def request(tokens: Sequence[int], *, est_hit: int = 0, **fields: Any) -> InferenceRequest:
    return InferenceRequest(session=" ".join(map(str, tokens)), est_hit=est_hit, **fields)


async def hit_len(source: KvEvents, asked: InferenceRequest, *instances: Instance) -> list[float | None]:
    answer = source.lookup(asked, instances or [ONE])
    cells = (answer if isinstance(answer, dict) else await answer)["hit_len"]
    return list(cells)


def told(source: KvEvents, instance: Instance = ONE) -> CacheFigures:
    return source.figures().instances[instance.id]


def messages(source: KvEvents, instance: Instance = ONE) -> int:
    """Messages taken, however they came."""
    counted = told(source, instance).messages
    return counted.get("ok", 0) + counted.get("replayed", 0)


async def known_after(source: KvEvents, count: int, *instances: Instance) -> None:
    """Wait until *count* messages were taken and nothing may be missing."""
    expected = [(count, True)] * len(instances or (ONE,))
    await until(lambda: [(messages(source, i), told(source, i).is_known) for i in instances or (ONE,)] == expected)


@asynccontextmanager
async def listening(*publishers: Publisher, tokens: Tokens | None = None) -> AsyncIterator[KvEvents]:
    source = KvEvents(publishers, tokens or Tokens(), max_bytes=1 << 24)
    await source.start()
    try:
        yield source
    finally:
        await source.stop()


@asynccontextmanager
async def engine(**options: Any) -> AsyncIterator[KvEngine]:
    made = KvEngine(**options)
    try:
        yield made
    finally:
        await made.close()


def publisher(engine: KvEngine, instance: Instance = ONE, **options: Any) -> Publisher:
    return Publisher(instance=instance, endpoint=engine.endpoint, replay=engine.replay, **options)


@asynccontextmanager
async def followed(*events: Any, **options: Any) -> AsyncIterator[tuple[KvEngine, KvEvents]]:
    """An engine that has published *events*, if any, and a source that knows its cache."""
    async with engine(**options) as one, listening(publisher(one)) as source:
        await one.joined()
        if events:
            await one.publish(*events)
        await known_after(source, 1 if events else 0)
        yield one, source


async def test_caches_that_can_catch_up_are_waited_for_at_start() -> None:
    async with engine() as one, engine(replay=False) as other:
        dead = Instance("dead", "http://127.0.0.1:2")
        dead.healthy = False
        gone = Publisher(instance=dead, endpoint=free_address(), replay=free_address())
        await one.publish(stored(PROMPT))
        async with listening(publisher(one), publisher(other), gone) as source:
            assert not told(source).is_known
            started = time.monotonic()
            await source.caught_up(30)
            assert time.monotonic() - started < 20, "neither a dead engine nor one without a replay is waited for"
            assert await hit_len(source, request(PROMPT)) == [None]
        async with listening(publisher(one), gone) as source:
            await source.caught_up(30)
            assert await hit_len(source, request(PROMPT)) == [5 * BLOCK]
            dead.healthy, started = True, time.monotonic()
            await source.caught_up(0.05)
            assert 0.05 <= time.monotonic() - started < 20


async def test_hits_in_slower_tiers_are_reported_once_an_event_names_one() -> None:
    names = names_of(PROMPT)
    copy = {"block_hashes": names[:2], "parent_block_hash": None, "token_ids": [], "extra_keys": None}
    async with followed(stored(PROMPT)) as (one, source):
        cells = await source.lookup(request(PROMPT), [ONE])  # type: ignore[misc]
        assert cells == {"hit_len": [5 * BLOCK]}
        await one.publish(stored(PROMPT) | copy | {"medium": "CPU"})
        await known_after(source, 2)
        cells = await source.lookup(request(PROMPT), [ONE])  # type: ignore[misc]
        held = [2 * BLOCK]
        assert cells == {"hit_len": [5 * BLOCK], "host_hit_len": held, "disk_hit_len": held}
        await one.publish(stored(PROMPT) | copy | {"medium": "STORAGE", "block_hashes": names[:4]})
        await known_after(source, 3)
        cells = await source.lookup(request(PROMPT), [ONE])  # type: ignore[misc]
        assert cells == {"hit_len": [5 * BLOCK], "host_hit_len": held, "disk_hit_len": [4 * BLOCK]}
        cells = await source.lookup(request([7] * 9), [ONE])  # type: ignore[misc]
        assert cells == {"hit_len": [0], "host_hit_len": [0], "disk_hit_len": [0]}
        one.disconnect()
        await until(lambda: not told(source).is_known)
        cells = await source.lookup(request(PROMPT), [ONE])  # type: ignore[misc]
        assert cells == {"hit_len": [None], "host_hit_len": [None], "disk_hit_len": [None]}, "they may have changed"


async def test_misses_in_slower_tiers_are_unknown_after_a_clear() -> None:
    copy: dict[str, Any] = {"parent_block_hash": None, "token_ids": [], "extra_keys": None}
    copies = [stored(PROMPT) | copy | {"medium": medium} for medium in ("CPU", "STORAGE")]
    async with followed(stored(PROMPT), *copies, CLEARED, stored(PROMPT), copies[0]) as (_, source):
        cells = await source.lookup(request(PROMPT), [ONE])  # type: ignore[misc]
        assert cells == {"hit_len": [5 * BLOCK], "host_hit_len": [5 * BLOCK], "disk_hit_len": [5 * BLOCK]}
        cells = await source.lookup(request([7] * 9), [ONE])  # type: ignore[misc]
        assert cells == {"hit_len": [0], "host_hit_len": [None], "disk_hit_len": [None]}


async def test_hits_are_whole_blocks_below_prompt_length() -> None:
    async with followed(stored(PROMPT), replay=False) as (_, source):
        assert await hit_len(source, request(PROMPT)) == [5 * BLOCK]
        assert await hit_len(source, request(PROMPT[:-1])) == [4 * BLOCK]
        assert await hit_len(source, request(PROMPT[: 2 * BLOCK + 3])) == [2 * BLOCK]
        assert await hit_len(source, request([1, *PROMPT])) == [0]


async def test_lookup_covers_all_instances_and_leaves_others_unknown() -> None:
    two, other = Instance("two", "http://127.0.0.1:2"), Instance("other", "http://127.0.0.1:3")
    async with engine() as first, engine() as second, listening(publisher(first), publisher(second, two)) as source:
        await first.joined()
        await second.joined()
        await first.publish(stored(PROMPT, seed="a"))
        await second.publish(stored(PROMPT[: 2 * BLOCK], seed="b"))
        await known_after(source, 1, ONE, two)
        assert await hit_len(source, request(PROMPT), two, other, ONE) == [2 * BLOCK, None, 5 * BLOCK]


async def test_lookup_requests_no_tokens_while_nothing_is_known() -> None:
    tokens = Tokens()
    async with engine(replay=False) as one, listening(publisher(one), tokens=tokens) as source:
        assert await hit_len(source, request(PROMPT)) == [None]
        assert tokens.asked == 0
        await one.joined()
        await one.publish(stored(PROMPT))
        await until(lambda: told(source).is_known)
        assert await hit_len(source, request([])) == [None]
        assert tokens.asked == 1


async def test_lookup_separates_salts_and_adapters() -> None:
    instance = Instance("one", "http://127.0.0.1:1")
    instance.adapters = frozenset({"fr"})
    async with engine() as one, listening(publisher(one, instance)) as source:
        await one.joined()
        await one.publish(stored(PROMPT, salt="s"), stored(PROMPT[: 3 * BLOCK], lora="fr"))
        await known_after(source, 1, instance)
        for asked, expected in (
            (request(PROMPT), 0),
            (request(PROMPT, cache_salt="s"), 5),
            (request(PROMPT, cache_salt="t"), 0),
            (request(PROMPT, served="fr"), 3),
            (request(PROMPT, served="base"), 0),
        ):
            assert await hit_len(source, asked, instance) == [expected * BLOCK]


async def test_lookup_learns_adapters_from_blocks() -> None:
    async with engine() as one, listening(publisher(one)) as source:
        await one.joined()
        await one.publish(stored(PROMPT), stored(PROMPT[: 2 * BLOCK], lora="de"))
        await known_after(source, 1)
        assert await hit_len(source, request(PROMPT, served="de")) == [2 * BLOCK]
        assert await hit_len(source, request(PROMPT, served="base")) == [5 * BLOCK]


async def test_source_learns_running_engine_by_replay() -> None:
    async with engine() as one:
        await one.publish(stored(PROMPT))
        await one.publish(removed(names_of(PROMPT)[-1]))
        async with listening(publisher(one)) as source:
            await until(lambda: told(source).is_known)
            assert await hit_len(source, request(PROMPT)) == [4 * BLOCK]
            await one.joined()
            await one.publish(removed(names_of(PROMPT)[-2]))
            await known_after(source, 3)
            assert await hit_len(source, request(PROMPT)) == [3 * BLOCK]
            assert told(source).messages == {"ok": 1, "replayed": 2}


async def test_source_knows_that_silent_engine_is_empty() -> None:
    async with engine() as one, listening(publisher(one)) as source:
        await until(lambda: told(source).is_known)
        assert await hit_len(source, request(PROMPT)) == [0]


async def test_source_replays_a_thousand_lost_messages() -> None:
    async with followed() as (one, source):
        await one.publish(stored(PROMPT))
        await known_after(source, 1)
        for i in range(1000):
            await one.publish(stored([i] * BLOCK), lost=True)
        await one.publish(removed(names_of(PROMPT)[-1]))
        await known_after(source, 1002)
        figures = told(source)
        assert (figures.is_known, figures.missed, figures.messages["replayed"]) == (True, 0, 1000)
        assert one.asked[-1] == 1
        assert await hit_len(source, request([777] * (BLOCK + 1))) == [BLOCK]
        assert await hit_len(source, request(PROMPT)) == [4 * BLOCK]


async def test_source_relearns_instance_after_permanent_loss() -> None:
    instance = Instance("one", "http://127.0.0.1:1")
    instance.cache = CacheConfig(block_size=BLOCK, num_blocks=1100)
    follow_up = request(PROMPT, est_hit=4 * BLOCK)
    async with engine(replay=False) as one, listening(publisher(one, instance)) as source:
        await one.joined()
        await one.publish(stored(PROMPT))
        await known_after(source, 1, instance)
        for i in range(1000):
            await one.publish(stored([i] * BLOCK), lost=True)
        await one.publish(stored([5000] * BLOCK))
        await until(lambda: messages(source, instance) == 2)
        assert told(source, instance).missed == 1000
        assert await hit_len(source, follow_up, instance) == [None]
        assert await hit_len(source, request([9] * BLOCK), instance) == [None]
        # The session's next turn stores a block after its old ones: those are held after all.
        await one.publish(stored([*PROMPT[:-1], *[6] * BLOCK], skip=5))
        await until(lambda: messages(source, instance) == 3)
        assert await hit_len(source, follow_up, instance) == [5 * BLOCK]
        assert await hit_len(source, request(PROMPT), instance) == [None]
        await one.publish(*(stored([6000 + i] * BLOCK) for i in range(1090)))
        await one.publish(*(removed(*names_of([6000 + i] * BLOCK)) for i in range(1000)))
        await one.publish(*(stored([8000 + i] * BLOCK) for i in range(20)))
        await until(lambda: told(source, instance).is_known)
        assert await hit_len(source, request(PROMPT), instance) == [5 * BLOCK]
        assert await hit_len(source, request([9] * 2 * BLOCK), instance) == [0]


async def test_source_counts_gap_beyond_replay_buffer_as_missed() -> None:
    async with engine(buffer=10) as one, listening(publisher(one)) as source:
        await one.joined()
        await until(lambda: told(source).is_known)
        await one.publish(stored(PROMPT))
        await until(lambda: messages(source) == 1)
        for i in range(50):
            await one.publish(stored([i] * BLOCK), lost=True)
        await one.publish(stored([77] * BLOCK))
        await until(lambda: messages(source) == 11)
        figures = told(source)
        assert (figures.is_known, figures.gaps, figures.missed) == (False, 1, 41)
        assert figures.messages["replayed"] == 9
        await one.publish(CLEARED)
        await until(lambda: told(source).is_known)
        assert await hit_len(source, request(PROMPT)) == [0]


async def test_source_gives_up_silent_replay_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_SILENCE_S", 0.05)
    silent = Publisher(instance=ONE, endpoint="", replay=free_address())
    async with engine(replay=False) as one:
        source_at = Publisher(instance=ONE, endpoint=one.endpoint, replay=silent.replay)
        async with listening(source_at) as source:
            await one.joined()
            await one.publish(stored(PROMPT), lost=True)
            await one.publish(stored([7] * BLOCK))
            await until(lambda: messages(source) == 1)
            assert not told(source).is_known


async def test_source_forgets_contents_on_restart() -> None:
    async with followed() as (one, source):
        for i in range(3):
            await one.publish(stored([i, *PROMPT]))
        await known_after(source, 3)
        one.restart()
        await one.publish(stored(PROMPT[: 2 * BLOCK], seed="new"))
        await known_after(source, 4)
        assert await hit_len(source, request(PROMPT)) == [2 * BLOCK]
        assert await hit_len(source, request([0, *PROMPT])) == [0]
        # The metrics show the same restart a little later.
        source.forget(ONE)
        assert await hit_len(source, request(PROMPT)) == [2 * BLOCK]


async def test_source_catches_up_after_reconnect() -> None:
    async with followed() as (one, source):
        await one.publish(stored(PROMPT))
        await known_after(source, 1)
        one.disconnect()
        await until(lambda: not told(source).is_known)
        assert await hit_len(source, request(PROMPT)) == [None]
        await one.publish(removed(names_of(PROMPT)[-1]))
        await one.publish(stored([7] * BLOCK))
        one.connect_again()
        await until(lambda: told(source).is_known)
        assert await hit_len(source, request(PROMPT)) == [4 * BLOCK]
        assert await hit_len(source, request([7] * 2 * BLOCK)) == [BLOCK]
        assert told(source).missed == 0


@pytest.mark.parametrize("published", [0, 1, 3, 8])
async def test_source_detects_new_process_at_same_address(published: int) -> None:
    async with followed() as (one, source):
        for i in range(3):
            await one.publish(stored([i, *PROMPT]))
        await known_after(source, 3)
        one.disconnect()
        one.restart()
        for i in range(published):
            await one.publish(stored([50 + i, *PROMPT]))
        await until(lambda: not told(source).is_known)
        one.connect_again()
        await until(lambda: told(source).is_known)
        assert await hit_len(source, request([0, *PROMPT])) == [0]
        for i in range(published):
            assert await hit_len(source, request([50 + i, *PROMPT])) == [5 * BLOCK]
        assert source.index.blocks == 5 * published


async def test_source_lag_is_that_of_latest_published_message() -> None:
    async with followed() as (one, source):
        assert told(source).lag_s is None

        async def made(at: float, **how: bool) -> None:
            await one.send(msgspec.msgpack.encode([at, [stored(PROMPT)], 0]), **how)

        now = time.time()
        await made(now - 100.0)
        await until(lambda: messages(source) == 1)
        assert 100.0 <= (told(source).lag_s or 0.0) < 110.0
        await made(now - 50.0, lost=True)
        await made(now + 3600.0)
        await until(lambda: messages(source) == 3)
        # A replayed message has the lag of the replay, and a clock that is ahead gives no negative lag.
        assert told(source).lag_s == 0.0


async def test_source_without_replay_is_known_again_with_next_message() -> None:
    async with followed(stored(PROMPT), replay=False) as (one, source):
        one.disconnect()
        await until(lambda: not told(source).is_known)
        one.connect_again()
        await one.joined()
        assert not told(source).is_known
        await one.publish(stored([7] * BLOCK))
        await until(lambda: told(source).is_known)


async def test_source_relearns_after_restart_seen_in_metrics() -> None:
    async with followed(stored(PROMPT)) as (one, source):
        one.restart()
        source.forget(ONE)
        await one.publish(stored(PROMPT[:BLOCK]))
        await until(lambda: told(source).is_known and messages(source) >= 2)
        assert await hit_len(source, request(PROMPT)) == [BLOCK]


async def test_source_drops_old_process_on_restart_within_message() -> None:
    async with followed() as (one, source):
        await one.publish(*(stored([i] * 10 * BLOCK) for i in range(2000)))
        await until(lambda: 0 < source.index.blocks < 20_000)
        one.restart()
        source.forget(ONE)
        await until(lambda: told(source).is_known)
        assert source.index.blocks == 0


async def test_source_binds_address_that_engine_connects_to() -> None:
    address = free_address()
    at = Publisher(instance=ONE, endpoint=address, bind=True)
    async with listening(at) as source, engine(connect=address, replay=False) as one:
        await one.joined()
        await one.publish(stored(PROMPT))
        await until(lambda: told(source).is_known)
        assert await hit_len(source, request(PROMPT)) == [5 * BLOCK]


async def test_source_ignores_other_topics() -> None:
    address = free_address()
    at = Publisher(instance=ONE, endpoint=address, bind=True, topic="kv@one")
    async with (
        listening(at) as source,
        engine(connect=address, replay=False, topic="kv@two@m") as two,
        engine(connect=address, replay=False, topic="kv@one@m") as one,
    ):
        await one.joined()
        await two.joined()
        await two.publish(stored([1, *PROMPT]))
        await one.publish(stored(PROMPT))
        await until(lambda: told(source).is_known)
        assert await hit_len(source, request([1, *PROMPT])) == [0]
        assert await hit_len(source, request(PROMPT)) == [5 * BLOCK]


async def test_source_ignores_replay_of_other_topic() -> None:
    async with engine(topic="kv@10.0.0.7@m") as one:
        await one.publish(stored(PROMPT))
        with capture_logs() as logs:
            async with listening(publisher(one, topic="kv@engine-0@m")) as source:
                await until(lambda: bool(logs))
                await one.publish(CLEARED)
                assert await hit_len(source, request(PROMPT)) == [None]
                assert await hit_len(source, request([9] * 9)) == [None]
                assert not told(source).is_known
    problems = [(line["event"], line["problem"]) for line in logs if "problem" in line]
    assert problems == [("smetric.kv_events.no_replay", "OtherTopic")]


async def test_source_is_unknown_when_engine_publishes_other_topic() -> None:
    async with (
        engine(topic="kv@10.0.0.7@m") as one,
        listening(publisher(one, topic="kv@engine-0@m")) as source,
    ):
        await one.joined()
        await until(lambda: told(source).is_known)
        with capture_logs() as logs:
            await one.publish(stored(PROMPT))
            await until(lambda: not told(source).is_known)
        assert [line["state"] for line in logs] == ["other_topic"]
        assert await hit_len(source, request(PROMPT)) == [None]
        assert await hit_len(source, request([9] * 9)) == [None]


async def test_source_yields_within_event_of_long_prompt() -> None:
    prompt = list(range(8000 * BLOCK + 1))
    async with engine(replay=False) as one, listening(publisher(one)) as source:
        await one.joined()
        await one.publish(stored(prompt))
        held = {source.index.blocks}
        while source.index.blocks < 8000:
            await asyncio.sleep(0)
            held.add(source.index.blocks)
        await known_after(source, 1)
        assert await hit_len(source, request(prompt)) == [8000 * BLOCK]
        await one.publish(removed(*names_of(prompt)[4000:]))
        while source.index.blocks > 4000:
            await asyncio.sleep(0)
            held.add(source.index.blocks)
        assert await hit_len(source, request(prompt)) == [4000 * BLOCK]
        assert told(source).is_known
    assert len(held) > 4


async def test_source_limits_log_of_two_engines_at_one_address() -> None:
    address = free_address()
    at = Publisher(instance=ONE, endpoint=address, bind=True)
    async with (
        engine(connect=address, replay=False) as one,
        engine(connect=address, replay=False) as two,
        listening(at) as source,
    ):
        await one.joined()
        await two.joined()
        with capture_logs() as logs:
            for number in range(1, 61):
                for each, seq, later in ((one, 3 * number, 0.0), (two, number, 0.5)):
                    payload = msgspec.msgpack.encode([number + later, [stored(PROMPT)], 0])
                    await each.send_frames(b"", seq.to_bytes(8, "big"), payload)
                await until(lambda number=number: messages(source) >= 2 * number)  # type: ignore[misc]
        assert told(source).restarts > 20
        assert not told(source).is_known
    counts = Counter(line["event"] for line in logs)
    assert counts == {"smetric.kv_events.restarted": CHANGE_LINES, "smetric.kv_events.changed": CHANGE_LINES}


async def test_hits_are_those_of_best_rank() -> None:
    payloads = captured("kv_dp2.jsonl")
    async with (
        engine() as zero,
        engine() as one,
        listening(publisher(zero), publisher(one)) as source,
    ):
        await zero.joined()
        await one.joined()
        await zero.send(msgspec.msgpack.encode(payloads[0]))
        await one.send(msgspec.msgpack.encode(payloads[2]))
        await known_after(source, 2)
        for payload in (payloads[0], payloads[2]):
            tokens = payload[1][0]["token_ids"]
            assert await hit_len(source, request([*tokens, 1])) == [len(tokens)]


async def test_hits_are_unknown_while_a_rank_is_silent() -> None:
    async with (
        engine(replay=False) as zero,
        engine(replay=False) as one,
        listening(publisher(zero), publisher(one)) as source,
    ):
        await zero.joined()
        await zero.publish(stored(PROMPT))
        await until(lambda: messages(source) == 1)
        assert await hit_len(source, request([9] * 9)) == [None]
        assert await hit_len(source, request(PROMPT, est_hit=BLOCK)) == [5 * BLOCK]


async def test_source_counts_malformed_messages_as_loss() -> None:
    async with followed(stored(PROMPT), replay=False) as (one, source):
        await one.send_frames(b"only one")
        await one.send(b"\xc1")
        await one.send(msgspec.msgpack.encode([1e9, [{"type": "BlockRemoved"}], 0]))
        await one.publish(CLEARED, rank=10_000)
        await until(lambda: told(source).messages.get("malformed") == 4)
        assert not told(source).is_known
        await one.publish(CLEARED)
        await until(lambda: told(source).is_known)


async def test_source_yields_within_burst() -> None:
    async with engine(replay=False) as one, listening(publisher(one)) as source:
        await one.joined()
        for i in range(300):
            await one.publish(*(stored([i * 100 + j] * 10 * BLOCK) for j in range(20)))
        at_each_turn = [messages(source)]
        while at_each_turn[-1] < 300:
            await asyncio.sleep(0)
            at_each_turn.append(messages(source))
        await until(lambda: source.index.blocks == 60_000)
        assert told(source).is_known
        # A message takes half a millisecond, a turn two.
        assert max(after - before for before, after in pairwise(at_each_turn)) < 30


async def test_source_retries_unusable_address_and_logs_each_reason_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "RETRY_S", 0.01)
    tries = 0

    async def run(self: Subscriber, context: zmq.asyncio.Context) -> None:
        nonlocal tries
        tries += 1
        if tries % 10 == 0:
            raise RuntimeError
        raise zmq.ZMQError(errno.EADDRINUSE if tries < 15 else errno.EACCES)

    monkeypatch.setattr(Subscriber, "run", run)
    with capture_logs() as lines:
        async with listening(Publisher(instance=ONE, endpoint="tcp://127.0.0.1:1", bind=True)):
            await until(lambda: tries >= 25)
    assert [(line["event"].rpartition(".")[2], line["endpoint"], line.get("error")) for line in lines] == [
        ("failed", "tcp://127.0.0.1:1", os.strerror(errno.EADDRINUSE)),
        ("crashed", "tcp://127.0.0.1:1", None),
        ("failed", "tcp://127.0.0.1:1", os.strerror(errno.EACCES)),
    ]


async def test_source_reconnects_after_too_large_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber, "RECONNECT_S", 0.0)
    monkeypatch.setattr(subscriber, "MAX_MESSAGE_BYTES", 4096)
    monkeypatch.setattr(subscriber, "REPLAY_SILENCE_S", 0.05)
    async with followed(stored(PROMPT)) as (one, source):
        await one.publish(stored(range(5000)))
        async with asyncio.timeout(5):
            while messages(source) < 2:
                await one.publish(stored([7] * 9))
                await asyncio.sleep(0.02)
        assert (told(source).gaps, told(source).is_known) == (1, False)


async def test_source_logs_contents_lost_with_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(self: Subscriber, context: zmq.asyncio.Context) -> None:
        stream = self.stream_of(0)
        assert stream is not None
        stream.begin_empty()
        self.set_behind(False)
        raise RuntimeError

    monkeypatch.setattr(Subscriber, "run", run)
    with capture_logs() as lines:
        async with listening(Publisher(instance=ONE, endpoint="tcp://127.0.0.1:1")) as source:
            await until(lambda: not source.figures().instances[ONE.id].is_known and len(lines) >= 3)
    assert [line["state"] for line in lines if "state" in line] == ["known", "gap"]


async def test_source_logs_nonsense_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with capture_logs() as lines:
        async with listening(Publisher(instance=ONE, endpoint="nonsense")):
            await until(lambda: len(lines) >= 1)
    assert [(line["event"], line["endpoint"]) for line in lines] == [("smetric.kv_events.failed", "nonsense")]


def test_source_runs_on_uvloop() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_source_replays_a_thousand_lost_messages())

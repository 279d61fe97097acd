"""Order, losses, replays and restarts of one publisher's KV events."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from smetric.fleet.instance import CacheConfig, Instance
from smetric.request.prompt import BlockKeys
from smetric.sources.kv_events import subscriber
from smetric.sources.kv_events.contents import AllBlocksCleared, BlockStored, EventBatch, KvEvent, KvIndex, decode
from smetric.sources.kv_events.publisher import Publisher
from smetric.sources.kv_events.subscriber import MOST_RANKS, REPLAY_TRIES, Arrival, CacheState, RankStream, Subscriber
from tests.sources.kv_events.kv_engine import BLOCK, CLEARED, names_of, removed, stored


def saying(at: float, *events: KvEvent) -> EventBatch:
    return decode(msgspec.msgpack.encode([at, events, 0]))


def message(at: float, *tokens: int) -> EventBatch:
    return saying(at, *[BlockStored([token], None, [token], 1) for token in tokens])


def told(stream: RankStream, seq: int, said: EventBatch) -> Arrival:
    """As a subscriber without a replay socket takes a message."""
    place = stream.classify(seq, said)
    if place is Arrival.AFTER_GAP:
        stream.skip_to(seq)
    if place is not Arrival.REPEATED:
        for event in stream.take(seq, said):
            stream.contents.apply(event)
    return place


def test_stream_is_known_from_first_message_on() -> None:
    stream = RankStream(KvIndex(1 << 20))
    assert (stream.state, stream.knows_nothing) == (CacheState.JOINED_LATE, True)
    assert told(stream, 0, message(1.0, 5)) is Arrival.NEXT
    assert told(stream, 1, message(2.0, 6)) is Arrival.NEXT
    assert (stream.state, len(stream.contents), stream.missed) == (CacheState.KNOWN, 2, 0)


def test_stream_is_unknown_after_joining_late() -> None:
    stream = RankStream(KvIndex(1 << 20))
    assert told(stream, 7, message(1.0, 5)) is Arrival.AFTER_GAP
    assert told(stream, 8, message(2.0, 6)) is Arrival.NEXT
    assert (stream.state, len(stream.contents), stream.missed) == (CacheState.JOINED_LATE, 2, 0)


def test_stream_is_unknown_after_gap_until_cleared() -> None:
    stream = RankStream(KvIndex(1 << 20))
    told(stream, 0, message(1.0, 5))
    assert told(stream, 3, message(2.0, 6)) is Arrival.AFTER_GAP
    assert (stream.state, stream.missed) == (CacheState.GAP, 2)
    told(stream, 4, saying(3.0, AllBlocksCleared()))
    assert (stream.state, len(stream.contents)) == (CacheState.KNOWN, 0)


def test_stream_skips_repetitions_and_restarts_anew() -> None:
    stream = RankStream(KvIndex(1 << 20))
    for seq in range(5):
        told(stream, seq, message(10.0 + seq, seq))
    assert told(stream, 2, message(12.0, 2)) is Arrival.REPEATED
    assert (len(stream.contents), stream.restarts) == (5, 0)
    assert told(stream, 0, message(20.0, 9)) is Arrival.NEXT
    assert (stream.state, len(stream.contents), stream.restarts) == (CacheState.KNOWN, 1, 1)


def test_stream_is_unknown_after_restart_with_gap() -> None:
    stream = RankStream(KvIndex(1 << 20))
    for seq in range(5):
        told(stream, seq, message(10.0 + seq, seq))
    assert told(stream, 2, message(20.0, 9)) is Arrival.AFTER_GAP
    assert (stream.state, len(stream.contents), stream.restarts) == (CacheState.JOINED_LATE, 1, 1)


def test_stream_state_names_the_loss() -> None:
    stream = RankStream(KvIndex(1 << 20))
    states = []
    for seq, event in enumerate(
        (
            BlockStored([1], None, [5], 1),
            BlockStored([2], 9, [5], 1),
            BlockStored([3], None, [5], 1, group_idx=3),
        )
    ):
        told(stream, seq, saying(float(seq), event))
        states.append(stream.state)
    stream.restart()
    states.append(stream.state)
    assert states == [CacheState.KNOWN, CacheState.UNKNOWN_BLOCK, CacheState.UNSUPPORTED, CacheState.JOINED_LATE]
    assert stream.orphans == 1


def ranks() -> Subscriber:
    return Subscriber(Publisher(instance=Instance("one", "http://127.0.0.1:1"), endpoint="tcp://x"), KvIndex(1 << 20))


def batch(at: float, *events: object, rank: int = 0) -> EventBatch:
    return decode(msgspec.msgpack.encode([at, events, rank]))


async def heard(told: Subscriber, *ranks: int) -> None:
    """The first message of each rank, as they come where nothing was missed."""
    told.set_behind(False)
    for rank in ranks:
        stream = told.stream_of(rank)
        assert stream is not None
        assert told.classify(stream, 0, batch(1.0, CLEARED, rank=rank)) is Arrival.NEXT
        await told.take(stream, 0, batch(1.0, CLEARED, rank=rank), "ok")
        told._log_state(rank, stream)


async def test_subscriber_keeps_one_stream_per_rank() -> None:
    told = ranks()
    await heard(told, 0, MOST_RANKS - 1)
    assert (told.stream_of(-1), told.stream_of(MOST_RANKS)) == (None, None)
    assert [*told.streams] == [0, MOST_RANKS - 1]
    assert told.messages == {"ok": 2, "malformed": 2}
    assert [stream.state for stream in told.streams.values()] == [CacheState.KNOWN] * 2


async def test_subscriber_logs_losses_of_all_ranks_once() -> None:
    told = ranks()
    with capture_logs() as logs:
        await heard(told, 0, 1)
        for _ in range(2):
            told.set_behind(True)
        for _ in range(2):
            told.lose(CacheState.OTHER_TOPIC)
    assert [(line["rank"], line["state"]) for line in logs] == [
        (rank, state) for state in ("known", "behind", "other_topic") for rank in (0, 1)
    ]
    late = told.stream_of(2)
    assert late is not None
    assert late.is_behind


async def test_subscriber_forgets_once_per_restart() -> None:
    told = ranks()
    await heard(told, 0)
    stream = told.streams[0]
    assert told.classify(stream, 0, batch(2.0, CLEARED)) is Arrival.NEXT
    await told.take(stream, 0, batch(2.0, CLEARED), "ok")
    told.forget()
    assert (stream.next, stream.restarts) == (1, 1)
    told.forget()
    assert (stream.next, stream.state) == (None, CacheState.JOINED_LATE)


#: Prompts of up to four blocks, each of one token said again and again.
PROMPTS = ["".join(path) for size in range(1, 5) for path in itertools.product("ab", repeat=size)]


def tokens(prompt: str) -> list[int]:
    return [ord(letter) for letter in prompt for _ in range(BLOCK)]


class Engine:
    """A cache that gives up what was used longest ago, as engines do, and what it tells of that.

    Args:
        size: blocks it has.
        buffer: messages it keeps for replays.
        seed: of its names.
    """

    clock = itertools.count(1)

    def __init__(self, size: int, buffer: int, seed: str) -> None:
        self.seed = seed
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self.held: list[str] = [""] * size
        self.users = [0] * size
        self.running: list[list[int]] = []
        self.next = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)

    def copies(self) -> Counter[str]:
        return Counter(filter(None, self.held))

    def hit(self, prompt: str) -> int:
        copies = self.copies()
        return next((at for at in range(len(prompt)) if not copies[prompt[: at + 1]]), len(prompt))

    def run(self, prompt: str, *, is_kept: bool) -> tuple[int, bytes] | None:
        """Run *prompt*, for some time if it *is_kept*; returns the message about it, if there is one."""
        hit = self.hit(prompt)
        if hit == len(prompt):
            hit -= 1  # the last token is computed again, and its block with it
        shared = [self.held.index(prompt[: at + 1]) for at in range(hit)]
        if len(self.free.keys() - set(shared)) < len(prompt) - hit:
            return None
        for block in shared:
            self.free.pop(block, None)
        events = []
        taken = list(shared)
        for at in range(hit, len(prompt)):
            block, _ = self.free.popitem(last=False)
            if self.held[block]:
                events.append(removed(names_of(tokens(self.held[block]), self.seed)[-1]))
            self.held[block] = prompt[: at + 1]
            taken.append(block)
        for block in taken:
            self.users[block] += 1
        self.running.append(taken)
        if not is_kept:
            self.end()
        return self.tell(*events, stored(tokens(prompt), skip=hit, seed=self.seed))

    def end(self) -> None:
        """The latest request ends."""
        for block in reversed(self.running.pop()):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None

    def clear(self) -> tuple[int, bytes]:
        while self.running:
            self.end()
        self.held = [""] * len(self.held)
        return self.tell(CLEARED)

    def tell(self, *events: object) -> tuple[int, bytes]:
        message = self.next, msgspec.msgpack.encode([float(next(self.clock)), events, 0])
        self.next += 1
        self.buffer.append(message)
        return message


class Line:
    """Connection between an engine and a subscriber, which loses messages, and drops some of a replay.

    Args:
        size: blocks of the engine.
        capacity: what is known of that.
        buffer: messages the engine keeps for replays, 0 without a replay socket.
        drops: whether a replay drops its next message, asked anew for each; but never one of the first two.
    """

    def __init__(self, size: int, capacity: int | None, buffer: int, drops: Callable[[], bool] = lambda: False) -> None:
        self.size, self.buffer, self.drops = size, buffer, drops
        #: What goes on while a replay is answered.
        self.meanwhile: Callable[[], object] = lambda: None
        self.processes = 0
        self.engine = self.started()
        instance = Instance("one", "http://127.0.0.1:1")
        instance.cache = CacheConfig(BLOCK, capacity)
        publisher = Publisher(instance=instance, endpoint="tcp://x", replay="tcp://y" if buffer else "")
        self.index = KvIndex(1 << 24)
        self.listener = Subscriber(publisher, self.index)
        self.listener._context = zmq.asyncio.Context.instance()
        self.is_connected = False
        #: Nothing could have shown yet that something is missing: a lost message, or a new process.
        self.is_deceived = False

    def started(self) -> Engine:
        self.processes += 1
        return Engine(self.size, self.buffer, str(self.processes))

    @contextmanager
    def replaying(self) -> Iterator[None]:
        async def replayed(_: object, __: str, start: int, ___: str) -> AsyncGenerator[tuple[int, EventBatch]]:
            messages = [message for message in self.engine.buffer if message[0] >= start]
            for at, (number, payload) in enumerate(messages):
                if at < 2 or not self.drops():
                    yield number, decode(payload)
            self.meanwhile()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(subscriber, "replayed", replayed)
            yield

    async def send(self, message: tuple[int, bytes] | None, *, is_lost: bool = False) -> None:
        if message is None or not self.is_connected:
            return
        self.is_deceived = is_lost
        if not is_lost:
            await self.listener._receive([b"", message[0].to_bytes(8, "big"), message[1]])

    async def connect(self, is_up: bool) -> None:
        if is_up is not self.is_connected:
            self.is_connected = is_up
            self.listener._connection_changed(zmq.EVENT_HANDSHAKE_SUCCEEDED if is_up else zmq.EVENT_DISCONNECTED)
            await self.catch_up()

    async def catch_up(self) -> None:
        if self.is_connected and self.buffer and self.listener._catch_up_due == 0:
            await self.listener._catch_up()
            self.is_deceived = False

    async def metrics_tell(self) -> None:
        """The metrics page shows which process answers."""
        if self.processes > 1:
            self.processes = 1
            self.listener.forget()
            await self.catch_up()

    @property
    def stream(self) -> RankStream:
        return self.listener.streams[0]

    def state(self) -> CacheState:
        return self.stream.state

    def believed(self) -> list[int]:
        """Blocks of each of `PROMPTS` that are believed held, or are certain while not all is known."""
        contents, found = self.stream.contents, []
        for prompt in PROMPTS:
            keys = BlockKeys(tokens(prompt), BLOCK)
            (depth,) = self.index.depths(keys, len(prompt), [contents.bit])
            found.append(contents.certain(keys.upto(len(prompt)), depth))
        return found

    def check(self) -> None:
        """Known contents are right; unknown contents are certain only of blocks that are held."""
        if not self.is_connected or self.is_deceived or self.processes > 1 or not self.listener.streams:
            return
        if self.stream.is_behind:
            assert self.stream.state is not CacheState.KNOWN
            return
        believed, held = self.believed(), [self.engine.hit(prompt) for prompt in PROMPTS]
        assert all(one <= other for one, other in zip(believed, held, strict=True))
        # Once a cache of known size has turned over, what was hit and never built upon is taken for evicted.
        if self.stream.state is CacheState.KNOWN and self.listener.publisher.instance.cache.num_blocks is None:
            assert believed == held


STEP = st.tuples(
    st.sampled_from(["run"] * 6 + ["keep", "end", "lose", "clear", "cut", "connect", "connect", "restart", "metrics"]),
    st.sampled_from(PROMPTS),
)


@settings(max_examples=150)
@given(
    st.lists(STEP, max_size=40),
    st.sampled_from([4, 6, 12]),
    st.booleans(),
    st.sampled_from([0, 3, 1000]),
    st.lists(st.booleans(), max_size=30),
)
def test_subscriber_is_right_whatever_is_lost(
    steps: list[tuple[str, str]], size: int, is_sized: bool, buffer: int, dropped: list[bool]
) -> None:
    line = Line(size, size if is_sized else None, buffer, lambda: dropped.pop() if dropped else False)

    async def go() -> None:
        for what, prompt in steps:
            match what:
                case "run" | "keep":
                    await line.send(line.engine.run(prompt, is_kept=what == "keep"))
                case "end" if line.engine.running:
                    line.engine.end()
                case "lose":
                    await line.send(line.engine.run(prompt, is_kept=False), is_lost=True)
                case "clear":
                    await line.send(line.engine.clear())
                case "cut" | "connect":
                    await line.connect(what == "connect")
                case "restart":
                    await line.connect(False)
                    line.engine = line.started()
                case "metrics":
                    await line.metrics_tell()
            line.check()

    with line.replaying():
        asyncio.run(go())


def published(drops: Callable[[], bool], count: int) -> Line:
    """An engine that has told of *count* prompts before anybody listened, and is idle since."""
    line = Line(4, None, 1000, drops)
    for number in range(count):
        line.engine.run(PROMPTS[-1 - number % 8], is_kept=False)
    return line


async def test_subscriber_repeats_replay_with_dropped_end() -> None:
    answers = itertools.chain([False, True, True], itertools.repeat(False))
    line = published(lambda: next(answers), 5)
    with line.replaying():
        await line.connect(True)
    assert line.state() is CacheState.KNOWN
    assert line.stream.next == 5
    line.check()


async def test_subscriber_is_behind_until_replay_is_complete() -> None:
    line = published(lambda: True, 3 * REPLAY_TRIES)
    with line.replaying():
        await line.connect(True)
        assert line.state() is CacheState.BEHIND
        while line.state() is CacheState.BEHIND:
            await line.listener._catch_up()
    assert line.stream.next == 3 * REPLAY_TRIES
    line.check()


async def test_subscriber_is_behind_after_restart_with_partial_replay() -> None:
    line = published(lambda: True, 0)
    with line.replaying():
        await line.connect(True)
        for number in range(3 * REPLAY_TRIES):
            await line.send(line.engine.run(PROMPTS[-1 - number % 8], is_kept=False))
        assert line.state() is CacheState.KNOWN
        line.listener.forget()
        await line.catch_up()
    assert line.state() is CacheState.BEHIND


async def test_subscriber_stops_replays_of_busy_engine() -> None:
    line = published(lambda: False, 3)
    answers = []
    line.meanwhile = lambda: answers.append(line.engine.run(PROMPTS[-1 - len(answers) % 8], is_kept=False))
    with line.replaying():
        await line.connect(True)
        assert line.state() is CacheState.BEHIND
        await line.send(line.engine.run(PROMPTS[-1], is_kept=False))
        assert line.state() is CacheState.KNOWN
        before = len(answers)
        await line.listener._catch_up()
    assert (len(answers), line.state()) == (before, CacheState.KNOWN)

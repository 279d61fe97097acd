"""Subscription to one publisher of KV events: order of messages, losses, replays, restarts.

The wire is that of vLLM's ZMQ publisher: frames topic, sequence number (8 bytes, big endian), payload. A replay socket
takes an empty frame and the first sequence number wanted. It answers with an empty frame, topic, number and payload
for each message it still has, then with the number 2⁶⁴ - 1.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from itertools import chain

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from smetric.log_limit import CHANGE_LINES, LogLimit
from smetric.sources.kv_events.contents import (
    CacheContents,
    EventBatch,
    KvEvent,
    KvIndex,
    MessageError,
    decode,
    pieces,
)
from smetric.sources.kv_events.publisher import Publisher

#: Seconds of work after which other tasks run.
TURN_S = 0.002
#: Seconds within which a restart seen in the metrics is the one seen in the events before.
SAME_RESTART_S = 60.0
#: Most data-parallel ranks behind one address.
MOST_RANKS = 64
#: Most messages queued in a socket. An engine step makes one; messages beyond that are dropped and replayed later.
MOST_WAITING = 10_000
#: Largest message that is read, in bytes: a step of a million tokens is 5 MB.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
#: Timeout of a single answer of a replay, and of a whole replay, in seconds. Engines poll that socket every 100 ms.
REPLAY_SILENCE_S = 2.0
REPLAY_S = 30.0
#: Most replays of one gap. Several may be needed: the engine's socket drops messages that it cannot send at once.
REPLAY_TRIES = 5
#: Seconds after which a broken connection that ZeroMQ does not retry is made anew.
RECONNECT_S = 5.0
#: Least and most seconds between two attempts to catch up from the replay socket.
CATCH_UP_S = (1.0, 60.0)
_END = 2**64 - 1
_CONNECTION = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED

log = structlog.get_logger("smetric.kv_events")


class Arrival(enum.Enum):
    """Position of a message relative to those before it."""

    NEXT = "next"
    REPEATED = "repeated"
    #: Messages before it are missing.
    AFTER_GAP = "after_gap"


class CacheState(enum.Enum):
    """Knowledge of the contents of a cache, or the reason why they are unknown."""

    KNOWN = "known"
    #: The router subscribed after the engine started, and the replay socket does not reach back that far.
    JOINED_LATE = "joined_late"
    #: Messages may be missing: the connection is new or down, or a replay is running.
    BEHIND = "behind"
    #: Messages were lost for good.
    GAP = "gap"
    #: A message could not be read.
    MALFORMED = "malformed"
    #: The engine publishes under a topic other than the configured one.
    OTHER_TOPIC = "other_topic"
    #: An event named a block that was never stored, or the index is full.
    UNKNOWN_BLOCK = "unknown_block"
    #: The model has several kinds of KV caches, whose blocks do not determine its hits.
    UNSUPPORTED = "unsupported"


class RankStream:
    """Messages of one data-parallel rank of one engine, in order, and the cache contents that they describe.

    Args:
        index: the index its contents are entered in.
    """

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self.contents = CacheContents(index)
        #: Sequence number of the next message; None before the first one of this engine process.
        self.next: int | None = None
        #: Time when the engine made the latest message, seconds on its clock.
        self._latest = -math.inf
        self._loss = CacheState.JOINED_LATE
        self._orphans_before = 0
        #: Messages may be missing although no gap has shown yet.
        self.is_behind = False
        #: Seconds from when the engine made its latest message, by its clock, until it arrived; None before the first.
        self.lag_s: float | None = None
        #: Number of gaps that no replay filled, of messages lost in them, and of restarts seen in sequence numbers.
        self.gaps = 0
        self.missed = 0
        self.restarts = 0

    @property
    def state(self) -> CacheState:
        """State of the contents."""
        if self.contents.unsupported:
            return CacheState.UNSUPPORTED
        if not self.contents.is_complete:
            return self._loss
        return CacheState.BEHIND if self.is_behind else CacheState.KNOWN

    @property
    def orphans(self) -> int:
        """Number of blocks that could not be entered, over all engine processes so far."""
        return self._orphans_before + self.contents.orphans

    @property
    def knows_nothing(self) -> bool:
        """Whether every look-up in the contents is unknown."""
        return not self.contents.is_complete and not len(self.contents)

    def classify(self, seq: int, batch: EventBatch) -> Arrival:
        """Return the position of message *seq*; the first message of a restarted engine starts a new stream."""
        if self.next is not None and seq < self.next:
            # Numbers start again with the engine. A repetition was made no later than the latest message.
            if batch.at <= self._latest:
                return Arrival.REPEATED
            self.restart()
            self.restarts += 1
        return Arrival.NEXT if seq == (self.next or 0) else Arrival.AFTER_GAP

    def take(self, seq: int, batch: EventBatch) -> Iterator[KvEvent]:
        """Make *batch* the latest message; returns its events, to be applied to the contents in order."""
        if seq == 0:
            self.contents.begin()
        if self.contents.is_complete:
            self._loss = CacheState.UNKNOWN_BLOCK  # the cause of any incompleteness that no other loss explains
        self.next = seq + 1
        self._latest = max(self._latest, batch.at)
        return batch.events()

    def skip_to(self, seq: int) -> None:
        """Give up the messages before *seq*."""
        if self.next is None:
            self.lose(CacheState.JOINED_LATE)
        else:
            self.gaps += 1
            self.missed += seq - self.next
            self.lose(CacheState.GAP)
        self.next = seq

    def lose(self, loss: CacheState) -> None:
        """Mark the contents incomplete because of *loss*."""
        self.contents.mark_incomplete()
        self._loss = loss

    def begin_empty(self) -> None:
        """Note that the engine has published nothing yet, so its cache is empty."""
        self.contents.begin()
        self.next = 0

    def restart(self) -> None:
        """Start anew for a new engine process."""
        self.contents.close()
        self._orphans_before += self.contents.orphans
        self.contents = CacheContents(self._index)
        self.next = None
        self._latest = -math.inf
        self._loss = CacheState.JOINED_LATE


class OtherTopic(Exception):
    """Replay of messages under a topic other than the configured one."""


async def replayed(
    context: zmq.asyncio.Context, address: str, start: int, topic: str
) -> AsyncGenerator[tuple[int, EventBatch]]:
    """Yield number and content of every message that the replay socket at *address* still has from *start* on.

    Raises:
        TimeoutError: no answer came within `REPLAY_SILENCE_S`.
        MessageError: an answer is malformed.
        OtherTopic: the topic of a message does not begin with *topic*, so later messages would never arrive.
    """
    with context.socket(zmq.DEALER) as dealer:
        _configure(dealer, address)
        dealer.connect(address)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            if not await dealer.poll(int(REPLAY_SILENCE_S * 1000)):
                raise TimeoutError
            frames = await dealer.recv_multipart()
            if len(frames) < 3 or len(frames[-2]) != 8:
                raise MessageError("frames")
            seq = int.from_bytes(frames[-2], "big")
            if seq == _END:
                return
            if len(frames) > 3 and not frames[-3].startswith(topic.encode()):
                raise OtherTopic
            yield seq, decode(frames[-1])


def _configure(socket: zmq.asyncio.Socket, address: str) -> None:
    """Set bounds and heartbeats before *socket* is connected to *address* or bound."""
    socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)


class Subscriber:
    """Subscription that keeps the contents behind one publisher's address up to date.

    An address mostly has one rank, but several may connect to an address that is bound here.

    Args:
        publisher: the address.
        index: the index that contents are entered in.

    Attributes:
        caught_up: set while nothing is missing, as far as the replay socket shows.
    """

    def __init__(self, publisher: Publisher, index: KvIndex) -> None:
        self.publisher = publisher
        self._index = index
        #: The stream of each rank seen so far.
        self.streams: dict[int, RankStream] = {}
        #: Number of messages by result: ok, replayed, repeated, malformed.
        self.messages: Counter[str] = Counter()
        self._topic = publisher.topic.encode()
        self._context: zmq.asyncio.Context | None = None
        self._is_connected = False
        self.caught_up = asyncio.Event()
        self._connect_due = math.inf
        self._catch_up_due = 0.0
        self._catch_up_pause = CATCH_UP_S[0]
        self._turn_ends = 0.0
        self._restart_seen_at = -math.inf
        self._states: dict[int, CacheState] = {}
        self._log_limit = LogLimit()
        #: An engine that flaps, or two at one address, would log with every message.
        self._change_limit = LogLimit(lines=CHANGE_LINES)

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Listen until cancelled, on sockets of *context*.

        Raises:
            zmq.ZMQError: the address cannot be used.
        """
        self._context = context
        address, bind = self.publisher.endpoint, self.publisher.bind
        with context.socket(zmq.SUB) as events:
            _configure(events, address)
            # Several engines may connect to an address bound here, so ZeroMQ filters by topic. An address connected to
            # is one instance's own: all its messages are taken, which shows whether the topic is right.
            events.setsockopt(zmq.SUBSCRIBE, self._topic if bind else b"")
            with events.get_monitor_socket(_CONNECTION) as connection:
                try:
                    if bind:
                        events.bind(address)
                    else:
                        events.connect(address)
                    await self._listen(events, connection)
                finally:
                    events.disable_monitor()

    async def _listen(self, events: zmq.asyncio.Socket, connection: zmq.asyncio.Socket) -> None:
        waiting: zmq.Socket[bytes] = zmq.Socket.shadow(events)
        poller = zmq.asyncio.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(connection, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll(1000))
            # Events of the connection come first: they are older than its messages.
            while await connection.poll(0):
                self._connection_changed(parse_monitor_message(await connection.recv_multipart())["event"])
            if time.monotonic() >= self._connect_due and not self.publisher.bind:
                self._connect_due = math.inf
                events.disconnect(self.publisher.endpoint)
                events.connect(self.publisher.endpoint)
            if self.publisher.replay and self._is_connected and time.monotonic() >= self._catch_up_due:
                await self._catch_up()
            if events in ready:
                await self._drain(waiting)

    def _connection_changed(self, event: int) -> None:
        """Fall behind: messages published without a connection are lost, which the next message or a replay shows.

        After a message that is too large or malformed, ZeroMQ gives up a connection for good without a retry.
        """
        self._connect_due = math.inf
        if event == zmq.EVENT_CONNECT_RETRIED:
            return
        self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not self._is_connected:
            self._connect_due = time.monotonic() + RECONNECT_S
        self._fall_behind()

    def _fall_behind(self) -> None:
        self._catch_up_due, self._catch_up_pause = 0.0, CATCH_UP_S[0]
        self.set_behind(True)

    async def _drain(self, waiting: zmq.Socket[bytes]) -> None:
        """Take all queued messages, in turns, so that a burst never stalls the loop."""
        self._turn_ends = time.perf_counter() + TURN_S
        while True:
            try:
                frames = waiting.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            await self._receive(frames)
            await self._yield_turn()

    async def _yield_turn(self) -> None:
        """Let other tasks run if this one has worked for `TURN_S`."""
        if time.perf_counter() >= self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.perf_counter() + TURN_S

    async def _receive(self, frames: list[bytes]) -> None:
        """Take one published message, after the messages lost before it."""
        if not frames[0].startswith(self._topic):
            if not self.messages["ok"]:
                self.lose(CacheState.OTHER_TOPIC)
            return
        try:
            if len(frames) != 3 or len(frames[1]) != 8:
                raise MessageError("frames")
            seq, batch = int.from_bytes(frames[1], "big"), decode(frames[2])
        except MessageError:
            self.messages["malformed"] += 1
            self.lose(CacheState.MALFORMED)
            return
        stream = self.stream_of(batch.rank)
        if stream is None:
            return
        arrival = self.classify(stream, seq, batch)
        if arrival is Arrival.REPEATED:
            self.messages["repeated"] += 1
            return
        if arrival is Arrival.AFTER_GAP:
            if self.publisher.replay:
                stream.is_behind = True
                await self._replay(stream.next or 0, seq)
            if stream.next != seq:
                stream.skip_to(seq)
        await self.take(stream, seq, batch, "ok")
        if stream.next is not None:  # else the engine restarted meanwhile
            # Clocks of two hosts differ; a message from the future has no lag.
            stream.lag_s = max(0.0, time.time() - batch.at)
            stream.is_behind = False
            self._log_state(batch.rank, stream)

    def stream_of(self, rank: int) -> RankStream | None:
        """Return the stream of *rank*; None if no engine has such a rank."""
        stream = self.streams.get(rank)
        if stream is None:
            if not 0 <= rank < MOST_RANKS:
                self.messages["malformed"] += 1
                return None
            stream = self.streams[rank] = RankStream(self._index)
            stream.is_behind = not self.caught_up.is_set()
        return stream

    def classify(self, stream: RankStream, seq: int, batch: EventBatch) -> Arrival:
        """Return the position of message *seq* of *stream*, and log a restart that it shows."""
        restarts = stream.restarts
        arrival = stream.classify(seq, batch)
        if stream.restarts > restarts:
            self._log_restart(batch.rank)
        return arrival

    async def take(self, stream: RankStream, seq: int, batch: EventBatch, result: str) -> None:
        """Apply *batch*, the next message of *stream*, and count it as *result*."""
        stream.contents.capacity = self.publisher.instance.cache.num_blocks
        events = stream.take(seq, batch)
        contents = stream.contents
        try:
            for piece in chain.from_iterable(map(pieces, events)):
                contents.apply(piece)
                await self._yield_turn()
                if stream.contents is not contents:
                    break  # the engine restarted meanwhile, so the rest is about a cache that is gone
        except MessageError:
            stream.lose(CacheState.MALFORMED)
            result = "malformed"
        self.messages[result] += 1

    async def _replay(self, start: int, until: int | None = None) -> set[int] | None:
        """Take the replayed messages from *start* on and before *until*; None if the replay was incomplete.

        An answer that begins after the position of the stream shows that the engine dropped older messages. A gap
        within an answer shows that the engine's socket dropped a message, so it is asked for again. Nothing shows that
        the last messages were dropped: the replay is complete when an answer has nothing new.

        Returns:
            the ranks that were heard.
        """
        assert self._context is not None, "run() comes first"
        heard: set[int] = set()
        at = self.publisher
        for _ in range(REPLAY_TRIES):
            last_by_rank: dict[int, int] = {}
            is_new = False
            try:
                async with (
                    asyncio.timeout(REPLAY_S),
                    aclosing(replayed(self._context, at.replay, start, at.topic)) as answer,
                ):
                    async for seq, batch in answer:
                        stream = self.stream_of(batch.rank)
                        if stream is None or (until is not None and seq >= until):
                            continue
                        heard.add(batch.rank)
                        arrival = self.classify(stream, seq, batch)
                        if arrival is Arrival.AFTER_GAP and (batch.rank in last_by_rank or (stream.next or 0) < start):
                            start = stream.next or 0
                            break
                        last_by_rank[batch.rank] = seq
                        if arrival is Arrival.AFTER_GAP:
                            stream.skip_to(seq)
                        if arrival is not Arrival.REPEATED:
                            is_new = True
                            await self.take(stream, seq, batch, "replayed")
                    else:
                        if not is_new or (until is not None and until - 1 in last_by_rank.values()):
                            return heard
                        start = min(last_by_rank.values())
            except (TimeoutError, MessageError, OtherTopic) as error:
                problem = type(error).__name__
                self._log(log.warning, "smetric.kv_events.no_replay", self._log_limit, problem, problem=problem)
                return None
        return None

    async def _catch_up(self) -> None:
        """Replay the messages published before the connection, or while there was none. The engine may be idle since.

        The last message seen is asked for once more: an engine that does not have it is another process. An engine
        that keeps publishing adds to each answer; its next message then shows that nothing is missing.
        """
        if not self.streams or any(stream.is_behind for stream in self.streams.values()):
            while True:
                starts = [max(0, (stream.next or 0) - 1) for stream in self.streams.values()]
                heard = await self._replay(min(starts, default=0))
                if heard is None:
                    self._catch_up_due = time.monotonic() + self._catch_up_pause
                    self._catch_up_pause = min(2 * self._catch_up_pause, CATCH_UP_S[1])
                    return
                silent = [(rank, one) for rank, one in self.streams.items() if rank not in heard and one.next]
                if not silent:
                    break
                for rank, stream in silent:
                    stream.restart()
                    self._log_restart(rank)
            if not self.streams:  # only messages show which ranks there are
                self.stream_of(0)
            for stream in self.streams.values():
                if stream.next is None:
                    stream.begin_empty()
        self._catch_up_due = math.inf
        self.set_behind(False)

    def set_behind(self, is_behind: bool) -> None:
        """Set for all ranks whether messages may be missing."""
        if is_behind:
            self.caught_up.clear()
        else:
            self.caught_up.set()
        for rank, stream in self.streams.items():
            stream.is_behind = is_behind
            self._log_state(rank, stream)

    def lose(self, loss: CacheState) -> None:
        """Mark the contents of all ranks incomplete because of *loss*."""
        for rank, stream in self.streams.items():
            stream.lose(loss)
            self._log_state(rank, stream)

    def forget(self) -> None:
        """Start anew after a restart that the metrics show, unless the events showed it before."""
        if time.monotonic() - self._restart_seen_at < SAME_RESTART_S:
            self._restart_seen_at = -math.inf
            return
        for stream in self.streams.values():
            stream.restart()
        self._fall_behind()

    def _log_restart(self, rank: int) -> None:
        self._restart_seen_at = time.monotonic()
        self._log(log.warning, "smetric.kv_events.restarted", self._change_limit, rank=rank)

    def _log_state(self, rank: int, stream: RankStream) -> None:
        """Log that contents became known or unknown."""
        state = stream.state
        if self._states.get(rank) is not state:
            self._states[rank] = state
            write = log.info if state is CacheState.KNOWN else log.warning
            self._log(write, "smetric.kv_events.changed", self._change_limit, rank=rank, state=state.value)

    def _log(
        self, write: Callable[..., object], event: str, limit: LogLimit, key: str = "", **fields: str | int
    ) -> None:
        if (kept_back := limit.passes(key or event)) is not None:
            write(event, instance=self.publisher.instance.id, **fields, kept_back=kept_back)

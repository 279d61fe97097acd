"""Listens to one engine's KV events: a SUB socket for what is published, a DEALER for what was missed.

The wire is that of vLLM's ZMQ publisher: frames topic, sequence number (8 bytes, big endian), payload. Its replay
socket is asked with an empty frame and the first number wanted, and answers with an empty frame, topic, number and
payload for each message it still has, then with the number 2⁶⁴ - 1. What messages say is in `kv_message`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
import zmq
import zmq.asyncio

from smetric.sources.kv_index import KvIndex
from smetric.sources.kv_message import Message, MessageError, decode
from smetric.sources.kv_publisher import Publisher
from smetric.sources.kv_stream import Place, State, Stream

#: Messages that may wait in a socket. An engine step makes one; what is too much is dropped, and asked for again.
MOST_WAITING = 10_000
#: Largest message that is read, in bytes: a step of a million tokens is 5 MB.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
#: Seconds of work after which other tasks get their turn.
TURN_S = 0.002
#: Longest silence of a replay, and longest replay, in seconds. Engines look at that socket every 100 ms.
REPLAY_SILENCE_S = 2.0
REPLAY_S = 30.0
#: Replays of one gap: the engine's socket drops what it cannot send at once.
REPLAY_TRIES = 5
#: Seconds between two tries to learn an engine from its replay socket while it publishes nothing, least and most.
RELEARN_S = (1.0, 60.0)
#: Seconds within which a restart seen in the metrics is the one that was seen in the events.
SAME_RESTART_S = 60.0
#: Most data-parallel ranks behind one address.
MOST_RANKS = 64
_END = 2**64 - 1

log = structlog.get_logger("smetric.kv_events")


class Subscriber:
    """Keeps one publisher's contents up to date.

    Args:
        publisher: where to listen.
        index: where contents are entered.
        context: for the sockets.
    """

    def __init__(self, publisher: Publisher, index: KvIndex, context: zmq.asyncio.Context) -> None:
        self.publisher = publisher
        self._index = index
        self._context = context
        #: By data-parallel rank: mostly one, but several may connect to an address bound here.
        self.streams: dict[int, Stream] = {}
        #: Messages by result: ok, replayed, repeated, malformed.
        self.messages: Counter[str] = Counter()
        self._states: dict[int, State] = {}
        self._turn_ends = 0.0
        self._relearn_due = 0.0
        self._relearn_pause = RELEARN_S[0]
        self._restart_seen_at = float("-inf")

    async def run(self) -> None:
        """Listen until cancelled.

        Raises:
            zmq.ZMQError: the endpoint cannot be used.
        """
        with self._context.socket(zmq.SUB) as events:
            _configure(events, self.publisher.endpoint)
            events.setsockopt(zmq.SUBSCRIBE, self.publisher.topic.encode())
            if self.publisher.bind:
                events.bind(self.publisher.endpoint)
            else:
                events.connect(self.publisher.endpoint)
            waiting: zmq.Socket[bytes] = zmq.Socket.shadow(events)
            while True:
                if self.publisher.replay and not self._has_begun and time.monotonic() >= self._relearn_due:
                    await self._learn()
                if await events.poll(1000):
                    await self._drain(waiting)

    async def _drain(self, waiting: zmq.Socket[bytes]) -> None:
        """Take what has arrived, in turns, so that a burst never stalls the loop."""
        self._turn_ends = time.perf_counter() + TURN_S
        while True:
            try:
                frames = waiting.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            await self._receive(frames)
            await self._give_turn()

    async def _give_turn(self) -> None:
        if time.perf_counter() >= self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.perf_counter() + TURN_S

    async def _receive(self, frames: list[bytes]) -> None:
        """One published message, after whatever was missed before it."""
        read = self._read(frames)
        if read is None:
            return
        seq, message = read
        stream = self._stream(message.rank)
        if stream is None:
            return
        restarts = stream.restarts
        place = stream.place(seq, message)
        if stream.restarts > restarts:
            self._restart_seen_at = time.monotonic()
            log.warning("smetric.kv_events.restarted", instance=self.publisher.instance.id, rank=message.rank)
        if place is Place.REPEATED:
            self.messages["repeated"] += 1
            return
        if place is Place.AFTER_GAP:
            if self.publisher.replay:
                await self._catch_up(stream.next or 0, seq)
            if stream.next != seq:
                stream.skip_to(seq)
        await self._take(stream, seq, message, "ok")
        self._tell(message.rank, stream)

    def _read(self, frames: list[bytes]) -> tuple[int, Message] | None:
        """Sequence number and message; what cannot be read is a loss of all that this publisher told."""
        if len(frames) == 3 and len(frames[1]) == 8:
            try:
                return int.from_bytes(frames[1], "big"), decode(frames[2])
            except MessageError:
                pass
        self.messages["malformed"] += 1
        for rank, stream in self.streams.items():
            stream.lose(State.MALFORMED)
            self._tell(rank, stream)
        return None

    def _stream(self, rank: int) -> Stream | None:
        stream = self.streams.get(rank)
        if stream is None:
            if not 0 <= rank < MOST_RANKS:
                self.messages["malformed"] += 1
                return None
            stream = self.streams[rank] = Stream(self._index)
        return stream

    async def _take(self, stream: Stream, seq: int, message: Message, result: str) -> None:
        self.messages[result] += 1
        stream.contents.capacity = self.publisher.instance.cache.num_blocks
        for event in stream.take(seq, message):
            stream.contents.apply(event)
            await self._give_turn()

    async def _catch_up(self, start: int, until: int | None = None) -> bool:
        """Take what the replay socket has from *start* on and before *until*; False if it does not answer.

        Where an answer begins later than the stream stands, the engine no longer has what is between; where a message
        is missing within an answer, the engine's socket dropped it, and it is asked for again.
        """
        for _ in range(REPLAY_TRIES):
            heard: set[int] = set()
            again = False
            try:
                async with asyncio.timeout(REPLAY_S), aclosing(self._replayed(start)) as answer:
                    async for seq, message in answer:
                        stream = self._stream(message.rank)
                        if stream is None or (until is not None and seq >= until):
                            continue
                        expected = stream.next or 0
                        if seq > expected and message.rank in heard:
                            start, again = expected, True
                            break
                        heard.add(message.rank)
                        if seq > expected:
                            stream.skip_to(seq)
                        if seq >= expected:
                            await self._take(stream, seq, message, "replayed")
            except (TimeoutError, MessageError) as error:
                problem = type(error).__name__
                log.warning("smetric.kv_events.no_replay", instance=self.publisher.instance.id, problem=problem)
                return False
            if not again:
                break
        return True

    async def _replayed(self, start: int) -> AsyncGenerator[tuple[int, Message]]:
        """What the replay socket answers when asked for *start* and after.

        Raises:
            TimeoutError: it fell silent.
            MessageError: an answer cannot be read.
        """
        with self._context.socket(zmq.DEALER) as dealer:
            _configure(dealer, self.publisher.replay)
            dealer.connect(self.publisher.replay)
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
                yield seq, decode(frames[-1])

    async def _learn(self) -> None:
        """Learn an engine that was there before, and may be idle now, from its replay socket."""
        if not await self._catch_up(0):
            self._relearn_due = time.monotonic() + self._relearn_pause
            self._relearn_pause = min(2 * self._relearn_pause, RELEARN_S[1])
            return
        if not self._has_begun and (stream := self._stream(0)) is not None:
            stream.has_said_nothing()
        for rank, stream in self.streams.items():
            self._tell(rank, stream)

    @property
    def _has_begun(self) -> bool:
        return any(stream.next is not None for stream in self.streams.values())

    def forget(self) -> None:
        """The engine restarted, as its metrics show; nothing to do where its events showed it before."""
        if time.monotonic() - self._restart_seen_at < SAME_RESTART_S:
            self._restart_seen_at = float("-inf")
            return
        for rank, stream in self.streams.items():
            stream.restart()
            self._tell(rank, stream)
        self._relearn_due, self._relearn_pause = 0.0, RELEARN_S[0]

    def _tell(self, rank: int, stream: Stream) -> None:
        """Log when contents become known or unknown."""
        state = stream.state
        if self._states.get(rank) is not state:
            self._states[rank] = state
            write = log.info if state is State.KNOWN else log.warning
            write("smetric.kv_events.changed", instance=self.publisher.instance.id, rank=rank, state=state.value)


def _configure(socket: zmq.asyncio.Socket, address: str) -> None:
    """Bound what waits in the socket, and notice peers that vanish."""
    socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)

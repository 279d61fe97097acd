"""Subscription to one engine's KV events."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from smetric.log_limit import LogLimit
from smetric.sources.kv_events.contents import KvIndex
from smetric.sources.kv_events.message import Message, MessageError, decode
from smetric.sources.kv_events.publisher import Publisher
from smetric.sources.kv_events.stream import Place, State, Streams

# The sockets of KV events: bounded, noticing peers that vanish; and the question for messages that were missed.
#
# vLLM's replay socket is asked with an empty frame and the first number wanted. It answers with an empty frame, topic,
# number and payload for each message it still has, then with the number 2⁶⁴ - 1.

#: Messages that may wait in a socket. An engine step makes one; what is too much is dropped, and asked for again.
MOST_WAITING = 10_000
#: Largest message that is read, in bytes: a step of a million tokens is 5 MB.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
#: Longest silence of a replay, in seconds. Engines look at that socket every 100 ms.
REPLAY_SILENCE_S = 2.0
_END = 2**64 - 1


def configure(socket: zmq.asyncio.Socket, address: str) -> None:
    """Set what holds for every socket here, before it is connected to *address* or bound."""
    socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)


class OtherTopic(Exception):
    """A replay of messages that are published under a topic that is not listened to."""


async def replayed(
    context: zmq.asyncio.Context, address: str, start: int, topic: str
) -> AsyncGenerator[tuple[int, Message]]:
    """Number and message of all that the replay socket at *address* still has from *start* on.

    Raises:
        TimeoutError: it fell silent.
        MessageError: an answer cannot be read.
        OtherTopic: a message is of a topic that does not begin with *topic*, so that what follows it would never come.
    """
    with context.socket(zmq.DEALER) as dealer:
        configure(dealer, address)
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


# Listens to one engine's KV events, has what was missed from its replay socket, and knows when it may be behind.
#
# The wire is that of vLLM's ZMQ publisher: frames topic, sequence number (8 bytes, big endian), payload. How a replay
# is asked for is in `smetric.sources.kv_socket`, what messages say in `smetric.sources.kv_message`.

#: Longest replay, in seconds.
REPLAY_S = 30.0
#: Replays of one gap: the engine's socket drops what it cannot send at once.
REPLAY_TRIES = 5
#: Seconds after which a connection that broke, and that ZeroMQ does not try to have again, is made anew.
RECONNECT_S = 5.0
#: Seconds between two tries to have from the replay socket what may have been missed, least and most.
CATCH_UP_S = (1.0, 60.0)

_CONNECTION = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED

log = structlog.get_logger("smetric.kv_events")


class Subscriber:
    """Keeps one publisher's contents up to date.

    Args:
        publisher: where to listen.
        index: where contents are entered.
    """

    def __init__(self, publisher: Publisher, index: KvIndex) -> None:
        self.publisher = publisher
        self._topic = publisher.topic.encode()
        self.streams = Streams(publisher.instance, index)
        self._context: zmq.asyncio.Context | None = None
        self._is_connected = False
        self._connect_due = math.inf
        self._catch_up_due = 0.0
        self._catch_up_pause = CATCH_UP_S[0]
        self._log_limit = LogLimit()

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Listen until cancelled, on sockets of *context*.

        Raises:
            zmq.ZMQError: the endpoint cannot be used.
        """
        self._context = context
        with context.socket(zmq.SUB) as events:
            configure(events, self.publisher.endpoint)
            # Several may connect to an address bound here. One that is connected to is the instance's own, and whatever
            # it publishes tells whether the topic is the right one.
            events.setsockopt(zmq.SUBSCRIBE, self._topic if self.publisher.bind else b"")
            with events.get_monitor_socket(_CONNECTION) as connection:
                try:
                    await self._listen(events, connection)
                finally:
                    events.disable_monitor()

    async def _listen(self, events: zmq.asyncio.Socket, connection: zmq.asyncio.Socket) -> None:
        if self.publisher.bind:
            events.bind(self.publisher.endpoint)
        else:
            events.connect(self.publisher.endpoint)
        waiting: zmq.Socket[bytes] = zmq.Socket.shadow(events)
        poller = zmq.asyncio.Poller()
        poller.register(events, zmq.POLLIN)
        poller.register(connection, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll(1000))
            # What the connection did comes first: its messages came later.
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
        """Whatever was published while there was no connection went by, and only a replay or the next message tells.

        After a message that is too large, or what is none, ZeroMQ gives a connection up for good and retries nothing.
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
        self.streams.be_behind(True)

    async def _drain(self, waiting: zmq.Socket[bytes]) -> None:
        """Take what has arrived, in turns, so that a burst never stalls the loop."""
        self.streams.begin_turn()
        while True:
            try:
                frames = waiting.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            await self._receive(frames)
            await self.streams.give_turn()

    async def _receive(self, frames: list[bytes]) -> None:
        """One published message, after whatever was missed before it."""
        if not frames[0].startswith(self._topic):
            if not self.streams.messages["ok"]:
                self.streams.lose(State.OTHER_TOPIC)
            return
        read = self._read(frames)
        if read is None:
            return
        seq, message = read
        stream = self.streams.of(message.rank)
        if stream is None:
            return
        place = self.streams.place(stream, seq, message)
        if place is Place.REPEATED:
            self.streams.messages["repeated"] += 1
            return
        if place is Place.AFTER_GAP:
            if self.publisher.replay:
                stream.is_behind = True
                await self._replay(stream.next or 0, seq)
            if stream.next != seq:
                stream.skip_to(seq)
        await self.streams.take(stream, seq, message, "ok")
        if stream.next is None:
            return  # seen to have restarted meanwhile, and nothing is known of the new process
        self.streams.be_current(message.rank, stream, message.at)

    def _read(self, frames: list[bytes]) -> tuple[int, Message] | None:
        """Sequence number and message; what cannot be read is a loss of all that this publisher told."""
        if len(frames) == 3 and len(frames[1]) == 8:
            try:
                return int.from_bytes(frames[1], "big"), decode(frames[2])
            except MessageError:
                pass
        self.streams.messages["malformed"] += 1
        self.streams.lose(State.MALFORMED)
        return None

    async def _replay(self, start: int, until: int | None = None) -> set[int] | None:
        """Take what the replay socket has from *start* on and before *until*; the ranks heard, None if not all was had.

        Where an answer begins later than the stream stands, the engine no longer has what is between; where a message
        is missing within an answer, the engine's socket dropped it, and it is asked for again. The last ones may have
        been dropped as well, which nothing shows: all was had when an answer brings nothing new.
        """
        assert self._context is not None, "run() comes first"
        heard: set[int] = set()
        at = self.publisher
        for _ in range(REPLAY_TRIES):
            this_time: dict[int, int] = {}  # by rank, the last number
            is_new = False
            try:
                async with (
                    asyncio.timeout(REPLAY_S),
                    aclosing(replayed(self._context, at.replay, start, at.topic)) as answer,
                ):
                    async for seq, message in answer:
                        stream = self.streams.of(message.rank)
                        if stream is None or (until is not None and seq >= until):
                            continue
                        heard.add(message.rank)
                        place = self.streams.place(stream, seq, message)
                        if place is Place.AFTER_GAP and (message.rank in this_time or (stream.next or 0) < start):
                            start = stream.next or 0
                            break
                        this_time[message.rank] = seq
                        if place is Place.AFTER_GAP:
                            stream.skip_to(seq)
                        if place is not Place.REPEATED:
                            is_new = True
                            await self.streams.take(stream, seq, message, "replayed")
                    else:
                        if not is_new or (until is not None and until - 1 in this_time.values()):
                            return heard
                        start = min(this_time.values())
            except (TimeoutError, MessageError, OtherTopic) as error:
                problem = type(error).__name__
                if (kept_back := self._log_limit.passes(problem)) is not None:
                    told = {"instance": at.instance.id, "problem": problem, "kept_back": kept_back}
                    log.warning("smetric.kv_events.no_replay", **told)
                return None
        return None

    async def _catch_up(self) -> None:
        """Have what was published before the connection, or while there was none. The engine may be idle since.

        The last message seen is asked for once more: an engine that does not have it is another process. One that goes
        on publishing says more with each answer; its next message then shows that nothing is missing.
        """
        streams = self.streams.by_rank
        if streams and not any(stream.is_behind for stream in streams.values()):
            self._caught_up()
            return
        while True:
            starts = [max(0, (stream.next or 0) - 1) for stream in streams.values()]
            heard = await self._replay(min(starts, default=0))
            if heard is None:
                self._catch_up_due = time.monotonic() + self._catch_up_pause
                self._catch_up_pause = min(2 * self._catch_up_pause, CATCH_UP_S[1])
                return
            silent = [(rank, stream) for rank, stream in streams.items() if rank not in heard and stream.next]
            if not silent:
                break
            for rank, stream in silent:
                self.streams.restart(rank, stream)
        # Which ranks there are is known from their messages alone.
        if not streams:
            self.streams.of(0)
        for stream in streams.values():
            if stream.next is None:
                stream.has_said_nothing()
        self._caught_up()

    def _caught_up(self) -> None:
        self._catch_up_due = math.inf
        self.streams.be_behind(False)

    def forget(self) -> None:
        """The engine restarted, as its metrics show; nothing to do where its events showed it before."""
        if self.streams.forget():
            self._fall_behind()

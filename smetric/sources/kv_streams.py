"""What all data-parallel ranks behind one address have told: their streams, counted, and told of when they change.

How their messages come here is in `smetric.sources.kv_subscriber`, the order of one rank's in
`smetric.sources.kv_stream`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain

import structlog

from smetric.fleet.instance import Instance
from smetric.sources.kv_index import KvIndex
from smetric.sources.kv_message import Message, MessageError, pieces
from smetric.sources.kv_stream import Place, State, Stream
from smetric.telemetry.log_limit import CHANGES_TOLD, LogLimit

#: Seconds of work after which other tasks get their turn.
TURN_S = 0.002
#: Seconds within which a restart seen in the metrics is the one that was seen in the events.
SAME_RESTART_S = 60.0
#: Most data-parallel ranks behind one address.
MOST_RANKS = 64

log = structlog.get_logger("smetric.kv_events")


class Streams:
    """One stream for each rank that has been heard: mostly one, but several may connect to an address bound here.

    Args:
        instance: the engine.
        index: where contents are entered.
    """

    def __init__(self, instance: Instance, index: KvIndex) -> None:
        self.by_rank: dict[int, Stream] = {}
        #: Messages by result: ok, replayed, repeated, malformed.
        self.messages: Counter[str] = Counter()
        self._instance = instance
        self._index = index
        self._states: dict[int, State] = {}
        self._turn_ends = 0.0
        self._is_behind = True
        self._restart_seen_at = float("-inf")
        #: An engine that comes and goes, or two at one address, change with every message.
        self._change_limit = LogLimit(lines=CHANGES_TOLD)

    def of(self, rank: int) -> Stream | None:
        """The stream of *rank*; None where no engine has such a rank."""
        stream = self.by_rank.get(rank)
        if stream is None:
            if not 0 <= rank < MOST_RANKS:
                self.messages["malformed"] += 1
                return None
            stream = self.by_rank[rank] = Stream(self._index)
            stream.is_behind = self._is_behind
        return stream

    def be_behind(self, behind: bool) -> None:
        """Whether any of them may have missed messages."""
        self._is_behind = behind
        for rank, stream in self.by_rank.items():
            stream.is_behind = behind
            self._tell(rank, stream)

    def lose(self, loss: State) -> None:
        """All that was told is lost."""
        for rank, stream in self.by_rank.items():
            stream.lose(loss)
            self._tell(rank, stream)

    def place(self, stream: Stream, seq: int, message: Message) -> Place:
        """Where *message*, number *seq*, stands in *stream*."""
        restarts = stream.restarts
        place = stream.place(seq, message)
        if stream.restarts > restarts:
            self._restarted(message.rank)
        return place

    async def take(self, stream: Stream, seq: int, message: Message, result: str) -> None:
        """Enter what *message*, the next one of *stream*, says; *result* is what it counts as."""
        stream.contents.capacity = self._instance.cache.num_blocks
        events = stream.take(seq, message)
        contents = stream.contents
        try:
            for piece in chain.from_iterable(map(pieces, events)):
                contents.apply(piece)
                await self.give_turn()
                if stream.contents is not contents:
                    # The engine was seen to have restarted meanwhile: the rest is about a cache that is gone.
                    break
        except MessageError:
            stream.lose(State.MALFORMED)
            result = "malformed"
        self.messages[result] += 1

    def be_current(self, rank: int, stream: Stream, at: float) -> None:
        """Nothing is missing before the latest message of *stream*, which its engine made *at* by its own clock."""
        # Clocks of two hosts differ: what seems to come from later came at once.
        stream.lag_s = max(0.0, time.time() - at)
        stream.is_behind = False
        self._tell(rank, stream)

    def begin_turn(self) -> None:
        """Other tasks have just had their turn."""
        self._turn_ends = time.perf_counter() + TURN_S

    async def give_turn(self) -> None:
        """Let other tasks run, if it is time."""
        if time.perf_counter() >= self._turn_ends:
            await asyncio.sleep(0)
            self.begin_turn()

    def restart(self, rank: int, stream: Stream) -> None:
        """What is heard, or is not heard any more, shows that *stream* is of another process."""
        stream.restart()
        self._restarted(rank)

    def forget(self) -> bool:
        """The engine restarted, as its metrics show; False, and nothing done, where its events showed it before."""
        if time.monotonic() - self._restart_seen_at < SAME_RESTART_S:
            self._restart_seen_at = float("-inf")
            return False
        for stream in self.by_rank.values():
            stream.restart()
        return True

    def _restarted(self, rank: int) -> None:
        self._restart_seen_at = time.monotonic()
        self._write(log.warning, "smetric.kv_events.restarted", rank)

    def _tell(self, rank: int, stream: Stream) -> None:
        """Log when contents become known or unknown."""
        state = stream.state
        if self._states.get(rank) is not state:
            self._states[rank] = state
            self._write(
                log.info if state is State.KNOWN else log.warning, "smetric.kv_events.changed", rank, state=state.value
            )

    def _write(self, write: Callable[..., object], event: str, rank: int, **fields: str) -> None:
        if (kept_back := self._change_limit.passes(event)) is not None:
            write(event, instance=self._instance.id, rank=rank, **fields, kept_back=kept_back)

"""Streams of KV events in order."""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

import structlog

from smetric.fleet.instance import Instance
from smetric.log_limit import CHANGES_TOLD, LogLimit
from smetric.sources.kv_events.contents import Contents, KvIndex
from smetric.sources.kv_events.message import Event, Message, MessageError, pieces

# One publisher's messages in order: what is next, what was missed, what is a repetition, and when it has restarted.
#
# All ranks behind one address are in `smetric.sources.kv_streams`, what events mean in `smetric.sources.kv_contents`.


class Place(enum.Enum):
    """Where a message stands."""

    #: It is the next one: take it.
    NEXT = "next"
    #: It was seen before: leave it.
    REPEATED = "repeated"
    #: Messages before it are missing.
    AFTER_GAP = "after_gap"


class State(enum.Enum):
    """Whether a cache's contents are known, or why not."""

    KNOWN = "known"
    #: Nobody was listening when the engine began, and its replay socket does not reach back.
    JOINED_LATE = "joined_late"
    #: There may be messages that have not been had yet: the connection is new or down, or a replay is under way.
    BEHIND = "behind"
    #: Messages were missed and cannot be had any more.
    GAP = "gap"
    #: A message could not be read.
    MALFORMED = "malformed"
    #: The engine publishes under a topic that is not listened to.
    OTHER_TOPIC = "other_topic"
    #: A block was stored after, or removed that was, one nobody told of; or the index is full.
    UNKNOWN_BLOCK = "unknown_block"
    #: The model has several kinds of KV caches, whose blocks do not tell its hits.
    UNSUPPORTED = "unsupported"


class Stream:
    """What one publisher (one data-parallel rank of one engine) has told since its engine started.

    Args:
        index: where its cache's contents are entered.
    """

    __slots__ = (
        "_index",
        "_latest",
        "_loss",
        "_orphans_before",
        "contents",
        "gaps",
        "is_behind",
        "lag_s",
        "missed",
        "next",
        "restarts",
    )

    def __init__(self, index: KvIndex) -> None:
        self._index = index
        self.contents = Contents(index)
        #: Sequence number of the next message; None before the first one of this engine process.
        self.next: int | None = None
        #: When the engine made the latest message, seconds on its clock.
        self._latest = float("-inf")
        self._loss = State.JOINED_LATE
        self._orphans_before = 0
        #: Messages may be missing that nothing has shown to be missing yet.
        self.is_behind = False
        #: Seconds from when the engine made its latest message, by its clock, until it was taken; None before one.
        self.lag_s: float | None = None
        #: How often messages were missed for good, how many, and restarts that the sequence numbers showed.
        self.gaps = 0
        self.missed = 0
        self.restarts = 0

    @property
    def state(self) -> State:
        """Whether its contents are known."""
        if self.contents.unsupported:
            return State.UNSUPPORTED
        if not self.contents.is_complete:
            return self._loss
        return State.BEHIND if self.is_behind else State.KNOWN

    @property
    def orphans(self) -> int:
        """Blocks that could not be entered, in all engine processes so far."""
        return self._orphans_before + self.contents.orphans

    @property
    def knows_nothing(self) -> bool:
        """Whether there is no use in looking a prompt up in its contents."""
        return not self.contents.is_complete and not len(self.contents)

    def place(self, seq: int, message: Message) -> Place:
        """Where *message* stands; a restart is noted here and makes its message the first."""
        if self.next is not None and seq < self.next:
            # Numbers start again with the engine. A repetition was made no later than what was seen.
            if message.at <= self._latest:
                return Place.REPEATED
            self.restart()
            self.restarts += 1
        return Place.NEXT if seq == (self.next or 0) else Place.AFTER_GAP

    def take(self, seq: int, message: Message) -> Iterator[Event]:
        """Make *message* the last one seen; what is to be applied to the contents, in order."""
        if seq == 0:
            self.contents.begin()
        if self.contents.is_complete:
            # Whatever takes its completeness from now on, unless a loss is told, is a block that came from nowhere.
            self._loss = State.UNKNOWN_BLOCK
        self.next = seq + 1
        self._latest = max(self._latest, message.at)
        return message.events()

    def skip_to(self, seq: int) -> None:
        """The messages from the next one up to *seq* cannot be had any more."""
        if self.next is None:
            self.lose(State.JOINED_LATE)
        else:
            self.gaps += 1
            self.missed += seq - self.next
            self.lose(State.GAP)
        self.next = seq

    def lose(self, loss: State) -> None:
        """Something is missing, so the contents are not complete."""
        self.contents.lose()
        self._loss = loss

    def has_said_nothing(self) -> None:
        """The engine has not published anything yet: its cache is empty."""
        self.contents.begin()
        self.next = 0

    def restart(self) -> None:
        """A new engine process: nothing said before holds."""
        self.contents.close()
        self._orphans_before += self.contents.orphans
        self.contents = Contents(self._index)
        self.next = None
        self._latest = float("-inf")
        self._loss = State.JOINED_LATE


# What all data-parallel ranks behind one address have told: their streams, counted, and told of when they change.
#
# How their messages come here is in `smetric.sources.kv_subscriber`, the order of one rank's in
# `smetric.sources.kv_stream`.

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

"""One publisher's messages in order: what is next, what was missed, what is a repetition, and when it has restarted.

All ranks behind one address are in `smetric.sources.kv_streams`, what events mean in `smetric.sources.kv_contents`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from smetric.sources.kv_contents import Contents
from smetric.sources.kv_index import KvIndex
from smetric.sources.kv_message import Event, Message


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

"""Cache models: beliefs about one incarnation of an instance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import structlog

from smetric.fleet.instance import Instance
from smetric.sources.prefix_index.block_table import BlockTable
from smetric.sources.prefix_index.cut import Cut

# What is believed of one incarnation of one instance, and what its answers teach about that.
#
# The blocks it was sent are in `holdings.py`; who asks is `prefix_index.py`.

#: An answer contradicts the index when it reports less than believed by this many blocks and this share.
DOUBT_BLOCKS = 2
DOUBT_SHARE = 1 / 8
#: What is missing counts as evicted once the instance was sent this share of its capacity since it was last used there.
EVICTED_AFTER = 1 / 4
#: Share of the room thought of below which what an eviction shows is more than the index's own coarseness.
SHRINK = 0.9
#: Factor by which the room grows, which an eviction has shown to be small, whenever more is held than believed.
REGAIN = 1.1
#: Answers in a row without any hit where one was believed, after which the instance's cache counts as cleared.
ZEROS = 3
#: Weight of an answer in the share of replies that were found in the cache when their session went on, and the share
#: from which on they are believed to be. They are not where templates leave out what was generated, as reasoning.
REPLY_WEIGHT = 1 / 8
REPLIES = 0.5

log = structlog.get_logger("smetric.index")


class CacheModel:
    """What one instance holds, as far as it was learnt.

    Args:
        instance: whose cache it is about, in its present incarnation.
        table: where its blocks are.
        grain: units (bytes of text, or tokens) of a block.
        units_per_token: units that a token is, until its prompts show it.
        sure_at: when a miss counts as one in any case, monotonic seconds.
    """

    __slots__ = (
        "_entered_then",
        "_grain",
        "_instance",
        "_replies_found",
        "_reports",
        "_shown_room",
        "_table",
        "_zero_tick",
        "_zeros",
        "held",
        "incarnation",
        "since",
        "sure_at",
        "units_per_token",
    )

    def __init__(
        self, instance: Instance, table: BlockTable, grain: int, units_per_token: float, sure_at: float
    ) -> None:
        self._instance = instance
        self._table = table
        self._grain = grain
        self.units_per_token = units_per_token
        self.incarnation = instance.incarnation
        self.held = table.open()
        #: The tick from which on this incarnation is known.
        self.since = table.tick = table.tick + 1
        #: Count of blocks entered at the last loss of knowledge, since which it may hold what is not known here; None
        #: for the beginning, when the instance itself may say that it was empty; and when that is past.
        self._entered_then: int | None = None
        self.sure_at = sure_at
        #: Blocks it has room for, where answers have shown that to be less than its capacity.
        self._shown_room: int | None = None
        #: Share of replies that were held when their session went on; 1 before there was one.
        self._replies_found = 1.0
        #: Whether an answer ever reported cached tokens: one that never does may just not report them.
        self._reports = False
        #: Answers without a hit where one was believed, in a row, and the tick before the first of them.
        self._zeros = 0
        self._zero_tick = 0

    @property
    def capacity(self) -> int | None:
        """Blocks that fit into the instance's cache, None while that is unknown."""
        tokens = self._instance.cache.capacity_tokens
        return None if tokens is None else int(tokens * self.units_per_token / self._grain)

    @property
    def room(self) -> int:
        """Blocks it is believed to keep."""
        capacity = self.capacity
        return self._table.most_blocks if capacity is None else self._room_of(capacity)

    def _room_of(self, capacity: int) -> int:
        return capacity if self._shown_room is None else min(capacity, self._shown_room)

    def enter(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """It holds *blocks* from now on; returns what of them it held before, as of `Held.runs`."""
        capacity = self.capacity
        if capacity is None:
            return self._table.enter(self.held, blocks, self._table.most_blocks)
        runs = self._table.enter(self.held, blocks, self._room_of(capacity))
        if self.held.entered - (self._entered_then or 0) >= capacity and self.sure_at > -math.inf:
            # It forgets what was used longest ago first, so by now everything from before has made room.
            self.sure_at = -math.inf
            self._table.surprises += 1
        return runs

    def lost(self, sure_at: float) -> None:
        """From now on it may hold what is not known here, until *sure_at* at the latest."""
        self._entered_then, self.sure_at = self.held.entered, sure_at
        self._table.surprises += 1

    def misses_are_known(self, now: float, warm_up_s: float) -> bool:
        """Whether what is not known to be held is not held."""
        if self.held.pressed:
            self.held.pressed = False
            self.lost(now + warm_up_s)
        return now >= self.sure_at or (self._instance.seen_empty and self._entered_then is None)

    def reach(self, cut: Cut, depth: int) -> int:
        """Units of *cut* held where its leading *depth* blocks are, with the reply where replies are found again."""
        return depth * cut.grain if self._replies_found < REPLIES else cut.reach(depth, self.held.depth)

    def judge(self, cut: Cut, before: tuple[list[tuple[int, int]], int], share: float) -> None:
        """Learn from how much of a prompt was in the cache before: *share* of it.

        The prompt itself is held now, whatever was. If less was than believed, it may have been evicted. It is taken
        for that if the instance was sent `EVICTED_AFTER` of its capacity since that part was last used: then all that
        was used before it is gone as well, and the instance has room for what came since and what is left of this.
        Else its cache may have been cleared: if that happens `ZEROS` times in a row with nothing cached at all, where
        hits are reported otherwise. Else the engine renders prompts otherwise than we do, and nothing is forgotten for
        it. If more was there than believed, the room is larger than thought.

        Args:
            cut: the prompt.
            before: what was believed held of it (`Held.runs`), and the tick then.
            share: of its tokens.
        """
        runs, tick = before
        if share:
            self._reports, self._zeros = True, 0
        if cut.size <= DOUBT_BLOCKS * cut.grain:
            return  # nothing that can be said of it contradicts anything
        depth = runs[-1][0]
        believed, actual = depth * cut.grain, share * cut.size
        with_reply = cut.reach(depth, self.held.depth)
        if with_reply - believed > cut.grain:
            is_found = abs(actual - with_reply) < abs(actual - believed)
            self._replies_found += (is_found - self._replies_found) * REPLY_WEIGHT
        doubt = DOUBT_SHARE * believed
        if doubt < DOUBT_BLOCKS * cut.grain:
            doubt = DOUBT_BLOCKS * cut.grain
        capacity = self.capacity
        if actual - (with_reply if with_reply > believed else believed) > doubt:
            if capacity is not None and self._shown_room is not None:
                self._shown_room = min(capacity, int(self._shown_room * REGAIN) + 1)
        elif believed - actual > doubt:
            place = int(actual / cut.grain) + 1
            last_used = next(at for start, at in reversed(runs[:-1]) if start <= place)
            if not self._was_evicted(cut, last_used, place) and not share and self._reports:
                self._zero_tick = self._zero_tick if self._zeros else tick
                self._zeros += 1
                if self._zeros >= ZEROS:
                    forgotten = self._table.forget_until(self.held, self._zero_tick)
                    log.warning("smetric.index.cleared", instance=self._instance.id, blocks=forgotten)
                    self._zeros = 0

    def _was_evicted(self, cut: Cut, last_used: int, place: int) -> bool:
        """Whether what was last used at the tick *last_used*, as block *place* of *cut*, has made room; then learn."""
        capacity = self.capacity
        if capacity is None:
            return False
        newer = self.held.newer_than(last_used, capacity)
        since = newer - len(cut.blocks)
        if since < capacity * EVICTED_AFTER:
            return False
        room = self.room
        # Where entering the prompt has pushed out others, these were newer, too.
        shown = since + place if len(self.held) < room else newer
        self._shown_room = shown if shown < SHRINK * room else self._shown_room
        self._table.forget_until(self.held, last_used)
        return True


# What is believed of several instances at once, kept for as long as the same ones are asked about.
#
# What is believed of one of them, and what teaches it, is in `belief.py`.


class CacheModels:
    """One for each of some instances.

    Args:
        each: in the order of the instances.
        table: where their blocks are.
    """

    __slots__ = ("_misses", "_surprises", "_table", "_until", "each", "place")

    def __init__(self, each: Sequence[CacheModel], table: BlockTable) -> None:
        self.each = each
        #: Where each is, by its bit.
        self.place = {known.held.bit: at for at, known in enumerate(each)}
        self._table = table
        self._misses: Sequence[float | None] = ()
        self._surprises = -1
        self._until = -math.inf

    def misses(self, now: float, warm_up_s: float) -> Sequence[float | None]:
        """What is to be said of each if nothing is known to be held: 0 where that means that nothing is, else None."""
        if self._surprises != self._table.surprises or now >= self._until:
            self._misses = [0 if known.misses_are_known(now, warm_up_s) else None for known in self.each]
            self._surprises = self._table.surprises
            self._until = min([known.sure_at for known in self.each if known.sure_at > now], default=math.inf)
        return self._misses

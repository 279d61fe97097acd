"""The embedded default for `hit_len`: which prompt blocks each instance was sent, and so probably still holds.

A record of what instances contain, not of sessions. It learns from what this router routed, so it knows nothing of
prompts sent around it and of generated tokens. How blocks are cut and hashed is in `smetric.prompt`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from smetric.fleet.instance import Instance
from smetric.prompt import BLOCK_BYTES
from smetric.request import InferenceRequest
from smetric.sources.source import Cells

#: Bytes the index may take before it forgets what was sent longest ago.
MAX_BYTES = 64 * 1024 * 1024
#: What a block costs in the table of holders, and what each holding of it costs in an instance's order: slots of a
#: dict at its emptiest, keys, nodes. Measured with CPython 3.11 to 3.13; see `test_the_bound_counts_real_bytes`.
BYTES_PER_BLOCK = 80
BYTES_PER_HOLDING = 170


class _Held:
    """The blocks of one incarnation of one instance, each with the tick it was last sent in, oldest first.

    A prompt's blocks are entered last to first, so the end of a prompt is always older than its beginning, and
    forgetting the oldest never leaves a block without those before it.
    """

    __slots__ = ("bit", "blocks", "incarnation", "lossy")

    def __init__(self, bit: int, incarnation: int) -> None:
        self.bit = bit
        self.incarnation = incarnation
        self.blocks: OrderedDict[int, int] = OrderedDict()
        #: Blocks were forgotten for want of room here, not there: a miss says nothing any more.
        self.lossy = False


class PrefixIndex:
    """A `Source` that knows at once.

    An instance that holds nothing of a prompt is a hit of 0. It is unknown where this index had to forget blocks of it
    to stay within its own bound: losing knowledge is not eviction.

    Args:
        max_bytes: bound on the memory it takes.
    """

    name = "prefix_index"
    fills = frozenset({"hit_len"})

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        #: Block to the bits of its holders.
        self._holders: dict[int, int] = {}
        self._held: dict[Instance, _Held] = {}
        self._holdings = 0
        self._tick = 0
        #: Holdings forgotten to stay within the bound or within an instance's capacity.
        self.evictions = 0

    @property
    def blocks(self) -> int:
        """Blocks that at least one instance holds."""
        return len(self._holders)

    @property
    def memory_bytes(self) -> int:
        """Memory the index takes, by the costs above."""
        return len(self._holders) * BYTES_PER_BLOCK + self._holdings * BYTES_PER_HOLDING

    async def start(self) -> None:
        """Nothing runs in the background."""

    async def stop(self) -> None:
        """Nothing was opened."""

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> Mapping[str, Cells]:
        """Hit lengths in tokens, by one walk along the prompt for all instances."""
        prompt = request.prompt
        if prompt is None:
            return {"hit_len": [None] * len(instances)}
        asked = [self._of(instance) for instance in instances]
        following = 0
        for held in asked:
            following |= held.bit
        matched: dict[int, int] = {}
        depth = 0
        holders = self._holders
        for block in prompt.blocks:
            holding = holders.get(block, 0) & following
            if holding != following:
                _record(matched, following & ~holding, depth)
                following = holding
                if not holding:
                    break
            depth += 1
        _record(matched, following, depth)
        cells: list[float | None] = []
        for held in asked:
            blocks = matched[held.bit]
            if blocks:
                cells.append(min(prompt.tokens(blocks * BLOCK_BYTES), prompt.length))
            else:
                cells.append(None if held.lossy else 0)
        return {"hit_len": cells}

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Enter the request's blocks as held by *instance*, as the most recent it was sent."""
        prompt = request.prompt
        if prompt is None or instance.cache.prefix_caching is False:
            return
        held = self._of(instance)
        room = ours = self._max_bytes // (BYTES_PER_BLOCK + BYTES_PER_HOLDING)
        capacity = instance.cache.capacity_tokens
        if capacity is not None:
            room = min(room, int(capacity * prompt.bytes_per_token / BLOCK_BYTES))
        self._tick += 1
        tick, bit, mine, holders = self._tick, held.bit, held.blocks, self._holders
        before = len(mine)
        for block in reversed(prompt.blocks[:room]):
            if block in mine:
                mine.move_to_end(block)
            else:
                holders[block] = holders[block] | bit if block in holders else bit
            mine[block] = tick
        self._holdings += len(mine) - before
        while len(mine) > room:
            held.lossy |= room == ours
            self._drop_oldest(held)
            self.evictions += 1
        while self.memory_bytes > self._max_bytes:
            oldest = min((h for h in self._held.values() if h.blocks), key=_oldest_tick)
            oldest.lossy = True
            until = _oldest_tick(oldest)
            while self.memory_bytes > self._max_bytes and oldest.blocks and _oldest_tick(oldest) == until:
                self._drop_oldest(oldest)
                self.evictions += 1

    def forget(self, instance: Instance) -> None:
        """*instance* restarted or is gone: it holds nothing of what it was sent before."""
        held = self._held.pop(instance, None)
        if held is not None:
            while held.blocks:
                self._drop_oldest(held)

    def _of(self, instance: Instance) -> _Held:
        """What the present incarnation of *instance* holds."""
        held = self._held.get(instance)
        if held is not None and held.incarnation == instance.incarnation:
            return held
        self.forget(instance)
        taken = 0
        for other in self._held.values():
            taken |= other.bit
        held = self._held[instance] = _Held(~taken & (taken + 1), instance.incarnation)
        return held

    def _drop_oldest(self, held: _Held) -> None:
        block, _ = held.blocks.popitem(last=False)
        self._holdings -= 1
        left = self._holders[block] & ~held.bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _oldest_tick(held: _Held) -> int:
    return next(iter(held.blocks.values()))


def _record(matched: dict[int, int], bits: int, depth: int) -> None:
    """Note *depth* for each single bit of *bits*."""
    while bits:
        bit = bits & -bits
        matched[bit] = depth
        bits ^= bit

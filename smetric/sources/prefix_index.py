"""The embedded default for `hit_len`: which prompt blocks each instance was sent, and so probably still holds.

A record of what instances contain, not of sessions. It learns from what this router routed, from what answers report,
and from other routers (`peers.py`); it outlives this process by way of `index_file.py`. How prompts are cut and hashed
is in `smetric.prompt`, the table itself in `holdings.py`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from smetric.fleet.instance import Instance
from smetric.prompt import BLOCK_BYTES, Prompt
from smetric.request import InferenceRequest
from smetric.sources.holdings import Held, Holdings
from smetric.sources.index_image import IndexImage, InstanceImage, pack
from smetric.sources.source import Cells
from smetric.telemetry.record import Usage
from smetric.tokens import INITIAL

#: Bytes the index may take before it forgets what was sent longest ago.
MAX_BYTES = 64 * 1024 * 1024
#: Seconds after which a miss counts as one even where the instance was not watched from its start.
WARM_UP_S = 600.0
#: Images that wait until it is known which process answers: of one instance, and instances.
MAX_WAITING = 8
MAX_INSTANCES_WAITING = 1024
#: An answer contradicts the index when it reports fewer cached bytes than believed by this many blocks and this share.
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

log = structlog.get_logger("smetric.index")


@dataclass(slots=True)
class _Known:
    """What is known of one incarnation of one instance."""

    held: Held
    incarnation: int
    #: Count of blocks entered, and time, of the last loss of knowledge: since then it may hold what is not known here.
    loss: tuple[int, float]
    #: Whether there was one beside the beginning, of which the instance itself may say that it was empty then.
    has_lost: bool = False
    bytes_per_token: float = INITIAL
    #: Blocks it has room for, where answers have shown that to be less than its capacity.
    room: int | None = None
    #: Whether an answer ever reported cached tokens: one that never does may just not report them.
    reports: bool = False
    #: Answers without a hit where one was believed, in a row, and the tick before the first of them.
    zeros: int = 0
    zero_tick: int = 0


class PrefixIndex:
    """A `Source` that knows at once, and a `Learner`.

    Losing knowledge is not eviction: where this index may have missed or forgotten something, an instance of which it
    knows no hit is unknown, not 0. It misses nothing of an instance that it saw empty or saw restart. Of any other it
    knows that a block is gone once the instance was sent more than its capacity since, and it takes it to be so after
    `warm_up_s`.

    Args:
        max_bytes: bound on the memory it takes.
        warm_up_s: seconds after which a miss counts as one in any case.
        sees_all: whether it is told of all placements. If others place what it never hears of, no miss is known.
        yields: whether another source is asked where this one knows a part only (`prefix_part.py`): what an instance is
            known to hold is less than a request is expected to hit, and may not be all.
        clock: monotonic seconds.
    """

    name = "prefix_index"
    fills = frozenset({"hit_len"})

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        *,
        warm_up_s: float = WARM_UP_S,
        sees_all: bool = True,
        yields: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = Holdings(max_bytes)
        #: Told of every placement that this router made itself, for other routers.
        self.on_placed: Callable[[Instance, Sequence[int]], None] | None = None
        self._warm_up_s = warm_up_s
        self._sees_all = sees_all
        self._yields = yields
        self._clock = clock
        self._known: dict[Instance, _Known] = {}
        #: By instance id, what waits for its process to be known.
        self._waiting: dict[str, list[InstanceImage]] = {}

    @property
    def blocks(self) -> int:
        """Blocks that at least one instance holds."""
        return self.table.blocks

    @property
    def memory_bytes(self) -> int:
        """Memory the index takes."""
        return self.table.memory_bytes

    @property
    def evictions(self) -> int:
        """Holdings forgotten to stay within the bound or within an instance's capacity."""
        return self.table.evictions

    @property
    def is_restoring(self) -> bool:
        """Whether something waits for an instance to say which process it is."""
        return bool(self._waiting)

    async def start(self) -> None:
        """Nothing to begin."""

    async def stop(self) -> None:
        """Nothing to end."""

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> Mapping[str, Cells]:
        """Hit lengths in tokens, by one walk along the prompt for all instances.

        An instance that has answered the very request that this one follows holds its reply too.
        """
        if request.prompt is None:
            return {"hit_len": [None] * len(instances)}
        cells: list[float | None] = []
        for hit, instance in zip(self.least(request, instances), instances, strict=True):
            if hit and not (self._yields and _is_part(hit, request)):
                cells.append(hit)
            else:
                cells.append(hit if self._misses_are_known(self._of(instance), instance) else None)
        return {"hit_len": cells}

    def least(self, request: InferenceRequest, instances: Sequence[Instance]) -> list[int]:
        """Tokens of *request*'s prompt that each of *instances* is known to hold; it may hold more."""
        prompt = request.prompt
        if prompt is None:
            return [0] * len(instances)
        asked = [self._of(instance) for instance in instances]
        depths = self.table.depths(prompt.blocks, [known.held for known in asked])
        found = []
        for known in asked:
            depth = depths[known.held.bit]
            hit = max(depth * BLOCK_BYTES, self._with_reply(prompt, known, depth))
            found.append(min(prompt.tokens(hit), prompt.length) if hit else 0)
        return found

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Enter the request's blocks as held by *instance*, as the most recent it was sent."""
        prompt = request.prompt
        if prompt is None or instance.cache.prefix_caching is False:
            return
        known = self._of(instance)
        known.bytes_per_token = prompt.bytes_per_token
        blocks = prompt.blocks
        prompt.held_before = (known.held.runs(blocks), self.table.tick)
        self._place(instance, known, blocks)

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """*instance* has answered: it holds its reply, and says how much of the prompt it held before."""
        prompt = request.prompt
        if prompt is None or prompt.held_before is None:
            return
        known = self._of(instance)
        self._place(instance, known, array("Q", [prompt.hashes.whole]))
        if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens and request.prompts == 1:
            self._judge(prompt, instance, known, usage.cached_tokens, usage.cached_tokens / usage.prompt_tokens)
        prompt.held_before = None

    def placed(self, instance: Instance, blocks: Sequence[int]) -> None:
        """Another router has sent *instance* a prompt of these blocks."""
        if instance.cache.prefix_caching is not False:
            known = self._of(instance)
            self.table.enter(known.held, blocks, self._room(known, instance))

    def forget(self, instance: Instance) -> None:
        """*instance* restarted or is gone: it holds nothing of what it was sent before."""
        known = self._known.pop(instance, None)
        if known is not None:
            self.table.close(known.held)

    def missed(self, instances: Iterable[Instance]) -> None:
        """Placements on *instances* never arrived here: what is not known to be held may be held all the same."""
        now = self._clock()
        for known in map(self._of, instances):
            known.loss, known.has_lost = (known.held.entered, now), True

    def images(self) -> Iterator[InstanceImage]:
        """What each instance holds, one after the other, so that others may run in between."""
        for instance, known in list(self._known.items()):
            if len(known.held) and instance.incarnation == known.incarnation:
                blocks, runs = known.held.image()
                yield InstanceImage(instance.id, instance.started_at, pack(blocks), runs)

    def restore(self, image: IndexImage) -> None:
        """Take in what *image* says of each instance that is still the same process, as older than what is known here.

        Whether it is is settled when the instance is next looked at and has said when it started.
        """
        for one in image.instances:
            if one.id not in self._waiting and len(self._waiting) >= MAX_INSTANCES_WAITING:
                continue
            waiting = self._waiting.setdefault(one.id, [])
            waiting.append(one)
            del waiting[:-MAX_WAITING]

    def _of(self, instance: Instance) -> _Known:
        """What is known of the present incarnation of *instance*."""
        known = self._known.get(instance)
        if known is None or known.incarnation != instance.incarnation:
            self.forget(instance)
            known = self._known[instance] = _Known(self.table.open(), instance.incarnation, (0, self._clock()))
        if instance.id in self._waiting and (instance.scrape is not None or instance.started_at is not None):
            for image in self._waiting.pop(instance.id):
                is_same = instance.is_incarnation(image.started_at)
                new = 0
                if is_same:
                    new = self.table.merge(known.held, image.blocks, image.runs, self._room(known, instance))
                log.info("smetric.index.restored", instance=instance.id, is_same_process=is_same, blocks=new)
        return known

    def _place(self, instance: Instance, known: _Known, blocks: Sequence[int]) -> None:
        self.table.enter(known.held, blocks, self._room(known, instance))
        if self.on_placed is not None:
            self.on_placed(instance, blocks)

    def _capacity(self, known: _Known, instance: Instance) -> int | None:
        """Blocks that fit into the instance's cache, None while that is unknown."""
        tokens = instance.cache.capacity_tokens
        return None if tokens is None else int(tokens * known.bytes_per_token / BLOCK_BYTES)

    def _room(self, known: _Known, instance: Instance) -> int:
        capacity = self._capacity(known, instance)
        if capacity is None:
            return self.table.most_blocks
        return capacity if known.room is None else min(capacity, known.room)

    def _misses_are_known(self, known: _Known, instance: Instance) -> bool:
        """Whether what is not known to be held is not held."""
        if not self._sees_all:
            return False
        now, entered = self._clock(), known.held.entered
        if known.held.pressed:
            known.held.pressed = False
            known.loss, known.has_lost = (entered, now), True
        if instance.seen_empty and not known.has_lost:
            return True
        capacity = self._capacity(known, instance)
        entered_then, then = known.loss
        # It forgets what was used longest ago first, so by now everything from before has made room.
        is_renewed = capacity is not None and entered - entered_then >= capacity
        return is_renewed or now - then >= self._warm_up_s

    def _judge(self, prompt: Prompt, instance: Instance, known: _Known, cached: int, share: float) -> None:
        """Learn from how much of *prompt* was in the cache before: *cached* tokens, which are *share* of it.

        The prompt itself is held now, whatever was. If less was than believed, it may have been evicted. It is taken
        for that if the instance was sent `EVICTED_AFTER` of its capacity since that part was last used: then all that
        was used before it is gone as well, and the instance has room for what came since and what is left of this.
        Else its cache may have been cleared: if that happens `ZEROS` times in a row with nothing cached at all, where
        hits are reported otherwise. Else the engine renders prompts otherwise than we do, and nothing is forgotten for
        it. If more was there than believed, the room is larger than thought.
        """
        assert prompt.held_before is not None
        runs, tick = prompt.held_before
        if cached:
            known.reports, known.zeros = True, 0
        depth = runs[-1][0]
        believed, actual = depth * BLOCK_BYTES, share * prompt.size
        doubt = max(DOUBT_BLOCKS * BLOCK_BYTES, DOUBT_SHARE * believed)
        capacity = self._capacity(known, instance)
        if actual - max(believed, self._with_reply(prompt, known, depth)) > doubt:
            if capacity is not None and known.room is not None:
                known.room = min(capacity, int(known.room * REGAIN) + 1)
        elif believed - actual > doubt:
            place = int(actual / BLOCK_BYTES) + 1
            last_used = next(at for start, at in reversed(runs[:-1]) if start <= place)
            if capacity is not None:
                newer = known.held.newer_than(last_used, capacity)
                since = newer - len(prompt.blocks)
                if since >= capacity * EVICTED_AFTER:
                    room = self._room(known, instance)
                    # Where entering the prompt has pushed out others, these were newer, too.
                    shown = since + place if len(known.held) < room else newer
                    known.room = shown if shown < SHRINK * room else known.room
                    self.table.forget_until(known.held, last_used)
                    return
            if not cached and known.reports:
                known.zero_tick = known.zero_tick if known.zeros else tick
                known.zeros += 1
                if known.zeros >= ZEROS:
                    forgotten = self.table.forget_until(known.held, known.zero_tick)
                    log.warning("smetric.index.cleared", instance=instance.id, blocks=forgotten)
                    known.zeros = 0

    def _with_reply(self, prompt: Prompt, known: _Known, depth: int) -> int:
        """Bytes of *prompt* that are held with the reply, if its question was answered; else 0."""
        question = prompt.hashes.question
        is_held = question and self.table.holders(question) & known.held.bit
        return prompt.history_bytes if is_held and depth >= prompt.question_bytes // BLOCK_BYTES else 0


def _is_part(hit: int, request: InferenceRequest) -> bool:
    """Whether *hit* is less, by a block or more, than *request* is expected to hit where its session was served."""
    assert request.prompt is not None, "there is no hit without a prompt"
    return not request.est_hit or hit + request.prompt.tokens(BLOCK_BYTES) <= request.est_hit

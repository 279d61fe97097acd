"""Prefix index: which prompt blocks each instance was sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog
from cachetools import LRUCache

from smetric.fleet.fleet import Candidates, Measured
from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import INITIAL, InferenceRequest, Usage
from smetric.sources.prefix_index.block_table import BlockTable
from smetric.sources.prefix_index.cache_model import CacheModel, CacheModels
from smetric.sources.prefix_index.cut import Cut, Cutting, TextCutting, TokenCutting
from smetric.sources.prefix_index.image import IndexImage, InstanceImage, Restoring, pack
from smetric.sources.source import Cells, Source, TokenIds

# The embedded default for `hit_len`: which prompt blocks each instance was sent, and so probably still holds.
#
# A record of what instances contain, not of sessions. It learns from what this router routed, from what answers report,
# and from other routers (`peers.py`); it outlives this process by way of `index_file.py`. How prompts are cut is in
# `cut.py`, the table itself in `holdings.py`, what answers teach in `belief.py`.

#: Bytes the index may take before it forgets what was sent longest ago.
MAX_BYTES = 64 * 1024 * 1024
#: Seconds after which a miss counts as one even where the instance was not watched from its start.
WARM_UP_S = 600.0

log = structlog.get_logger("smetric.index")


class PrefixIndex(Source):
    """A source that knows at once, and learns from answers.

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
        cutting: what its blocks are of, text by default.
        clock: monotonic seconds.
    """

    name = "prefix_index"
    fills = frozenset({"hit_len"})
    measures = frozenset({"cached_tokens"})

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        *,
        warm_up_s: float = WARM_UP_S,
        sees_all: bool = True,
        yields: bool = False,
        cutting: Cutting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = BlockTable(max_bytes)
        self.cutting = cutting or TextCutting()
        #: Told of every placement that this router made itself, for other routers: instance, blocks, tokens of a block.
        self.on_placed: Callable[[Instance, Sequence[int], int], None] | None = None
        self._warm_up_s = warm_up_s
        self._sees_all = sees_all
        self._yields = yields
        self._clock = clock
        self._known: dict[Instance, CacheModel] = {}
        #: The candidates that were asked about last, and what is known of them.
        self._asked: tuple[Candidates, CacheModels] | None = None
        self._restoring = Restoring()

    @property
    def is_restoring(self) -> bool:
        """Whether something waits for an instance to say which process it is."""
        return bool(self._restoring.waiting)

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        """Hit lengths in tokens, by one walk along the prompt for all instances.

        An instance that has answered the very request that this one follows holds its reply too.
        """
        cut = self.cutting.of(request)
        if cut is None:
            return {"hit_len": [None] * len(instances)}
        asked = self._all_of(instances)
        misses = asked.misses(self._clock(), self._warm_up_s) if self._sees_all else [None] * len(instances)
        cells: list[float | None] = [*misses]
        for at, hit in self._hits(cut, asked):
            if cells[at] is not None or (hit and not (self._yields and is_part(hit, request))):
                cells[at] = hit
        return {"hit_len": cells}

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """Tokens that each instance is believed to hold."""
        known = self._all_of(instances).each
        return [one.held.size * self.cutting.grain / one.units_per_token for one in known], None

    def least(self, request: InferenceRequest, instances: Sequence[Instance]) -> list[int]:
        """Tokens of *request*'s prompt that each of *instances* is known to hold; it may hold more."""
        cut = self.cutting.of(request)
        least = [0] * len(instances)
        if cut is not None:
            for at, hit in self._hits(cut, self._all_of(instances)):
                least[at] = hit
        return least

    def _hits(self, cut: Cut, asked: CacheModels) -> list[tuple[int, int]]:
        """The places in *asked* of those that hold some of *cut*, and the tokens that can hit."""
        holders = self.table.holders
        groups: list[tuple[int, int, int]] = []
        if cut.blocks:
            for bits, depth in self.table.depths(cut.blocks):
                answered = holders(question) & bits if (question := cut.answered(depth)) else 0
                groups.append((bits, depth, answered))
        if question := cut.answered(0):
            # What it follows fills no block: who has answered that need hold none.
            others = holders(question)
            for bits, _, _ in groups:
                others &= ~bits
            groups.append((others, 0, others))
        hits: list[tuple[int, int]] = []
        for bits, depth, answered in groups:
            hit = cut.tokens(depth * cut.grain) if bits != answered else 0
            while bits:
                bit = bits & -bits
                bits ^= bit
                at = asked.place.get(bit)
                if at is not None:
                    hits.append((at, cut.tokens(asked.each[at].reach(cut, depth)) if bit & answered else hit))
        return hits

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Enter the request's blocks as held by *instance*, as the most recent it was sent."""
        cut = self.cutting.of(request)
        if cut is not None and request.prompt is not None:
            self.enter(cut, request.prompt, instance)

    def enter(self, cut: Cut, prompt: Prompt, instance: Instance) -> None:
        """The same for *prompt*, which is *cut*."""
        if instance.cache.prefix_caching is False:
            return
        known = self._of(instance)
        known.units_per_token = cut.units_per_token
        tick = self.table.tick
        prompt.held_before[self.cutting.tokens] = self._place(instance, known, cut.blocks), tick

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """*instance* has answered: it holds its reply, and says how much of the prompt it held before."""
        cut = self.cutting.of(request)
        if cut is not None and request.prompt is not None:
            self.settle(cut, request.prompt, instance, usage if request.prompts == 1 else None)

    def settle(self, cut: Cut, prompt: Prompt, instance: Instance, usage: Usage | None) -> None:
        """The same for *prompt*, which is *cut* and has been entered; *usage* is of it alone."""
        before = prompt.held_before.pop(self.cutting.tokens, None)
        known = self._of(instance)
        if before is None or before[1] < known.since:  # it was sent to a process that is gone
            return
        self._place(instance, known, cut.reply(usage))
        if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
            known.judge(cut, before, usage.cached_tokens / usage.prompt_tokens)

    def placed(self, instance: Instance, blocks: Sequence[int]) -> None:
        """Another router has sent *instance* a prompt of these blocks."""
        if instance.cache.prefix_caching is not False:
            self._of(instance).enter(blocks)

    def forget(self, instance: Instance) -> None:
        """*instance* restarted or is gone: it holds nothing of what it was sent before."""
        known = self._known.pop(instance, None)
        if known is not None:
            self.table.close(known.held)
            self._asked = None

    def missed(self, instances: Iterable[Instance]) -> None:
        """Placements on *instances* never arrived here: what is not known to be held may be held all the same."""
        sure_at = self._clock() + self._warm_up_s
        for known in map(self._of, instances):
            known.lost(sure_at)

    def images(self) -> Iterator[InstanceImage]:
        """What each instance holds, one after the other, so that others may run in between.

        What still waits to be taken in is among them: an instance that nobody has asked about is not forgotten.
        """
        for instance in list(self._known):
            known = self._of(instance)
            if len(known.held):
                blocks, runs = known.held.image()
                yield InstanceImage(instance.id, instance.started_at, pack(blocks), runs, self.cutting.tokens)
        yield from self._restoring.latest()

    def restore(self, images: Iterable[InstanceImage]) -> None:
        """Take in those of *images* whose instance is still the same process, as older than what is known here.

        Whether it is is settled when the instance is next looked at and has said when it started.
        """
        self._restoring.add(one for one in images if one.tokens == self.cutting.tokens)

    async def recall(self, instances: Collection[Instance]) -> None:
        """Take in what waits for *instances* that have said when they started; they are all there are."""
        self._restoring.drop_strangers([instance.id for instance in instances])
        for instance in instances:
            self.take_in(instance)
            await asyncio.sleep(0)

    def take_in(self, instance: Instance) -> None:
        """Take in what waits for *instance*, if it has said when it started."""
        self._of(instance)

    def _of(self, instance: Instance) -> CacheModel:
        """What is known of the present incarnation of *instance*."""
        known = self._known.get(instance)
        if known is None or known.incarnation != instance.incarnation:
            self.forget(instance)
            units = 1.0 if self.cutting.tokens else INITIAL
            sure_at = self._clock() + self._warm_up_s
            known = self._known[instance] = CacheModel(instance, self.table, self.cutting.grain, units, sure_at)
        if self._restoring.waiting:
            self._merge(instance, known)
        return known

    def _all_of(self, instances: Sequence[Instance]) -> CacheModels:
        """The same for each of *instances*."""
        last = self._asked
        if last is not None and last[0] is instances and not self._restoring.waiting:
            return last[1]
        asked = CacheModels([self._of(instance) for instance in instances], self.table)
        if isinstance(instances, Candidates):  # which are others once one of them has restarted
            self._asked = instances, asked
        return asked

    def _merge(self, instance: Instance, known: CacheModel) -> None:
        for image in self._restoring.of(instance):
            is_same = instance.is_incarnation(image.started_at)
            new = 0
            if is_same:
                new = self.table.merge(known.held, image.blocks, image.runs, known.room)
            if new or not is_same:  # of twenty peers one says what the others do
                log.info("smetric.index.restored", instance=instance.id, is_same_process=is_same, blocks=new)

    def misses_are_known(self, instance: Instance) -> bool:
        """Whether *instance* holds nothing but what it is known to hold."""
        return self._sees_all and self._of(instance).misses_are_known(self._clock(), self._warm_up_s)

    def _place(self, instance: Instance, known: CacheModel, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """It holds *blocks* from now on; returns what of them it held before, as of `Held.runs`."""
        if not blocks:
            return [(0, 0)]
        before = known.enter(blocks)
        if self.on_placed is not None:
            self.on_placed(instance, blocks, self.cutting.tokens)
        return before


def is_part(hit: int, request: InferenceRequest) -> bool:
    """Whether *hit* is less than *request* is expected to hit where its session was served.

    By a block of text or more: what is expected is a share of bytes, also where tokens are counted.
    """
    assert request.prompt is not None, "there is no hit without a prompt"
    return not request.est_hit or hit + request.prompt.tokens(BLOCK_BYTES) <= request.est_hit


# All prefix indexes of a router as one: of blocks of text and, where a tokenizer gives them, of blocks of token ids.
#
# What one knows is in `prefix_index.py`; how the memory is shared out is in `stack.py`.


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """Size of the prefix index."""

    blocks: int
    memory_bytes: int
    evictions: int


class PrefixIndexes:
    """One index for each kind of blocks; none where the prefix index is off.

    Args:
        indexes: each with blocks of its own kind.
    """

    def __init__(self, indexes: Iterable[PrefixIndex] = ()) -> None:
        self._by_tokens = {index.cutting.tokens: index for index in indexes}

    def __iter__(self) -> Iterator[PrefixIndex]:
        return iter(self._by_tokens.values())

    def __len__(self) -> int:
        return len(self._by_tokens)

    def of(self, tokens: int) -> PrefixIndex | None:
        """The one whose blocks have so many token ids, 0 for text; None where there is none."""
        return self._by_tokens.get(tokens)

    @property
    def image_bytes(self) -> int:
        """Most bytes of an image that fits: each holding takes eight of them, and counts for more in memory."""
        return sum(index.table.max_bytes for index in self)

    @property
    def changes(self) -> int:
        """Goes up with every change."""
        return sum(index.table.changes for index in self)

    @property
    def is_restoring(self) -> bool:
        """Whether something learnt before waits for an instance to say which process it is."""
        return any(index.is_restoring for index in self)

    def figures(self) -> IndexFigures:
        """What they take, for the metrics page."""
        return IndexFigures(
            sum(index.table.blocks for index in self),
            sum(index.table.memory_bytes for index in self),
            sum(index.table.evictions for index in self),
        )

    def missed(self, instances: Collection[Instance]) -> None:
        """Placements on *instances* never arrived here."""
        for index in self:
            index.missed(instances)

    async def image(self) -> IndexImage:
        """What they know now, gathered so that others may run in between."""
        instances = []
        for index in self:
            for one in index.images():
                instances.append(one)
                await asyncio.sleep(0)
        return IndexImage(time.time(), BLOCK_BYTES, instances)

    def restore(self, images: Collection[InstanceImage]) -> None:
        """Take in what *images* say, once their instances have said which process they are."""
        for index in self:
            index.restore(images)

    async def recall(self, instances: Collection[Instance]) -> None:
        """Take in what was learnt before of those of all *instances* that have said which process they are."""
        for index in self:
            await index.recall(instances)


# What the prefix index knows of a hit in part only: it stands where no source knows the whole.
#
# A router that has just started may know an instance to hold the system prompt that all sessions share, and nothing of
# the session that is asked for. Told at once, this part would hide the whole from sources that are asked later.


class PrefixPart(Source):
    """A source to be asked after all others.

    Args:
        index: what learns, and forgets; it is told itself.
    """

    name = "prefix_index:part"
    fills = frozenset({"hit_len"})

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        """The tokens that each instance is known to hold, None where that is none."""
        return {"hit_len": [hit or None for hit in self._index.least(request, instances)]}


# The prefix index by token ids: exact to a block of the engine, where ids are known in time.
#
# A second index beside that of text, with a table of its own: hashes of the two spaces never meet. Every prompt is
# entered in both if its ids are known or can be found: those of a request that was routed without them, as a session's
# first one is, are found while its answer comes. Which prompts have ids is known in `smetric.tokenize`.

#: Seconds since the last look-up after which no ids are asked for any more: no policy, or a better source, decides.
ASKED_S = 600.0
#: Prompts entered here that are remembered.
MOST_ENTERED = 16_384


@dataclass(slots=True)
class _Late:
    """A prompt that was sent before its ids were known."""

    instance: Instance
    incarnation: int
    #: Whether it was answered, and what its answer counted.
    is_settled: bool = False
    usage: Usage | None = None


class PrefixTokens(Source):
    """A source that knows as soon as it has the token ids, and learns from answers.

    It speaks where it knows as much of the prompt to be held as the index of text does, to a block of text; or less,
    where it has missed nothing and the session's last prompt was entered here. Else the index of text speaks: for what
    was entered there alone, and for what is not held.

    Args:
        tokens: the index of token ids.
        cutting: how it cuts them.
        text: the index of text.
        token_ids: of prompts.
        yields: whether another source than the two is asked where only a part is known.
        clock: monotonic seconds.
    """

    name = "prefix_index:tokens"
    fills = frozenset({"hit_len"})

    def __init__(
        self,
        tokens: PrefixIndex,
        cutting: TokenCutting,
        text: PrefixIndex,
        token_ids: TokenIds,
        *,
        yields: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = tokens
        self._cutting = cutting
        self._text = text
        self._token_ids = token_ids
        self._yields = yields
        self._clock = clock
        self._asked_at = clock()
        self._late: dict[Prompt, _Late] = {}
        #: Hashes of the text of prompts that were entered here. What else was sent, by this router without ids or by
        #: others, may be in the index of text alone.
        self._entered: LRUCache[int, None] = LRUCache(MOST_ENTERED)
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Give up what has no ids yet."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        """Hit lengths in whole blocks, always less than the prompt; no ids are asked for while nothing is held."""
        self._asked_at = self._clock()
        if request.prompt is None or not (self.index.table.blocks or self.index.is_restoring):
            return {"hit_len": [None] * len(instances)}
        return self._cells(request, instances) if request.token_ids is not None else self._look_up(request, instances)

    async def _look_up(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        await self._token_ids.of(request)
        return self._cells(request, instances)

    def _cells(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        prompt = request.prompt
        if prompt is None or request.token_ids is None:
            return {"hit_len": [None] * len(instances)}
        cells: list[float | None] = []
        block_of_text, hashes = prompt.tokens(BLOCK_BYTES), prompt.hashes
        is_whole = hashes.question in self._entered or hashes.whole in self._entered
        exact, rough = self.index.least(request, instances), self._text.least(request, instances)
        for instance, hit, text in zip(instances, exact, rough, strict=True):
            stands = hit and (hit + block_of_text > text or (is_whole and self.index.misses_are_known(instance)))
            if stands and self._yields and is_part(hit, request):
                stands = False
            cells.append(_whole(hit, instance) if stands else None)
        return {"hit_len": cells}

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Enter the prompt, now or when its ids are known."""
        prompt = request.prompt
        if prompt is None:
            return
        if request.token_ids is not None:
            self.index.prefilled(request, instance)
            self._entered[prompt.hashes.whole] = None
            return
        ids = self._token_ids.begin(request) if self._clock() - self._asked_at < ASKED_S else None
        if ids is None:
            self._entered.pop(prompt.hashes.whole, None)
        else:
            self._late[prompt] = _Late(instance, instance.incarnation)
            task = asyncio.create_task(self._enter_late(prompt, ids), name="prefix tokens")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _enter_late(self, prompt: Prompt, finding: Awaitable[Sequence[int] | None]) -> None:
        try:
            ids = await finding
        finally:
            late = self._late.pop(prompt)
        if ids is None:
            self._entered.pop(prompt.hashes.whole, None)
        if ids is None or late.instance.incarnation != late.incarnation:
            return
        cut = self._cutting.cut(prompt, ids)
        self.index.enter(cut, prompt, late.instance)
        self._entered[prompt.hashes.whole] = None
        if late.is_settled:
            self.index.settle(cut, prompt, late.instance, late.usage)

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """*instance* has answered: it holds its reply, and says how much of the prompt it held before."""
        prompt = request.prompt
        if prompt is None:
            return
        alone = usage if request.prompts == 1 else None
        late = self._late.get(prompt)
        if late is not None:
            late.is_settled, late.usage = True, alone
        else:
            self.index.settled(request, instance, usage)

    def forget(self, instance: Instance) -> None:
        """*instance* restarted or is gone."""
        self.index.forget(instance)


def _whole(hit: int, instance: Instance) -> int:
    """*hit* in whole blocks of the instance, which may be larger than those here."""
    block = instance.cache.block_size
    return hit - hit % block if block else hit

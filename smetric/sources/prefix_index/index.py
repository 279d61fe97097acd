"""Prefix index: which prompt blocks each instance was sent, and so probably still holds.

The default source of `hit_len`. It records what instances contain, not sessions. It learns from what this router
routed, from cached tokens that responses report, and from other routers.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import structlog
import xxhash

from smetric.fleet.fleet import Candidates, Measured
from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES, ROUNDING, BlockKeys, Prompt
from smetric.request.request import INITIAL, InferenceRequest, Usage
from smetric.sources.prefix_index.block_table import BlockTable
from smetric.sources.prefix_index.persistence import IndexImage, InstanceImage, pack
from smetric.sources.source import Cells, Source

#: Most blocks that a reply is entered as.
MOST_REPLY_BLOCKS = 16_384
#: Bytes the index may take before it evicts the blocks that were sent longest ago.
MAX_BYTES = 64 * 1024 * 1024
#: Seconds after which a miss counts as one even if the instance was not watched from its start.
WARM_UP_S = 600.0
#: A response contradicts the model if it reports less than believed by this many blocks and this share.
DOUBT_BLOCKS = 2
DOUBT_SHARE = 1 / 8
#: Missing blocks count as evicted once the instance was sent this share of its capacity since they were last used.
EVICTED_AFTER = 1 / 4
#: An eviction that shows less than this share of the assumed room is more than the coarseness of the index.
SHRINK = 0.9
#: Factor by which a reduced room grows whenever more is held than believed.
REGAIN = 1.1
#: Consecutive responses without any hit where one was believed, after which the cache counts as cleared.
ZEROS = 3
#: Replies are believed to be cached while their share found in the cache stays above REPLIES; each response that
#: shows it has this weight. Replies are not found if templates leave out generated text, such as reasoning.
REPLY_WEIGHT = 1 / 8
REPLIES = 0.5
#: Most images that wait for one instance, and most instances that images wait for.
MAX_WAITING = 8
MAX_INSTANCES_WAITING = 1024

log = structlog.get_logger("smetric.index")
_pair = struct.Struct("<II").pack
_hash = xxhash.xxh3_64_intdigest


class Cut:
    """Prompt cut into blocks of text. `TokenCut` is the same for token ids.

    Its units are bytes of text, or tokens. A follow-up counts as held with its whole history if the holder answered the
    question before it.

    Attributes:
        blocks: hashes of its full blocks; each covers all before it.
        grain: units of a block.
        size: units of the whole prompt.
    """

    __slots__ = ("_hashes", "_prompt", "blocks", "grain", "size")

    def __init__(self, prompt: Prompt, blocks: Sequence[int], grain: int, size: int) -> None:
        self._prompt = prompt
        self._hashes = prompt.hashes
        self.blocks = blocks
        self.grain = grain
        self.size = size

    def tokens(self, units: int) -> int:
        """Return the tokens that can hit if the leading *units* are held."""
        tokens = int(units / self._prompt.bytes_per_token + ROUNDING)
        return tokens if tokens < self._prompt.length else self._prompt.length

    def reach(self, depth: int, held: Callable[[Sequence[int]], int]) -> int:
        """Return the units held by a holder of the leading *depth* blocks, including a reply that follows them.

        Args:
            depth: blocks.
            held: returns how many leading ones of the hashes that `reply` gave for an earlier prompt are held.
        """
        reach, question = depth * self.grain, self.answered(depth)
        history = self._prompt.history_bytes
        return history if history > reach and question and held((question,)) else reach

    def answered(self, depth: int) -> int:
        """Return the first hash that `reply` gave for the prompt before this one, if that ended in block *depth*.

        0 if it did not end there, or if there is none.
        """
        is_behind = depth >= self._prompt.question_bytes // self.grain
        return self._hashes.question if is_behind else 0

    def reply(self, usage: Usage | None) -> Sequence[int]:
        """Return hashes that stand for the reply, to be entered for the instance that gave it.

        For text that is the hash of the whole prompt: a question that was answered.
        """
        return (self._hashes.whole,)


class TokenCut(Cut):
    """Prompt cut into blocks of token ids.

    Of a reply only the number of tokens is known, not their ids, so the hashes of its blocks derive from the text of
    the question. The engine has computed all tokens of the reply but the last. They follow the question in the next
    prompt, unless the engine encodes its own text differently from how it generated it.
    """

    __slots__ = ()

    def tokens(self, units: int) -> int:
        """Return whole blocks; the last token of a prompt is always computed again."""
        return min(units, (self.size - 1) // self.grain * self.grain)

    def reach(self, depth: int, held: Callable[[Sequence[int]], int]) -> int:
        """Return the tokens of the blocks, and of the reply to the question that ends within the next block."""
        end, first = depth, self.answered(depth)
        if first and held((first,)):
            most, question = min(self.size // self.grain, depth + MOST_REPLY_BLOCKS), self._hashes.question
            end += held([_reply_block(question, depth, at) for at in range(depth, most)])
        return end * self.grain

    def answered(self, depth: int) -> int:
        """Return the hash of the first reply block, which follows the last full block of the question."""
        question = self._hashes.question
        return _reply_block(question, depth, depth) if question and depth < self.size // self.grain else 0

    def reply(self, usage: Usage | None) -> Sequence[int]:
        """Return the blocks that the engine has filled with the reply; none if *usage* does not report it."""
        if usage is None or not usage.completion_tokens or usage.prompt_tokens != self.size:
            return array("Q")
        begin, end = self.size // self.grain, (self.size + usage.completion_tokens - 1) // self.grain
        whole, end = self._hashes.whole, min(end, begin + MOST_REPLY_BLOCKS)
        return array("Q", [_reply_block(whole, begin, at) for at in range(begin, end)])


def cut_of(request: InferenceRequest, block_tokens: int) -> Cut | None:
    """Return the request's first prompt, cut into blocks of *block_tokens* token ids, or of text for 0.

    A prompt is hashed once. None if there is no prompt, or if its token ids are unknown and were when it was hashed.
    """
    text: Cut | None = request.text_cut
    if text is not None and not block_tokens:
        return text
    prompt = request.prompt
    if prompt is None:
        return None
    if not block_tokens:
        text = request.text_cut = Cut(prompt, prompt.hashes.blocks, BLOCK_BYTES, prompt.size)
        return text
    known = prompt.token_blocks.get(block_tokens)
    if known is not None:
        return TokenCut(prompt, known[0], block_tokens, known[1])
    return None if request.token_ids is None else cut_ids(prompt, request.token_ids, block_tokens)


def cut_ids(prompt: Prompt, ids: Sequence[int], block_tokens: int) -> Cut:
    """Return *prompt* cut by its token *ids*. The prompt keeps the hashes, so its request need not keep the ids."""
    blocks = BlockKeys(ids, block_tokens, root=_hash(prompt.key)).upto(len(ids) // block_tokens)
    prompt.token_blocks[block_tokens] = blocks, len(ids)
    return TokenCut(prompt, blocks, block_tokens, len(ids))


def _reply_block(question: int, begin: int, at: int) -> int:
    """Return the hash of block *at* of the answer to *question*, whose own full blocks end at *begin*."""
    return _hash(_pair(begin, at), question)


class CacheModel:
    """Model of the cache of one incarnation of an instance, learned from what it was sent and what it reported.

    Args:
        instance: the instance.
        table: holds its blocks.
        grain: units (bytes of text, or tokens) per block.
        units_per_token: units per token, until its prompts show it.
        sure_at: when a miss counts as one in any case, monotonic seconds.

    Attributes:
        since: the tick from which on this incarnation is known.
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
        self.since = table.tick = table.tick + 1
        self.sure_at = sure_at
        #: `held.entered` at the last loss of knowledge. None if there was none: then the instance itself may report
        #: that it was empty at the beginning.
        self._entered_then: int | None = None
        #: Blocks it has room for, if responses have shown that to be less than its capacity.
        self._shown_room: int | None = None
        #: Share of replies that were held when their session went on.
        self._replies_found = 1.0
        #: Whether a response ever reported cached tokens: some engines never do.
        self._reports = False
        #: Consecutive responses without a hit where one was believed, and the tick before the first of them.
        self._zeros = 0
        self._zero_tick = 0

    @property
    def capacity(self) -> int | None:
        """Blocks that fit into the instance's cache; None if unknown."""
        tokens = self._instance.cache.capacity_tokens
        return None if tokens is None else int(tokens * self.units_per_token / self._grain)

    @property
    def room(self) -> int:
        """Blocks it is believed to keep."""
        return self._room_of(self.capacity)

    def _room_of(self, capacity: int | None) -> int:
        if capacity is None:
            return self._table.most_blocks
        return capacity if self._shown_room is None else min(capacity, self._shown_room)

    def enter(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Enter *blocks* as held from now on; return which were held before, as of `HolderBlocks.runs`."""
        capacity = self.capacity
        runs = self._table.enter(self.held, blocks, self._room_of(capacity))
        if (
            capacity is not None
            and self.held.entered - (self._entered_then or 0) >= capacity
            and self.sure_at > -math.inf
        ):
            # A whole capacity was entered since, and engines evict the oldest blocks first: nothing earlier is left.
            self.sure_at = -math.inf
            self._table.surprises += 1
        return runs

    def lost(self, sure_at: float) -> None:
        """Note that it may hold unknown blocks from now on, until *sure_at* at the latest."""
        self._entered_then, self.sure_at = self.held.entered, sure_at
        self._table.surprises += 1

    def misses_are_known(self, now: float, warm_up_s: float) -> bool:
        """Return whether it holds only blocks that it is known to hold."""
        if self.held.pressed:
            self.held.pressed = False
            self.lost(now + warm_up_s)
        return now >= self.sure_at or (self._instance.seen_empty and self._entered_then is None)

    def reach(self, cut: Cut, depth: int) -> int:
        """Return the units of *cut* held if its leading *depth* blocks are, with a reply if replies are found."""
        return depth * cut.grain if self._replies_found < REPLIES else cut.reach(depth, self.held.depth)

    def judge(self, cut: Cut, before: tuple[list[tuple[int, int]], int], share: float) -> None:
        """Learn from the *share* of a prompt's tokens that a response reports as cached.

        If less was cached than believed, there are three explanations:

        - Eviction, if the instance was sent `EVICTED_AFTER` of its capacity since that part was last used. Then
          everything used before it is gone too, and the room is what came since and what is left of the prompt.
        - A cleared cache, if `ZEROS` responses in a row report no hit although the instance reports hits otherwise.
        - Another rendering of the prompt in the engine. Then nothing is dropped.

        If more was cached than believed, the room is larger than assumed.

        Args:
            cut: the prompt, which is entered already.
            before: the blocks that were believed held (`HolderBlocks.runs`), and the tick then.
            share: 0 to 1.
        """
        runs, tick = before
        if share:
            self._reports, self._zeros = True, 0
        if cut.size <= DOUBT_BLOCKS * cut.grain:
            return  # too short to contradict anything
        believed, actual = runs[-1][0] * cut.grain, share * cut.size
        with_reply = cut.reach(runs[-1][0], self.held.depth)
        if with_reply - believed > cut.grain:
            is_found = abs(actual - with_reply) < abs(actual - believed)
            self._replies_found += (is_found - self._replies_found) * REPLY_WEIGHT
        doubt = max(DOUBT_SHARE * believed, DOUBT_BLOCKS * cut.grain)
        if actual - max(with_reply, believed) > doubt:
            capacity = self.capacity
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
        """Return whether block *place* of *cut*, last used at *last_used*, was evicted; if so, learn from it."""
        capacity = self.capacity
        if capacity is None:
            return False
        newer = self.held.newer_than(last_used, capacity)
        since = newer - len(cut.blocks)
        if since < capacity * EVICTED_AFTER:
            return False
        room = self.room
        # If entering the prompt has evicted other blocks, those were newer, too.
        shown = since + place if len(self.held) < room else newer
        if shown < SHRINK * room:
            self._shown_room = shown
        self._table.forget_until(self.held, last_used)
        return True


class CacheModels:
    """Cache models of several instances, kept while the same instances are asked about.

    Args:
        each: the models, in the order of the instances.
        table: holds their blocks.

    Attributes:
        place: position of each model by its holder's bit.
    """

    __slots__ = ("_misses", "_surprises", "_table", "_until", "each", "place")

    def __init__(self, each: Sequence[CacheModel], table: BlockTable) -> None:
        self.each = each
        self.place = {model.held.bit: at for at, model in enumerate(each)}
        self._table = table
        self._misses: Sequence[float | None] = ()
        self._surprises = -1
        self._until = -math.inf

    def misses(self, now: float, warm_up_s: float) -> Sequence[float | None]:
        """Return the cell of each instance without known blocks: 0 if it is known to hold none, else None."""
        if self._surprises != self._table.surprises or now >= self._until:
            self._misses = [0 if model.misses_are_known(now, warm_up_s) else None for model in self.each]
            self._surprises = self._table.surprises
            self._until = min([model.sure_at for model in self.each if model.sure_at > now], default=math.inf)
        return self._misses


class PrefixIndex(Source):
    """Index of one kind of blocks. It answers at once, and learns from responses.

    Losing knowledge is not eviction: a miss is reported as unknown, not 0, if this index may have missed or forgotten
    something. It has missed nothing of an instance that it saw empty or saw restart. A block of any other instance is
    known to be gone once the instance was sent more than its capacity since, and is assumed to be gone after
    *warm_up_s*.

    Args:
        max_bytes: bound on the memory it takes.
        warm_up_s: seconds after which a miss counts as one in any case.
        sees_all: whether it learns of all placements. If other routers place requests unseen, every miss is unknown.
        yields: whether another source is asked if this one knows only a part of a hit (`PrefixPart`).
        block_tokens: token ids per block; 0 for blocks of text.
        clock: monotonic seconds.

    Attributes:
        grain: units (bytes of text, or tokens) per block.
        on_placed: called with each placement of this router: instance, blocks, `block_tokens`.
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
        block_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = BlockTable(max_bytes)
        self.block_tokens = block_tokens
        self.grain = block_tokens or BLOCK_BYTES
        self.on_placed: Callable[[Instance, Sequence[int], int], None] | None = None
        self._warm_up_s = warm_up_s
        self._sees_all = sees_all
        self._yields = yields
        self._clock = clock
        self._models: dict[Instance, CacheModel] = {}
        #: The candidates of the last look-up, and their models.
        self._last: tuple[Candidates, CacheModels] | None = None
        #: Images of instances, by id, that wait until it is known which process the instance is.
        self._waiting: dict[str, list[InstanceImage]] = {}

    @property
    def is_restoring(self) -> bool:
        """Whether an image waits until an instance reports which process it is."""
        return bool(self._waiting)

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        """Return hit lengths in tokens.

        An instance that answered the request before this one in its session holds its own reply too.
        """
        cut = cut_of(request, self.block_tokens)
        if cut is None:
            return {"hit_len": [None] * len(instances)}
        models = self._models_of(instances)
        misses = models.misses(self._clock(), self._warm_up_s) if self._sees_all else [None] * len(instances)
        cells: list[float | None] = [*misses]
        for at, hit in self._hits(cut, models):
            if cells[at] is not None or (hit and not (self._yields and is_part(hit, request))):
                cells[at] = hit
        return {"hit_len": cells}

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """Return the tokens that each instance is believed to hold."""
        models = self._models_of(instances).each
        return [model.held.size * self.grain / model.units_per_token for model in models], None

    def least(self, request: InferenceRequest, instances: Sequence[Instance]) -> list[int]:
        """Return the tokens of *request*'s prompt that each of *instances* is known to hold; it may hold more."""
        cut = cut_of(request, self.block_tokens)
        least = [0] * len(instances)
        if cut is not None:
            for at, hit in self._hits(cut, self._models_of(instances)):
                least[at] = hit
        return least

    def _hits(self, cut: Cut, models: CacheModels) -> list[tuple[int, int]]:
        """Return (position in *models*, tokens that can hit) of each holder of a part of *cut*.

        One walk along the prompt finds all holders.
        """
        holders = self.table.holders
        groups: list[tuple[int, int, int]] = []
        if cut.blocks:
            for bits, depth in self.table.depths(cut.blocks):
                answered = holders(question) & bits if (question := cut.answered(depth)) else 0
                groups.append((bits, depth, answered))
        if question := cut.answered(0):
            # The question is shorter than a block, so the instance that answered it need not hold any block.
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
                at = models.place.get(bit)
                if at is not None:
                    hits.append((at, cut.tokens(models.each[at].reach(cut, depth)) if bit & answered else hit))
        return hits

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Enter the request's blocks as held by *instance*."""
        cut = cut_of(request, self.block_tokens)
        if cut is not None and request.prompt is not None:
            self.enter(cut, request.prompt, instance)

    def enter(self, cut: Cut, prompt: Prompt, instance: Instance) -> None:
        """Enter *cut*, the blocks of *prompt*, as held by *instance*."""
        if instance.cache.prefix_caching is False:
            return
        model = self._model(instance)
        model.units_per_token = 1.0 if self.block_tokens else prompt.bytes_per_token
        tick = self.table.tick
        prompt.held_before[self.block_tokens] = self._place(instance, model, cut.blocks), tick

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """Enter the reply, and learn from the cached tokens that *usage* reports."""
        cut = cut_of(request, self.block_tokens)
        if cut is not None and request.prompt is not None:
            self.settle(cut, request.prompt, instance, usage if request.prompts == 1 else None)

    def settle(self, cut: Cut, prompt: Prompt, instance: Instance, usage: Usage | None) -> None:
        """Do the same for *prompt*, which was entered as *cut*; *usage* counts this prompt alone."""
        before = prompt.held_before.pop(self.block_tokens, None)
        model = self._model(instance)
        if before is None or before[1] < model.since:  # it was sent to an earlier process
            return
        held = model.held
        if cut.blocks:  # engines evict in the order in which requests end
            self.table.touch(held, cut.blocks, before[1] + 1)
        if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
            model.judge(cut, before, usage.cached_tokens / usage.prompt_tokens)
        reply, answered = cut.reply(usage), cut.answered(before[0][-1][0])
        # The reply before this prompt is among the prompt's own blocks now.
        if answered and len(reply) == 1 and self.table.rename(held, answered, reply[0]):
            if self.on_placed is not None:
                self.on_placed(instance, reply, self.block_tokens)
            return
        if answered:
            self.table.drop(held, answered)
        self._place(instance, model, reply)

    def placed(self, instance: Instance, blocks: Sequence[int]) -> None:
        """Enter *blocks* of a prompt that another router sent to *instance*."""
        if instance.cache.prefix_caching is not False:
            self._model(instance).enter(blocks)

    def forget(self, instance: Instance) -> None:
        """Drop all blocks of *instance*, which restarted or was removed."""
        model = self._models.pop(instance, None)
        if model is not None:
            self.table.close(model.held)
            self._last = None

    def missed(self, instances: Iterable[Instance]) -> None:
        """Note that placements on *instances* were lost: they may hold unknown blocks."""
        sure_at = self._clock() + self._warm_up_s
        for instance in instances:
            self._model(instance).lost(sure_at)

    def misses_are_known(self, instance: Instance) -> bool:
        """Return whether *instance* holds only blocks that it is known to hold."""
        return self._sees_all and self._model(instance).misses_are_known(self._clock(), self._warm_up_s)

    def images(self) -> Iterator[InstanceImage]:
        """Yield the blocks of each instance, and the latest of the images that wait for one."""
        for instance in list(self._models):
            held = self._model(instance).held
            if len(held):
                blocks, runs = held.image()
                yield InstanceImage(instance.id, instance.started_at, pack(blocks), runs, self.block_tokens)
        yield from [images[-1] for images in self._waiting.values()]

    def restore(self, images: Iterable[InstanceImage]) -> None:
        """Take in *images* of blocks of this kind, as older than everything known.

        Each waits until its instance reports when its process started, and is dropped if that is another process.
        """
        for image in images:
            if image.tokens == self.block_tokens and (
                image.id in self._waiting or len(self._waiting) < MAX_INSTANCES_WAITING
            ):
                waiting = self._waiting.setdefault(image.id, [])
                waiting.append(image)
                del waiting[:-MAX_WAITING]

    async def recall(self, instances: Collection[Instance]) -> None:
        """Take in the images of all *instances* that have reported when they started; drop those of others."""
        for id in self._waiting.keys() - {instance.id for instance in instances}:
            del self._waiting[id]
        for instance in instances:
            self.take_in(instance)
            await asyncio.sleep(0)

    def take_in(self, instance: Instance) -> None:
        """Take in the images of *instance*, if it has reported when it started."""
        self._model(instance)

    def _model(self, instance: Instance) -> CacheModel:
        """Return the model of the present incarnation of *instance*."""
        model = self._models.get(instance)
        if model is None or model.incarnation != instance.incarnation:
            self.forget(instance)
            units = 1.0 if self.block_tokens else INITIAL
            sure_at = self._clock() + self._warm_up_s
            model = self._models[instance] = CacheModel(instance, self.table, self.grain, units, sure_at)
        # Which process answers is known once the instance was scraped or has reported when it started.
        if self._waiting and (instance.scrape is not None or instance.started_at is not None):
            for image in self._waiting.pop(instance.id, ()):
                is_same, new = instance.is_incarnation(image.started_at), 0
                if is_same:
                    new = self.table.merge(model.held, image.blocks, image.runs, model.room)
                if new or not is_same:  # images of several peers mostly repeat each other
                    log.info("smetric.index.restored", instance=instance.id, is_same_process=is_same, blocks=new)
        return model

    def _models_of(self, instances: Sequence[Instance]) -> CacheModels:
        """Return the models of *instances*."""
        last = self._last
        if last is not None and last[0] is instances and not self._waiting:
            return last[1]
        models = CacheModels([self._model(instance) for instance in instances], self.table)
        if isinstance(instances, Candidates):  # a restart makes new candidates
            self._last = instances, models
        return models

    def _place(self, instance: Instance, model: CacheModel, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Enter *blocks* and report the placement; return which were held before, as of `HolderBlocks.runs`."""
        if not blocks:
            return [(0, 0)]
        before = model.enter(blocks)
        if self.on_placed is not None:
            self.on_placed(instance, blocks, self.block_tokens)
        return before


def is_part(hit: int, request: InferenceRequest) -> bool:
    """Return whether *hit* is less than the expected hit of *request* by a block of text or more.

    Expected hits derive from shares of bytes, so they are no more exact than that.
    """
    assert request.prompt is not None, "there is no hit without a prompt"
    return not request.est_hit or hit + request.prompt.tokens(BLOCK_BYTES) <= request.est_hit


class PrefixPart(Source):
    """Source of partial hits of a `PrefixIndex` that yields, asked after all others.

    A router that has just started may know that an instance holds the system prompt that all sessions share, and
    nothing of the session itself. Reported first, this part would hide the whole from sources asked later.

    Args:
        index: the index; it learns and forgets as a source of its own.
    """

    name = "prefix_index:part"
    fills = frozenset({"hit_len"})

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        """Return the tokens that each instance is known to hold; None if there are none."""
        return {"hit_len": [hit or None for hit in self._index.least(request, instances)]}


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """Size of the prefix index."""

    blocks: int
    memory_bytes: int
    evictions: int


class PrefixIndexes:
    """The prefix indexes of a router: one for each kind of blocks, or none if the prefix index is off.

    Args:
        indexes: the indexes.
    """

    def __init__(self, indexes: Iterable[PrefixIndex] = ()) -> None:
        self._by_tokens = {index.block_tokens: index for index in indexes}

    def __iter__(self) -> Iterator[PrefixIndex]:
        return iter(self._by_tokens.values())

    def __len__(self) -> int:
        return len(self._by_tokens)

    def of(self, block_tokens: int) -> PrefixIndex | None:
        """Return the index with blocks of *block_tokens* token ids, 0 for text; None if there is none."""
        return self._by_tokens.get(block_tokens)

    @property
    def image_bytes(self) -> int:
        """Most bytes of an image: a holding takes 8 of them, and counts for more in memory."""
        return sum(index.table.max_bytes for index in self)

    @property
    def changes(self) -> int:
        """Number that goes up with every change."""
        return sum(index.table.changes for index in self)

    @property
    def is_restoring(self) -> bool:
        """Whether an image waits until an instance reports which process it is."""
        return any(index.is_restoring for index in self)

    def figures(self) -> IndexFigures:
        """Return their size, for the metrics page."""
        tables = [index.table for index in self]
        return IndexFigures(
            sum(table.blocks for table in tables),
            sum(table.memory_bytes for table in tables),
            sum(table.evictions for table in tables),
        )

    def missed(self, instances: Collection[Instance]) -> None:
        """Note that placements on *instances* were lost."""
        for index in self:
            index.missed(instances)

    async def image(self) -> IndexImage:
        """Return an image of all indexes, gathered instance by instance so that other tasks run in between."""
        instances = []
        for index in self:
            for image in index.images():
                instances.append(image)
                await asyncio.sleep(0)
        return IndexImage(time.time(), BLOCK_BYTES, instances)

    def restore(self, images: Collection[InstanceImage]) -> None:
        """Take in *images*, each once its instance has reported which process it is."""
        for index in self:
            index.restore(images)

    async def recall(self, instances: Collection[Instance]) -> None:
        """Take in the images of all *instances* that have reported which process they are; drop those of others."""
        for index in self:
            await index.recall(instances)

"""Prefix index by token ids, beside the one by text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest, Usage
from smetric.sources.prefix_index.index import PrefixIndex, cut_ids, is_part
from smetric.sources.source import Cells, Source, TokenIds

#: Seconds since the last look-up after which no token ids are requested: no policy reads hits, or a better source
#: answers.
ASKED_S = 600.0
#: Prompts remembered as entered by token ids.
MOST_ENTERED = 16_384


@dataclass(slots=True)
class _Late:
    """A prompt that was sent before its token ids were known; whether it is answered, and its usage."""

    instance: Instance
    incarnation: int
    is_settled: bool = False
    usage: Usage | None = None


class TokenPrefixIndex(Source):
    """Index of blocks of token ids beside one of text: exact to a block of the engine if ids are known in time.

    Every prompt whose ids are known, or can be found while its response comes, is entered in both indexes. This one
    answers if it knows as much of the prompt to be held as the index of text, to a block of text; or less, if it has
    missed nothing and the session's last prompt was entered here. Otherwise the index of text answers: for prompts that
    were entered there alone, and for misses.

    Args:
        index: the index of token ids.
        text: the index of text.
        token_ids: gives the ids of prompts.
        yields: whether another source than the two is asked if only a part is known.
        clock: monotonic seconds.
    """

    name = "prefix_index:tokens"
    fills = frozenset({"hit_len"})

    def __init__(
        self,
        index: PrefixIndex,
        text: PrefixIndex,
        token_ids: TokenIds,
        *,
        yields: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self._text = text
        self._token_ids = token_ids
        self._yields = yields
        self._clock = clock
        self._asked_at = clock()
        self._late: dict[Prompt, _Late] = {}
        #: Text hashes of prompts that were entered here. Other prompts, sent by this router without ids or by other
        #: routers, may be in the index of text alone.
        self._entered: LRUCache[int, None] = LRUCache(MOST_ENTERED)
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Cancel the search for ids."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        """Return hit lengths in whole blocks, less than the prompt. No ids are requested while nothing is held."""
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
            answers = hit and (hit + block_of_text > text or (is_whole and self.index.misses_are_known(instance)))
            if answers and self._yields and is_part(hit, request):
                answers = False
            # The instance's own blocks may be larger than those here.
            cells.append(hit - hit % (instance.cache.block_size or 1) if answers else None)
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
        cut = cut_ids(prompt, ids, self.index.block_tokens)
        self.index.enter(cut, prompt, late.instance)
        self._entered[prompt.hashes.whole] = None
        if late.is_settled:
            self.index.settle(cut, prompt, late.instance, late.usage)

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """Enter the reply, and learn from *usage*, now or when the prompt's ids are known."""
        late = self._late.get(request.prompt) if request.prompt is not None else None
        if late is None:
            self.index.settled(request, instance, usage)
        else:
            late.is_settled, late.usage = True, usage if request.prompts == 1 else None

    def forget(self, instance: Instance) -> None:
        """Drop all blocks of *instance*, which restarted or was removed."""
        self.index.forget(instance)

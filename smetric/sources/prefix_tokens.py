"""The prefix index by token ids: exact to a block of the engine, where ids are known in time.

A second index beside that of text, with a table of its own: hashes of the two spaces never meet. Every prompt is
entered in both if its ids are known or can be found: those of a request that was routed without them, as a session's
first one is, are found while its answer comes. Which prompts have ids is known in `smetric.tokenize`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from smetric.fleet.instance import Instance
from smetric.reading.prompt import BLOCK_BYTES, Prompt
from smetric.request import InferenceRequest
from smetric.sources.cut import TokenCutting
from smetric.sources.prefix_index import PrefixIndex, is_part
from smetric.sources.source import Cells, Source
from smetric.token_ids import TokenIds
from smetric.usage import Usage

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

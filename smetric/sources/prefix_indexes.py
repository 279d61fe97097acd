"""All prefix indexes of a router as one: of blocks of text and, where a tokenizer gives them, of blocks of token ids.

What one knows is in `prefix_index.py`; how the memory is shared out is in `stack.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator

from smetric.fleet.instance import Instance
from smetric.reading.prompt import BLOCK_BYTES
from smetric.sources.index_image import IndexImage, InstanceImage
from smetric.sources.prefix_index import PrefixIndex
from smetric.telemetry.gauges import IndexFigures


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

"""What was learnt of instances before, by this process's predecessor or by a peer, and waits to be taken in.

It holds of one process of an instance, so it waits until the instance has said which process it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from smetric.fleet.instance import Instance
from smetric.sources.index_image import InstanceImage

#: Images that wait: of one instance, and instances.
MAX_WAITING = 8
MAX_INSTANCES_WAITING = 1024


class Restoring:
    """Images that wait."""

    def __init__(self) -> None:
        #: By instance id.
        self.waiting: dict[str, list[InstanceImage]] = {}

    def add(self, images: Iterable[InstanceImage]) -> None:
        """Keep *images*, the latest of each instance."""
        for one in images:
            if one.id not in self.waiting and len(self.waiting) >= MAX_INSTANCES_WAITING:
                continue
            waiting = self.waiting.setdefault(one.id, [])
            waiting.append(one)
            del waiting[:-MAX_WAITING]

    def latest(self) -> list[InstanceImage]:
        """The latest of each instance."""
        return [images[-1] for images in self.waiting.values()]

    def drop_strangers(self, ids: Collection[str]) -> None:
        """Keep only those of instances with one of these *ids*."""
        for id in self.waiting.keys() - set(ids):
            del self.waiting[id]

    def of(self, instance: Instance) -> list[InstanceImage]:
        """Those of *instance*, once, and none before it is known which process answers."""
        if instance.id not in self.waiting or (instance.scrape is None and instance.started_at is None):
            return []
        return self.waiting.pop(instance.id)

"""Source of exact hit lengths from the engines' KV events."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio

from smetric.fleet.instance import Instance
from smetric.log_limit import LogLimit
from smetric.request.request import InferenceRequest
from smetric.sources.kv_events.contents import TIERS, KvIndex
from smetric.sources.kv_events.publisher import Publisher
from smetric.sources.kv_events.subscriber import CacheState, RankStream, Subscriber
from smetric.sources.source import Cells, Source, TokenIds

#: Seconds after which an address that could not be used is tried again.
RETRY_S = 5.0

log = structlog.get_logger("smetric.kv_events")


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """Figures of the KV events of one instance.

    Args:
        is_known: whether the contents of the caches of all its data-parallel ranks are complete.
        messages: number of messages by result: ok, replayed, repeated, malformed.
        lag_s: seconds from when the engine made its latest message until it arrived; None before the first.
        gaps: number of gaps in the messages that no replay filled.
        missed: number of messages lost in these gaps.
        orphans: number of stored blocks whose parent was unknown.
        restarts: most restarts that the sequence numbers of one rank showed.
    """

    is_known: bool
    messages: Mapping[str, int]
    lag_s: float | None
    gaps: int
    missed: int
    orphans: int
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class KvFigures:
    """Figures of the index of KV events, and of each instance by id."""

    blocks: int
    memory_bytes: int
    refused: int
    instances: Mapping[str, CacheFigures]


class KvEvents(Source):
    """Source of hit lengths from KV events, which answers as soon as it has the token ids.

    An instance whose contents are complete has an exact cell: whole blocks, and always less than the prompt, because
    engines compute its last token again. While contents are incomplete, the certain part is a lower bound. The cell is
    that bound if it reaches the expected hit, else unknown: part of the prompt must not hide the whole of it that
    another source knows. With several data-parallel ranks, the best one counts. A slower tier has a cell once an event
    named it: what it holds, or 0 if every event was seen; unknown while the contents of any rank are incomplete.

    Args:
        publishers: where to listen, one for each rank.
        token_ids: gives the token ids of prompts.
        max_bytes: bound on the memory of the index.
    """

    name = "kv_events"
    fills = frozenset({"hit_len", *TIERS.values()})

    def __init__(self, publishers: Sequence[Publisher], token_ids: TokenIds, *, max_bytes: int) -> None:
        self.index = KvIndex(max_bytes)
        self._token_ids = token_ids
        self._subscribers: dict[Instance, list[Subscriber]] = {}
        for publisher in publishers:
            self._subscribers.setdefault(publisher.instance, []).append(Subscriber(publisher, self.index))
        self._context: zmq.asyncio.Context | None = None
        self._log_limit = LogLimit()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start listening."""
        context = self._context = zmq.asyncio.Context()
        self._tasks = [
            asyncio.create_task(self._listen(subscriber, context), name=f"kv-events {subscriber.publisher.endpoint}")
            for subscribers in self._subscribers.values()
            for subscriber in subscribers
        ]

    async def caught_up(self, within_s: float) -> None:
        """Wait until no cache is `behind`, at most *within_s* seconds.

        A cache without a replay address is not waited for, as only its next message can show that nothing is missing.
        Nor is that of an instance that fails its health checks.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for instance, subscribers in self._subscribers.items():
                    for one in subscribers:
                        if one.publisher.replay and instance.healthy:
                            await one.caught_up.wait()

    async def stop(self) -> None:
        """Stop listening and close the sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _listen(self, subscriber: Subscriber, context: zmq.asyncio.Context) -> None:
        fields = {"instance": subscriber.publisher.instance.id, "endpoint": subscriber.publisher.endpoint}
        problem = ""
        while True:
            began = time.monotonic()
            try:
                await subscriber.run(context)
            except zmq.ZMQError as error:
                if str(error) != problem or time.monotonic() - began > RETRY_S:
                    log.error("smetric.kv_events.failed", **fields, error=str(error))
                problem = str(error)
            except Exception:
                # A bug here must not end the knowledge of this instance for good.
                if (kept_back := self._log_limit.passes(subscriber)) is not None:
                    log.exception("smetric.kv_events.crashed", **fields, kept_back=kept_back)
            subscriber.lose(CacheState.GAP)
            await asyncio.sleep(RETRY_S)

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        """Return hit lengths in tokens, by one walk along the prompt for all instances.

        Token ids are not requested while nothing is known of any instance.
        """
        streams = {instance: self._streams(instance) for instance in instances}
        if all(stream.knows_nothing for each in streams.values() for stream in each):
            return {"hit_len": [None] * len(instances)}
        return self._look_up(request, streams)

    async def _look_up(
        self, request: InferenceRequest, streams: Mapping[Instance, Sequence[RankStream]]
    ) -> dict[str, Cells]:
        ids = await self._token_ids.of(request)
        if ids is None:
            return {"hit_len": [None] * len(streams)}
        is_adapter = request.served in self.index.adapters or any(request.served in one.adapters for one in streams)
        adapter = request.served if is_adapter else ""
        by_size: dict[int, list[RankStream]] = {}
        for stream in (stream for each in streams.values() for stream in each if stream.contents.block_size):
            by_size.setdefault(stream.contents.block_size, []).append(stream)
        hits: dict[RankStream, _Hit] = {}
        in_tiers: dict[tuple[str, RankStream], int] = {}
        for size, asked in by_size.items():
            keys = request.keys_of(ids, size, adapter)
            tiers = [(stream, *tier) for stream in asked for tier in stream.contents.tiers.items()]
            bits = [stream.contents.bit for stream in asked] + [tier.bit for _, _, tier in tiers]
            depths = self.index.depths(keys, (len(ids) - 1) // size, bits)
            for stream, depth in zip(asked, depths, strict=False):
                hits[stream] = _Hit(depth * size, stream.contents.certain(keys.keys, depth) * size)
            for (stream, feature, _), depth in zip(tiers, depths[len(asked) :], strict=True):
                in_tiers[feature, stream] = depth * size
        cells: dict[str, Cells] = {
            "hit_len": [self._cell(instance, each, hits, request) for instance, each in streams.items()]
        }
        if in_tiers:
            host, disk = TIERS.values()
            # disk_hit_len counts what is in host memory or on the disk.
            for feature, counted in ((host, (host,)), (disk, (host, disk))):
                cells[feature] = [
                    _in_tiers(counted, each, in_tiers) if self._is_known(instance, each) else None
                    for instance, each in streams.items()
                ]
        return cells

    def _cell(
        self,
        instance: Instance,
        streams: Sequence[RankStream],
        hits: Mapping[RankStream, _Hit],
        request: InferenceRequest,
    ) -> int | None:
        if not streams:
            return None
        nothing = _Hit(0, 0)
        if self._is_known(instance, streams):
            return max(hits.get(stream, nothing).held for stream in streams)
        if any(stream.is_behind for stream in streams):
            return None
        bound = max(hits.get(stream, nothing).certain for stream in streams)
        return bound if request.est_hit and bound >= request.est_hit else None

    def _is_known(self, instance: Instance, streams: Sequence[RankStream]) -> bool:
        """Return whether *streams* are those of all ranks of *instance*, and their contents complete."""
        return (
            bool(streams)
            and all(subscriber.streams for subscriber in self._subscribers[instance])
            and all(stream.state is CacheState.KNOWN for stream in streams)
        )

    def _streams(self, instance: Instance) -> list[RankStream]:
        return [stream for one in self._subscribers.get(instance, ()) for stream in list(one.streams.values())]

    def forget(self, instance: Instance) -> None:
        """Start anew for *instance*, which restarted."""
        for subscriber in self._subscribers.get(instance, ()):
            subscriber.forget()

    def figures(self) -> KvFigures:
        """Return the current figures. May be called from another thread."""
        return KvFigures(
            blocks=self.index.blocks,
            memory_bytes=self.index.memory_bytes,
            refused=self.index.refused,
            instances={
                instance.id: CacheFigures(
                    is_known=self._is_known(instance, streams := self._streams(instance)),
                    messages=sum((Counter(dict(one.messages)) for one in subscribers), Counter()),
                    lag_s=max((stream.lag_s for stream in streams if stream.lag_s is not None), default=None),
                    gaps=sum(stream.gaps for stream in streams),
                    missed=sum(stream.missed for stream in streams),
                    orphans=sum(stream.orphans for stream in streams),
                    restarts=max((stream.restarts for stream in streams), default=0),
                )
                for instance, subscribers in self._subscribers.items()
            },
        )


@dataclass(frozen=True, slots=True)
class _Hit:
    """Leading tokens that a cache probably holds, and those that it certainly holds."""

    held: int
    certain: int


def _in_tiers(
    features: Sequence[str], streams: Sequence[RankStream], hits: Mapping[tuple[str, RankStream], int]
) -> int | None:
    """Return the tokens that a tier of *features* of some rank holds; None if it may hold more than none."""
    held = max(hits.get((feature, stream), 0) for feature in features for stream in streams)
    named = [[tier for feature, tier in stream.contents.tiers.items() if feature in features] for stream in streams]
    return held if held or all(tiers and all(tier.is_complete for tier in tiers) for tiers in named) else None

"""The features that LMCache's lookup services fill, one source for each tier, so that a trace names service and tier.

Neither service sees an engine's GPU. What LMCache finds in an instance's own host memory stands in for `hit_len` where
no better source knows; a shared store never does, or every instance would be as good as any other. Looking a prompt up
is in `lmcache_lookup`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from smetric.config.settings import Settings
from smetric.fleet.instance import Instance
from smetric.request import InferenceRequest
from smetric.sources.breaker import Breaker
from smetric.sources.lmcache_client import Client, Service
from smetric.sources.lmcache_controller import Controller
from smetric.sources.lmcache_coordinator import Coordinator
from smetric.sources.lmcache_holdings import Holdings
from smetric.sources.lmcache_lookup import Lookup
from smetric.sources.source import Cells, Source
from smetric.telemetry.metrics import Metrics
from smetric.telemetry.names import LOOKUP_LATE
from smetric.token_ids import TokenIds

#: The tokens of a prompt that the LMCache instance of this id holds; None where that is not known.
Length = Callable[[Holdings, str], int | None]


class LmcacheTier(Source):
    """A source that fills *features* from one reading of the service's answers.

    Args:
        tier: its name in traces is `lmcache:` and this.
        features: what it fills, all with the same length.
        length: how it reads an answer.
        lookup: asks the service; shared by all tiers.
        ids: LMCache's id for an instance by the instance's own; the same where it is not in here.
    """

    def __init__(
        self, tier: str, features: frozenset[str], length: Length, lookup: Lookup, ids: Mapping[str, str]
    ) -> None:
        self.name = f"lmcache:{tier}"
        self.fills = features
        self._length = length
        self._lookup = lookup
        self._ids = ids

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        """Look *request* up, at once if another tier has just done so."""
        recent = self._lookup.recent(request)
        return self._ask(request, instances) if recent is None else self._cells(recent, instances)

    async def _ask(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        return self._cells(await self._lookup.of(request), instances)

    def _cells(self, holdings: Holdings, instances: Sequence[Instance]) -> dict[str, Cells]:
        # Only the candidates are gone through, so whatever else an answer names is never heard of.
        cells = [self._length(holdings, self._ids.get(instance.id, instance.id)) for instance in instances]
        return dict.fromkeys(self.fills, cells)


def lmcache_sources(
    settings: Settings, tokens: TokenIds, deadline: Callable[[int], float], metrics: Metrics
) -> list[Source]:
    """The sources for all tiers of the service that `settings.lmcache` names, best first, and what they share.

    Args:
        settings: everything that can be set.
        tokens: gives the prompts' token ids.
        deadline: seconds the router gives the look-ups of a prompt, from its tokens.
        metrics: told of every look-up.
    """
    service: Service = Coordinator(settings.lmcache.chunk_size, settings.lmcache.world_size)
    if settings.lmcache.mode == "controller":
        service = Controller()
    client = Client(
        service,
        settings.lmcache.url,
        Breaker(settings.lmcache.breaker_failures, settings.lmcache.breaker_open),
        on_late=partial(metrics.looked_up, "lmcache", LOOKUP_LATE),
        on_breaker=partial(metrics.suspended, "lmcache"),
    )
    lookup = Lookup(
        client,
        tokens,
        deadline=deadline,
        chunk_size=settings.lmcache.chunk_size,
        models=settings.lmcache.models,
        answers_ttl_s=settings.lmcache.answers_ttl,
        on_result=partial(metrics.looked_up, "lmcache"),
    )
    ids = settings.lmcache.instances
    return [
        LmcacheTier("host", frozenset({"hit_len", "host_hit_len"}), lambda held, id: held.host.get(id), lookup, ids),
        LmcacheTier("disk", frozenset({"disk_hit_len"}), lambda held, id: held.own.get(id), lookup, ids),
        LmcacheTier("store", frozenset({"store_hit_len"}), lambda held, id: held.shared, lookup, ids),
        LmcacheTier("likely", frozenset({"hit_len"}), lambda held, id: held.likely.get(id), lookup, ids),
        lookup,
    ]

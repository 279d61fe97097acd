"""Sources for the features that LMCache's lookup services fill."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec
import xxhash
from cachetools import TTLCache

from smetric import names
from smetric.config.settings import Settings
from smetric.fleet.instance import Instance
from smetric.request.request import InferenceRequest
from smetric.sources.client import Breaker
from smetric.sources.lmcache.client import (
    MAX_TOKENS,
    NOTHING,
    Controller,
    Coordinator,
    LmcacheClient,
    LmcacheHits,
    LmcacheQuestion,
    LookupService,
)
from smetric.sources.source import Cells, Source, SourceCounts, TokenIds

#: Most lengths in the cached answers, about 100 bytes each. An answer may name any number of instances.
MAX_LENGTHS = 262_144

_SALT = msgspec.json.Decoder(str | None)


class LmcacheLookup(Source):
    """Look-ups of prompts, shared by all tiers. A failure of any kind is an answer that knows nothing.

    It fills no feature itself; it is a source to follow the requests.

    Args:
        client: asks the service.
        tokens: gives the prompts' token ids.
        deadline: seconds that the router allows for the look-ups of a prompt, by its tokens.
        chunk_size: tokens per chunk.
        models: the models to look up, as engines serve them, and their names in LMCache's keys; empty for all models
            under their own names.
        answers_ttl_s: seconds for which an answer is cached.
        on_result: called with the result of each look-up, one of `names.LOOKUP_RESULTS`.
        clock: monotonic seconds.
    """

    name = "lmcache"

    def __init__(
        self,
        client: LmcacheClient,
        tokens: TokenIds,
        *,
        deadline: Callable[[int], float],
        chunk_size: int,
        models: Mapping[str, str],
        answers_ttl_s: float,
        on_result: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._tokens = tokens
        self._deadline = deadline
        self._chunk_size = chunk_size
        self._models = models
        self._on_result = on_result
        self._clock = clock
        self._ttl_s = answers_ttl_s
        self._answers: TTLCache[tuple[int, int, str, str], LmcacheHits] = TTLCache(
            MAX_LENGTHS, answers_ttl_s, clock, lambda hits: hits.size
        )
        #: The latest request and its answer. Several features, and a second pass of the policy, ask for the same
        #: without new tokens and hashes.
        self._last: tuple[InferenceRequest, float, LmcacheHits] | None = None

    async def start(self) -> None:
        """Open the client's connections."""
        await self._client.start()

    async def stop(self) -> None:
        """Close the client's connections."""
        await self._client.stop()

    def forget(self, instance: Instance) -> None:
        """Drop the cached answers, because *instance* restarted."""
        self._answers.clear()
        self._last = None

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Drop the cached answer about the chunks of *request*, because *instance* has stored them in LMCache now."""
        if self._last is not None and self._last[0] is request:
            self._last = None
        if not self._answers or request.token_ids is None:
            return
        key = self._key_of(request)
        if key is not None:
            self._answers.pop(_cache_key(LmcacheQuestion(self._chunks(request.token_ids), *key)), None)

    def recent(self, request: InferenceRequest) -> LmcacheHits | None:
        """Return the latest answer if it is that of *request* and not expired, else None."""
        if self._last is None or self._last[0] is not request or self._clock() >= self._last[1] + self._ttl_s:
            return None
        return self._last[2]

    async def of(self, request: InferenceRequest) -> LmcacheHits:
        """Return the service's answer about the prompt of *request*; `NOTHING` if there is none for any reason."""
        hits = NOTHING
        try:
            result, hits = await self._ask(request)
            self._on_result(result)
        finally:
            # After a cancellation too: the service is not asked again within this decision.
            self._last = (request, self._clock(), hits)
        return hits

    async def _ask(self, request: InferenceRequest) -> tuple[str, LmcacheHits]:
        key = self._key_of(request)
        if key is None:
            return names.LOOKUP_NOT_ASKED, NOTHING
        ids = await self._tokens.of(request)
        if ids is None:
            return names.LOOKUP_NO_TOKENS, NOTHING
        chunks = self._chunks(ids)
        if not chunks:
            return names.LOOKUP_NOT_ASKED, NOTHING
        question = LmcacheQuestion(chunks, *key)
        cache_key = _cache_key(question)
        known = self._answers.get(cache_key)
        if known is not None:
            return names.LOOKUP_CACHED, known
        result, hits = await self._client.ask(question, self._deadline(request.prompt_len))
        if result == names.LOOKUP_OK and hits.size <= MAX_LENGTHS:
            self._answers[cache_key] = hits
        return result, hits

    def _key_of(self, request: InferenceRequest) -> tuple[str, str] | None:
        """Return model and salt as in LMCache's keys; None for prompts that the service cannot tell from others."""
        if request.prompt is None:
            return None
        # The prompt's key is the model, a zero byte, and the salt as JSON.
        _, _, written = request.prompt.key.partition(b"\0")
        try:
            salt = _SALT.decode(written) if written else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if salt and not self._client.service.knows_salts:
            return None
        model = self._models.get(request.served) if self._models else request.served
        return (model, salt or "") if model else None

    def _chunks(self, ids: Sequence[int]) -> array[int]:
        """Return the whole chunks of *ids*; empty if there is none, or an id is invalid."""
        most = min(len(ids), MAX_TOKENS) // self._chunk_size * self._chunk_size
        try:
            return array("I", ids[:most])
        except (OverflowError, TypeError):
            return array("I")


def _cache_key(question: LmcacheQuestion) -> tuple[int, int, str, str]:
    tokens = question.tokens
    return xxhash.xxh3_64_intdigest(memoryview(tokens)), len(tokens), question.model, question.salt


#: Tokens of a prompt that the LMCache instance of this id holds; None if unknown.
HitLength = Callable[[LmcacheHits, str], int | None]


class LmcacheTier(Source):
    """Source of one tier, so that a trace names service and tier.

    Args:
        tier: its name in traces is `lmcache:` and this.
        features: the features it fills, all with the same length.
        length: reads the length from an answer.
        lookup: asks the service; shared by all tiers.
        ids: LMCache's id of an instance by the instance's own; the same for an instance that is missing here.
    """

    def __init__(
        self, tier: str, features: frozenset[str], length: HitLength, lookup: LmcacheLookup, ids: Mapping[str, str]
    ) -> None:
        self.name = f"lmcache:{tier}"
        self.fills = features
        self._length = length
        self._lookup = lookup
        self._ids = ids

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        """Look *request* up; at once if another tier has just done so."""
        recent = self._lookup.recent(request)
        return self._ask(request, instances) if recent is None else self._cells(recent, instances)

    async def _ask(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        return self._cells(await self._lookup.of(request), instances)

    def _cells(self, hits: LmcacheHits, instances: Sequence[Instance]) -> dict[str, Cells]:
        cells = [self._length(hits, self._ids.get(instance.id, instance.id)) for instance in instances]
        return dict.fromkeys(self.fills, cells)


def lmcache_sources(
    settings: Settings, tokens: TokenIds, deadline: Callable[[int], float], counts: SourceCounts
) -> list[Source]:
    """Return the sources of all tiers of the service in `settings.lmcache`, best first, and the look-up they share.

    No service sees an engine's GPU. The hit in an instance's lmcache host memory stands in for `hit_len` if no better
    source knows it. A shared store never does, or every instance would be as good as any other.

    Args:
        settings: all settings.
        tokens: gives the prompts' token ids.
        deadline: seconds that the router allows for the look-ups of a prompt, by its tokens.
        counts: counts every look-up.
    """
    lmcache = settings.lmcache
    service: LookupService = (
        Controller() if lmcache.mode == "controller" else Coordinator(lmcache.chunk_size, lmcache.world_size)
    )
    client = LmcacheClient(
        service,
        lmcache.url,
        Breaker(lmcache.breaker_failures, lmcache.breaker_open),
        on_late=partial(counts.looked_up, "lmcache", names.LOOKUP_LATE),
        on_breaker=partial(counts.suspended, "lmcache"),
    )
    lookup = LmcacheLookup(
        client,
        tokens,
        deadline=deadline,
        chunk_size=lmcache.chunk_size,
        models=lmcache.models,
        answers_ttl_s=lmcache.answers_ttl,
        on_result=partial(counts.looked_up, "lmcache"),
    )
    ids = lmcache.instances
    return [
        LmcacheTier("host", frozenset({"hit_len", "host_hit_len"}), lambda hits, id: hits.host.get(id), lookup, ids),
        LmcacheTier("disk", frozenset({"disk_hit_len"}), lambda hits, id: hits.own.get(id), lookup, ids),
        LmcacheTier("store", frozenset({"store_hit_len"}), lambda hits, id: hits.shared, lookup, ids),
        LmcacheTier("likely", frozenset({"hit_len"}), lambda hits, id: hits.likely.get(id), lookup, ids),
        lookup,
    ]

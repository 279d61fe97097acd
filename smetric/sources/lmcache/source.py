"""Features that LMCache's lookup services fill."""

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
from smetric.names import LOOKUP_LATE
from smetric.request.request import InferenceRequest
from smetric.sources.client import Breaker
from smetric.sources.lmcache.client import (
    MAX_TOKENS,
    NOTHING,
    Client,
    Controller,
    Coordinator,
    Holdings,
    Question,
    Service,
)
from smetric.sources.source import Cells, Source, SourceCounts, TokenIds

# What an LMCache lookup service knows of a prompt: what it is asked for, and the answers of the last moments.
#
# How it is asked is in `lmcache_client`; which features the answers fill is in `lmcache`.

#: Most lengths in the answers that are remembered, some 100 bytes each. An answer may name any number of instances.
MAX_LENGTHS = 262_144

_SALT = msgspec.json.Decoder(str | None)


class Lookup(Source):
    """Looks prompts up; failure of any kind, lateness included, is an answer that says nothing.

    It fills nothing itself, but is told what becomes of requests, once for all tiers.

    Args:
        client: asks the service.
        tokens: gives the prompts' token ids.
        deadline: seconds the router gives the look-ups of a prompt, from its tokens.
        chunk_size: tokens of a chunk.
        models: the models that are asked for, as engines serve them, and their names in LMCache's keys; empty: all,
            under their own names.
        answers_ttl_s: seconds an answer is used again.
        on_result: called with the result of each look-up, one of `names.LOOKUP_RESULTS`.
        clock: monotonic seconds.
    """

    name = "lmcache"

    def __init__(
        self,
        client: Client,
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
        self._answers: TTLCache[tuple[int, int, str, str], Holdings] = TTLCache(
            MAX_LENGTHS, answers_ttl_s, clock, lambda holdings: holdings.size
        )
        #: The request asked for last and what came of it: several features, and a second pass of the policy, want the
        #: same, and should cost neither tokens nor hashes again.
        self._last: tuple[InferenceRequest, float, Holdings] | None = None

    async def start(self) -> None:
        """Open the service's connections."""
        await self._client.start()

    async def stop(self) -> None:
        """Close them."""
        await self._client.stop()

    def forget(self, instance: Instance) -> None:
        """*instance* restarted: what was answered before may not hold any more."""
        self._answers.clear()
        self._last = None

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """LMCache learns of it from *instance* itself: an answer about the same chunks from before says too little."""
        if self._last is not None and self._last[0] is request:
            self._last = None
        if not self._answers or request.token_ids is None:
            return
        named = self._key_of(request)
        if named is not None:
            question = Question(_packed(request.token_ids, self._chunk_size), *named)
            self._answers.pop(_identity(question), None)

    def recent(self, request: InferenceRequest) -> Holdings | None:
        """What the last look-up said, if it was *request*'s; None if it is to be asked."""
        if self._last is None or self._last[0] is not request or self._clock() >= self._last[1] + self._ttl_s:
            return None
        return self._last[2]

    async def of(self, request: InferenceRequest) -> Holdings:
        """What the service says of *request*'s prompt; `NOTHING` for whatever reason it does not say it."""
        holdings = NOTHING
        try:
            result, holdings = await self._of(request)
            self._on_result(result)
        finally:
            # Also when it was cancelled: for the rest of this decision it is not asked again.
            self._last = (request, self._clock(), holdings)
        return holdings

    async def _of(self, request: InferenceRequest) -> tuple[str, Holdings]:
        named = self._key_of(request)
        if named is None:
            return names.LOOKUP_NOT_ASKED, NOTHING
        ids = await self._tokens.of(request)
        if ids is None:
            return names.LOOKUP_NO_TOKENS, NOTHING
        tokens = _packed(ids, self._chunk_size)
        if not tokens:
            return names.LOOKUP_NOT_ASKED, NOTHING
        question = Question(tokens, *named)
        identity = _identity(question)
        known = self._answers.get(identity)
        if known is not None:
            return names.LOOKUP_CACHED, known
        result, holdings = await self._client.ask(question, self._deadline(request.prompt_len))
        if result == names.LOOKUP_OK and holdings.size <= MAX_LENGTHS:
            self._answers[identity] = holdings
        return result, holdings

    def _key_of(self, request: InferenceRequest) -> tuple[str, str] | None:
        """Model and salt as LMCache keys them; None for prompts it cannot tell from others."""
        if request.prompt is None:
            return None
        # The prompt's key is the model, a zero byte, and the salt as the body has it.
        _, _, written = request.prompt.key.partition(b"\0")
        try:
            salt = _SALT.decode(written) if written else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if salt and not self._client.service.knows_salts:
            return None
        named = self._models.get(request.served) if self._models else request.served
        return (named, salt or "") if named else None


def _identity(question: Question) -> tuple[int, int, str, str]:
    """What tells it from other questions."""
    tokens = question.tokens
    return xxhash.xxh3_64_intdigest(memoryview(tokens)), len(tokens), question.model, question.salt


def _packed(ids: Sequence[int], chunk_size: int) -> array[int]:
    """The whole chunks of *ids* as an array; empty when there is none, or something in it is no token id."""
    most = min(len(ids), MAX_TOKENS) // chunk_size * chunk_size
    try:
        return array("I", ids[:most])
    except (OverflowError, TypeError):
        return array("I")


# The features that LMCache's lookup services fill, one source for each tier, so that a trace names service and tier.
#
# Neither service sees an engine's GPU. What LMCache finds in an instance's own host memory stands in for `hit_len`
# where no better source knows; a shared store never does, or every instance would be as good as any other. Looking a
# prompt up is in `lmcache_lookup`.

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
    settings: Settings, tokens: TokenIds, deadline: Callable[[int], float], counts: SourceCounts
) -> list[Source]:
    """The sources for all tiers of the service that `settings.lmcache` names, best first, and what they share.

    Args:
        settings: everything that can be set.
        tokens: gives the prompts' token ids.
        deadline: seconds the router gives the look-ups of a prompt, from its tokens.
        counts: counts every look-up.
    """
    service: Service = Coordinator(settings.lmcache.chunk_size, settings.lmcache.world_size)
    if settings.lmcache.mode == "controller":
        service = Controller()
    client = Client(
        service,
        settings.lmcache.url,
        Breaker(settings.lmcache.breaker_failures, settings.lmcache.breaker_open),
        on_late=partial(counts.looked_up, "lmcache", LOOKUP_LATE),
        on_breaker=partial(counts.suspended, "lmcache"),
    )
    lookup = Lookup(
        client,
        tokens,
        deadline=deadline,
        chunk_size=settings.lmcache.chunk_size,
        models=settings.lmcache.models,
        answers_ttl_s=settings.lmcache.answers_ttl,
        on_result=partial(counts.looked_up, "lmcache"),
    )
    ids = settings.lmcache.instances
    return [
        LmcacheTier("host", frozenset({"hit_len", "host_hit_len"}), lambda held, id: held.host.get(id), lookup, ids),
        LmcacheTier("disk", frozenset({"disk_hit_len"}), lambda held, id: held.own.get(id), lookup, ids),
        LmcacheTier("store", frozenset({"store_hit_len"}), lambda held, id: held.shared, lookup, ids),
        LmcacheTier("likely", frozenset({"hit_len"}), lambda held, id: held.likely.get(id), lookup, ids),
        lookup,
    ]

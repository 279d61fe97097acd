"""What an LMCache lookup service knows of a prompt: what it is asked for, and the answers of the last moments.

How it is asked is in `lmcache_client`; which features the answers fill is in `lmcache`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence

import msgspec
import xxhash
from cachetools import TTLCache

from smetric.fleet.instance import Instance
from smetric.request import InferenceRequest
from smetric.sources.lmcache_client import Client
from smetric.sources.lmcache_holdings import MAX_TOKENS, NOTHING, Holdings, Question
from smetric.sources.source import Source
from smetric.telemetry import names
from smetric.token_ids import TokenIds

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

"""Asks one LMCache lookup service what it knows of a prompt: connections, breaker, and the answers of the last moments.

The deadline is the router's: a look-up that is cancelled ends its request at once. What the questions and answers look
like is in `lmcache_coordinator` and `lmcache_controller`; which features the answers fill is in `lmcache`.
"""

from __future__ import annotations

import asyncio
import io
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import aiohttp
import msgspec
import structlog
import xxhash
from cachetools import TTLCache

from smetric.request import InferenceRequest
from smetric.sources.breaker import Breaker
from smetric.sources.instance_session import is_plain
from smetric.sources.lmcache_holdings import MAX_TOKENS, NOTHING, Holdings, Question, UnreadableError
from smetric.telemetry import names
from smetric.token_ids import TokenIds

#: Prompts above this many tokens are encoded, and their answers read, in a thread.
INLINE_TOKENS = 8192
#: Largest answer that is read, bytes, whatever the question.
MAX_ANSWER_BYTES = 32 * 1024 * 1024
#: Most lengths in the answers that are remembered, some 100 bytes each. An answer may name any number of instances.
MAX_LENGTHS = 262_144
#: Most connections to the service.
MAX_CONNECTIONS = 64

log = structlog.get_logger("smetric.sources.lmcache")

T = TypeVar("T")

_SALT = msgspec.json.Decoder(str | None)


class Service(Protocol):
    """One kind of lookup service."""

    #: Where it is asked.
    path: str
    #: Whether prompts with a cache salt can be told apart.
    knows_salts: bool

    def body(self, question: Question) -> bytes:
        """The request body for *question*."""

    def largest(self, question: Question) -> int:
        """Bytes of the largest answer that makes sense."""

    def read(self, body: bytes, question: Question) -> Holdings:
        """What the answer *body* says; raises UnreadableError when it is none."""


class Lookup:
    """Asks *service* at *url*; failure of any kind, lateness included, is an answer that says nothing.

    Args:
        service: what kind of service it is.
        url: its base URL.
        tokens: gives the prompts' token ids.
        breaker: spares a service that fails, and requests the wait for it.
        deadline: seconds the router gives the look-ups of a prompt, from its tokens.
        chunk_size: tokens of a chunk.
        models: the models that are asked for, as clients name them, and their names in LMCache's keys; empty: all,
            under their own names.
        aliases: names that stand for another model.
        answers_ttl_s: seconds an answer is used again.
        on_result: called with the result of each look-up, one of `names.LOOKUP_RESULTS`.
        on_breaker: called when the service begins to count as failing (True) or as well again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        service: Service,
        url: str,
        tokens: TokenIds,
        breaker: Breaker,
        *,
        deadline: Callable[[int], float],
        chunk_size: int,
        models: Mapping[str, str],
        aliases: Mapping[str, str],
        answers_ttl_s: float,
        on_result: Callable[[str], None],
        on_breaker: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._url = url + service.path
        self._tokens = tokens
        self._breaker = breaker
        self._deadline = deadline
        self._chunk_size = chunk_size
        self._models = models
        self._aliases = aliases
        self._on_result = on_result
        self._on_breaker = on_breaker
        self._clock = clock
        self._ttl_s = answers_ttl_s
        self._answers: TTLCache[tuple[int, int, str, str], Holdings] = TTLCache(
            MAX_LENGTHS, answers_ttl_s, clock, lambda holdings: holdings.size
        )
        #: The request asked for last and what came of it: several features, and a second pass of the policy, want the
        #: same, and should cost neither tokens nor hashes again.
        self._last: tuple[InferenceRequest, float, Holdings] | None = None
        #: The request whose prefill was told last: each tier tells of it.
        self._told_of: InferenceRequest | None = None
        self._session: aiohttp.ClientSession | None = None
        self._suspended = False

    async def start(self) -> None:
        """Open the pool of connections, once."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Servers on uvicorn close idle connections after 5 s; a POST on a closed one is lost.
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=3, ttl_dns_cache=10),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                trust_env=False,
            )

    async def stop(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def forget(self) -> None:
        """Answers given so far may not hold any more."""
        self._answers.clear()
        self._last = None

    def prefilled(self, request: InferenceRequest) -> None:
        """An instance has computed *request*'s prompt: an answer about the same chunks from before says too little."""
        if self._last is not None and self._last[0] is request:
            self._last = None
        if not self._answers or request.token_ids is None or self._told_of is request:
            return
        self._told_of = request
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
        if self._session is None or not self._breaker.allows():
            return names.LOOKUP_SUSPENDED, NOTHING
        result, holdings = await self._ask(question, self._deadline(request.prompt_len))
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
        if salt and not self._service.knows_salts:
            return None
        model = self._aliases.get(request.model, request.model)
        named = self._models.get(model) if self._models else model
        return (named, salt or "") if named else None

    async def _ask(self, question: Question, deadline_s: float) -> tuple[str, Holdings]:
        """One request to the service, and its end told to the breaker."""
        breaker = self._breaker
        reason = ""
        started = self._clock()
        long = len(question.tokens) > INLINE_TOKENS
        try:
            body = await _call(long, self._service.body, question)
            status, answer = await self._post(body, min(self._service.largest(question), MAX_ANSWER_BYTES))
            if status == 200:
                holdings = await _call(long, self._service.read, answer, question)
                breaker.succeeded()
                result = names.LOOKUP_OK
            else:
                holdings, reason = NOTHING, f"it answered {status}"
                # Refusing one prompt says nothing of the service; an error or a path it does not know does.
                if status in (400, 413, 422):
                    breaker.abandoned()
                else:
                    breaker.failed()
                result = names.LOOKUP_HTTP_ERROR
        except UnreadableError as error:
            breaker.failed()
            result, holdings, reason = names.LOOKUP_UNREADABLE, NOTHING, str(error)
        except (aiohttp.ClientError, OSError) as error:
            breaker.failed()
            result, holdings, reason = names.LOOKUP_CONNECT_ERROR, NOTHING, type(error).__name__
        except BaseException as error:
            # The router's deadline, a client that left, or a bug of ours. It is the service that was late if it had
            # half of the time there was to itself.
            if isinstance(error, asyncio.CancelledError) and self._clock() - started >= deadline_s / 2:
                breaker.failed()
                self._on_result(names.LOOKUP_LATE)
                self._tell("it did not answer in time")
            else:
                breaker.abandoned()
            raise
        self._tell(reason)
        return result, holdings

    async def _post(self, body: bytes, largest: int) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            UnreadableError: it has more than *largest* bytes or is encoded in some way.
        """
        assert self._session is not None
        answer = bytearray()
        # From a file it goes out piece by piece, and other requests are served in between.
        async with self._session.post(
            self._url, data=io.BytesIO(body), headers={"Content-Type": "application/json"}, allow_redirects=False
        ) as response:
            if response.status != 200:
                return response.status, b""
            if not is_plain(response):
                raise UnreadableError("the answer is encoded though nothing but plain JSON was asked for")
            async for part in response.content.iter_any():
                answer += part
                if len(answer) > largest:
                    raise UnreadableError(f"the answer is larger than {largest} bytes")
        return 200, bytes(answer)

    def _tell(self, reason: str) -> None:
        """Say so when the service begins to count as failing, or as well again."""
        if self._breaker.is_open == self._suspended:
            return
        self._suspended = self._breaker.is_open
        self._on_breaker(self._suspended)
        if self._suspended:
            log.warning("smetric.lookup.suspended", url=self._url, reason=reason)
        else:
            log.info("smetric.lookup.resumed", url=self._url)


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


async def _call(in_thread: bool, function: Callable[..., T], *arguments: object) -> T:
    """*function* of *arguments*, in a thread or here."""
    return await asyncio.to_thread(function, *arguments) if in_thread else function(*arguments)

"""Client of LMCache's lookup services: the controller and the coordinator.

The deadline is the router's: cancelling a question ends its HTTP request at once.
"""

from __future__ import annotations

import asyncio
import io
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeAlias, TypeVar

import aiohttp
import msgspec
import orjson
import structlog

from smetric import names
from smetric.errors import UNREADABLE
from smetric.http.addresses import resolve
from smetric.sources.client import Breaker, PlainSession, is_plain, read_within

#: Most tokens in one question; the coordinator refuses more than a million.
MAX_TOKENS = 1_000_000
#: Prompts above this many tokens are encoded, and their answers decoded, in a thread.
INLINE_TOKENS = 8192
#: Largest answer that is read, in bytes, for any question.
MAX_ANSWER_BYTES = 32 * 1024 * 1024
#: Most connections to the service.
MAX_CONNECTIONS = 64
#: LMCache's id of an instance in an answer. Answers are cached, so it is as long as the settings allow at most.
InstanceId: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
T = TypeVar("T")

log = structlog.get_logger("smetric.sources.lmcache")


@dataclass(frozen=True, slots=True)
class LmcacheQuestion:
    """Prompt to look up.

    Args:
        tokens: its leading ids, 32-bit unsigned, whole chunks only: LMCache never holds part of a chunk.
        model: the model as LMCache's keys name it.
        salt: its cache salt, empty for none.
    """

    tokens: array[int] = field(repr=False)
    model: str
    salt: str


@dataclass(frozen=True, slots=True)
class LmcacheHits:
    """Answer to a question: hit lengths in tokens, all above 0, by LMCache's instance id.

    An instance that is missing is unknown, not empty: a service that has lost its directory, or hashes otherwise than
    the engines, answers in the same way.

    Args:
        host: held in the instance's own host memory.
        own: held by the instance itself, in host memory or on its disk.
        shared: held in a store that every instance can fetch from; None without one.
        likely: held in the instance's host memory if the likeliest reading of an ambiguous answer is right.
    """

    host: Mapping[str, int] = field(default_factory=dict)
    own: Mapping[str, int] = field(default_factory=dict)
    shared: int | None = None
    likely: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of lengths, plus one for the answer itself."""
        return 1 + len(self.host) + len(self.own) + len(self.likely)


#: The answer that knows nothing.
NOTHING = LmcacheHits()


class UnreadableError(Exception):
    """Answer that makes no sense. The message says why with numbers only and quotes nothing of the answer."""


class LookupService(Protocol):
    """Wire format of one kind of lookup service."""

    #: Path of its endpoint.
    path: str
    #: Whether its keys include the cache salt.
    knows_salts: bool

    def body(self, question: LmcacheQuestion) -> bytes:
        """Return the request body for *question*."""

    def largest(self, question: LmcacheQuestion) -> int:
        """Return the size of the largest plausible answer, in bytes."""

    def read(self, body: bytes, question: LmcacheQuestion) -> LmcacheHits:
        """Decode the answer *body*.

        Raises:
            UnreadableError: it is no answer to *question*.
        """


class LmcacheClient:
    """Client of *service* at *url*. A failure of any kind is an answer that knows nothing.

    Args:
        service: its wire format.
        url: its base URL.
        breaker: suspends a service that fails.
        on_late: called when a question is cancelled after at least half of its time was spent on the service.
        on_breaker: called when the service is suspended (True) or resumed (False).
        clock: monotonic seconds.
    """

    def __init__(
        self,
        service: LookupService,
        url: str,
        breaker: Breaker,
        *,
        on_late: Callable[[], None],
        on_breaker: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self._url = url + service.path
        self._breaker = breaker
        self._on_late = on_late
        self._on_breaker = on_breaker
        self._clock = clock
        self._session: PlainSession | None = None
        self._suspended = False

    async def start(self) -> None:
        """Open the connection pool."""
        self._session = PlainSession(resolve, timeout_s=None, most_to_one=MAX_CONNECTIONS)

    async def stop(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, question: LmcacheQuestion, deadline_s: float) -> tuple[str, LmcacheHits]:
        """Ask the service once, unless it is suspended.

        Args:
            question: of a prompt with at least one chunk.
            deadline_s: seconds until the caller cancels it.

        Returns:
            the result, one of `names.LOOKUP_RESULTS`, and the answer.
        """
        breaker = self._breaker
        if self._session is None or not breaker.allows():
            return names.LOOKUP_SUSPENDED, NOTHING
        hits, reason = NOTHING, ""
        started = self._clock()
        is_long = len(question.tokens) > INLINE_TOKENS
        try:
            body = await _call(is_long, self.service.body, question)
            status, answer = await self._post(body, min(self.service.largest(question), MAX_ANSWER_BYTES))
            if status == 200:
                hits = await _call(is_long, self.service.read, answer, question)
                breaker.succeeded()
                result = names.LOOKUP_OK
            else:
                result, reason = names.LOOKUP_HTTP_ERROR, f"it answered {status}"
                # A refusal of one prompt is no failure of the service; an error or an unknown path is.
                if status in (400, 413, 422):
                    breaker.abandoned()
                else:
                    breaker.failed()
        except UnreadableError as error:
            breaker.failed()
            result, reason = names.LOOKUP_UNREADABLE, str(error)
        except (aiohttp.ClientError, OSError) as error:
            breaker.failed()
            result, reason = names.LOOKUP_CONNECT_ERROR, type(error).__name__
        except BaseException as error:
            # The deadline, a disconnect, or a bug. The service is late if it had half of the deadline to itself.
            if isinstance(error, asyncio.CancelledError) and self._clock() - started >= deadline_s / 2:
                breaker.failed()
                self._on_late()
                self._report("it did not answer in time")
            else:
                breaker.abandoned()
            raise
        self._report(reason)
        return result, hits

    async def _post(self, body: bytes, largest: int) -> tuple[int, bytes]:
        """Send *body*; returns status and body of the answer.

        Raises:
            UnreadableError: the answer has more than *largest* bytes or a content encoding.
        """
        assert self._session is not None
        # aiohttp sends a file piece by piece, so that other requests are served in between.
        async with self._session.http.post(
            self._url, data=io.BytesIO(body), headers={"Content-Type": "application/json"}, allow_redirects=False
        ) as response:
            if response.status != 200:
                return response.status, b""
            if not is_plain(response):
                raise UnreadableError("the answer has a content encoding, but plain JSON was requested")
            if (answer := await read_within(response, largest)) is None:
                raise UnreadableError(f"the answer is larger than {largest} bytes")
        return 200, bytes(answer)

    def _report(self, reason: str) -> None:
        """Report and log that the service was suspended or resumed."""
        if self._breaker.is_open == self._suspended:
            return
        self._suspended = self._breaker.is_open
        self._on_breaker(self._suspended)
        if self._suspended:
            log.warning("smetric.lookup.suspended", url=self._url, reason=reason)
        else:
            log.info("smetric.lookup.resumed", url=self._url)


async def _call(in_thread: bool, function: Callable[..., T], *arguments: object) -> T:
    return await asyncio.to_thread(function, *arguments) if in_thread else function(*arguments)


#: Backends of the controller's answers: the instance's own host memory, its own disk.
HOST, DISK = "LocalCPUBackend", "LocalDiskBackend"
#: Largest answer of the controller, in bytes; an instance takes about 50.
CONTROLLER_BYTES = 1024 * 1024


class _Layout(msgspec.Struct):
    layout_info: dict[InstanceId, tuple[str, Annotated[int, msgspec.Meta(gt=0)]]]


_LAYOUT = msgspec.json.Decoder(_Layout)


class Controller:
    """LMCache's controller (`lmcache_controller`, in-process mode): `POST /lookup`.

    For each chunk it names one instance only, the holder that registered first, and for that instance only the end of
    its last such chunk. So:

    - One instance: it holds every chunk up to there, and no instance holds the next chunk. That is exact for this
      instance. Others may hold any part of the same chunks; they are unknown.
    - Several instances: the chunks are split among them in an unknown way. An instance may hold a chunk in the middle
      without the beginning, so no length is certain. The instance that reaches furthest most probably holds everything
      before as well, because an engine stores a prompt's chunks together. (Sessions that share a system prompt look
      like this: its chunks are credited to the first instance that registered.) It is `likely`; the others are unknown.
    - No instance: unknown. A controller that hashes otherwise than the engines always answers like this.

    Keys have no model, adapter or salt, so salted prompts are not looked up. With tensor parallelism one rank's chunks
    count as the instance's.
    """

    path = "/lookup"
    knows_salts = False

    def body(self, question: LmcacheQuestion) -> bytes:
        """Return the request body for *question*."""
        return orjson.dumps({"tokens": question.tokens.tolist()})

    def largest(self, question: LmcacheQuestion) -> int:
        """Return the size of the largest plausible answer, in bytes."""
        return CONTROLLER_BYTES

    def read(self, body: bytes, question: LmcacheQuestion) -> LmcacheHits:
        """Decode the answer *body*; see `LookupService.read`."""
        try:
            layout = _LAYOUT.decode(body).layout_info
        except UNREADABLE as error:
            raise UnreadableError("the answer is no layout") from error
        if not layout:
            return NOTHING
        furthest, (place, length) = max(layout.items(), key=lambda item: item[1][1])
        if length > len(question.tokens):
            raise UnreadableError(f"{len(question.tokens)} tokens were asked for, but {length} are reported as held")
        if len(layout) > 1:
            # Two instances cannot both own the last chunk; such an answer means nothing.
            is_alone = sum(end == length for _, end in layout.values()) == 1
            return LmcacheHits(likely={furthest: length}) if is_alone and place == HOST else NOTHING
        return LmcacheHits(
            host={furthest: length} if place == HOST else {},
            own={furthest: length} if place in (HOST, DISK) else {},
        )


#: The tier of an instance's host memory; every other tier of its own is on its disk.
HOST_TIER = "l1"
#: Largest answer of the coordinator, in bytes: a base, and an amount for each key. Real ones repeat the tokens, 2 KB a
#: key, and take 140 bytes for each placement.
BASE_BYTES, KEY_BYTES = 1024 * 1024, 16 * 1024


# A long prompt's answer has tens of thousands of these and no cycles, so the garbage collector need not track them.
class _Placement(msgspec.Struct, gc=False):
    instance_id: InstanceId
    tier: str
    shared: bool = False


class _Key(msgspec.Struct, gc=False):
    chunk_hash_hex: str


class _Result(msgspec.Struct, gc=False):
    key: _Key
    placements: list[_Placement]


class _Directory(msgspec.Struct, gc=False):
    chunks: int
    results: list[_Result]


_DIRECTORY = msgspec.json.Decoder(_Directory)


class Coordinator:
    """LMCache's coordinator (`lmcache coordinator`, multi-process mode, 0.5.3 on): `POST /directory/lookup`.

    It names every instance and tier for every chunk, so each instance's prefix is exact: its chunks from the first one
    to the first gap.

    Args:
        chunk_size: tokens per chunk, as the servers are configured.
        world_size: tensor-parallel ranks of an engine; each holds its own part of every chunk.
    """

    path = "/directory/lookup"
    knows_salts = True

    def __init__(self, chunk_size: int, world_size: int) -> None:
        self._chunk_size = chunk_size
        self._world_size = world_size

    def body(self, question: LmcacheQuestion) -> bytes:
        """Return the request body for *question*."""
        return orjson.dumps(
            {
                "token_ids": question.tokens.tolist(),
                "model_name": question.model,
                "world_size": self._world_size,
                "cache_salt": question.salt,
            }
        )

    def largest(self, question: LmcacheQuestion) -> int:
        """Return the size of the largest plausible answer, in bytes."""
        return BASE_BYTES + len(question.tokens) // self._chunk_size * self._world_size * KEY_BYTES

    def read(self, body: bytes, question: LmcacheQuestion) -> LmcacheHits:
        """Decode the answer *body*; see `LookupService.read`."""
        try:
            answer = _DIRECTORY.decode(body)
        except UNREADABLE as error:
            raise UnreadableError("the answer is no directory listing") from error
        asked = len(question.tokens) // self._chunk_size
        if answer.chunks != asked:
            raise UnreadableError(
                f"{len(question.tokens)} tokens were cut into {answer.chunks} chunks, not {asked}: "
                f"lmcache.chunk_size is {self._chunk_size} here; set it to the servers' chunk size"
            )
        ranks, rest = divmod(len(answer.results), asked)
        if rest or ranks < self._world_size:
            raise UnreadableError(
                f"{len(answer.results)} keys for {asked} chunks and lmcache.world_size {self._world_size}"
            )
        chunks = [answer.results[at : at + ranks] for at in range(0, len(answer.results), ranks)]
        for chunk in chunks:
            if any(result.key.chunk_hash_hex != chunk[0].key.chunk_hash_hex for result in chunk):
                raise UnreadableError(f"the {ranks} keys of a chunk are not adjacent")
        shared = 0
        for chunk in chunks:
            if not all(any(p.shared for p in result.placements) for result in chunk):
                break
            shared += 1
        return LmcacheHits(
            host=self._prefixes(chunks, host_only=True),
            own=self._prefixes(chunks, host_only=False),
            shared=shared * self._chunk_size or None,
        )

    def _prefixes(self, chunks: Sequence[Sequence[_Result]], *, host_only: bool) -> dict[str, int]:
        """Return the tokens of each instance's prefix in its own tiers; all ranks' parts must be held."""
        lengths: dict[str, int] = {}
        following: set[str] | None = None
        for number, ranks in enumerate(chunks, 1):
            holders = set.intersection(
                *(
                    {p.instance_id for p in rank.placements if not p.shared and (not host_only or p.tier == HOST_TIER)}
                    for rank in ranks
                )
            )
            following = holders if following is None else following & holders
            if not following:
                break
            for id in following:
                lengths[id] = number * self._chunk_size
        return lengths

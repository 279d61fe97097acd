"""Client of LMCache's lookup services."""

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

# What one answer of an LMCache lookup service says: how long a prefix of the prompt each LMCache instance holds.
#
# How the two services put it is in `lmcache_coordinator` and `lmcache_controller`.

#: Most tokens in one question; the coordinator refuses more than a million.
MAX_TOKENS = 1_000_000
#: LMCache's id of an instance, in an answer: no longer than it may be in the settings, since answers are remembered.
InstanceId: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that is looked up.

    Args:
        tokens: its leading ids, an array of unsigned 32-bit integers, whole chunks only: the rest is never held.
        model: the model as LMCache's keys name it.
        salt: its cache salt, empty for none.
    """

    tokens: array[int] = field(repr=False)
    model: str
    salt: str


@dataclass(frozen=True, slots=True)
class Holdings:
    """Lengths in tokens, from the prompt's first token on, by LMCache's instance id.

    All lengths are above 0. An instance that is not named is unknown, not empty: a service that has lost its
    directory, or hashes otherwise than the engines, answers in the same way.

    Args:
        host: held in the instance's own host memory.
        own: held by the instance itself, in host memory or on its disk.
        shared: held in a store that every instance can fetch from; None where there is no such thing.
        likely: held in the instance's host memory if the likeliest reading of an ambiguous answer is right.
    """

    host: Mapping[str, int] = field(default_factory=dict)
    own: Mapping[str, int] = field(default_factory=dict)
    shared: int | None = None
    likely: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many lengths it keeps, and one for itself."""
        return 1 + len(self.host) + len(self.own) + len(self.likely)


#: Nothing is known.
NOTHING = Holdings()


class UnreadableError(Exception):
    """An answer that makes no sense; the message says why, with numbers only and nothing of what was answered."""


# Asks one LMCache lookup service a question: its connections, its breaker, and what came of it.
#
# The deadline is the router's: a question that is cancelled ends its request at once. What the questions and answers
# look like is in `lmcache_coordinator` and `lmcache_controller`, what is asked for and what of it is remembered in
# `lmcache_lookup`.

#: Prompts above this many tokens are encoded, and their answers read, in a thread.
INLINE_TOKENS = 8192
#: Largest answer that is read, bytes, whatever the question.
MAX_ANSWER_BYTES = 32 * 1024 * 1024
#: Most connections to the service.
MAX_CONNECTIONS = 64

log = structlog.get_logger("smetric.sources.lmcache")

T = TypeVar("T")


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


class Client:
    """Asks *service* at *url*; failure of any kind is an answer that says nothing.

    Args:
        service: what kind of service it is.
        url: its base URL.
        breaker: spares a service that fails, and requests the wait for it.
        on_late: called when a question is cancelled and the service has had half of its time or more.
        on_breaker: called when the service begins to count as failing (True) or as well again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        service: Service,
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
        """Open the pool of connections."""
        self._session = PlainSession(resolve, timeout_s=None, most_to_one=MAX_CONNECTIONS)

    async def stop(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, question: Question, deadline_s: float) -> tuple[str, Holdings]:
        """The result, one of `names.LOOKUP_RESULTS`, and what the answer says; one request to the service or none.

        Args:
            question: whose prompt has a chunk at least.
            deadline_s: seconds until it is cancelled.
        """
        breaker = self._breaker
        if self._session is None or not breaker.allows():
            return names.LOOKUP_SUSPENDED, NOTHING
        reason = ""
        started = self._clock()
        long = len(question.tokens) > INLINE_TOKENS
        try:
            body = await _call(long, self.service.body, question)
            status, answer = await self._post(body, min(self.service.largest(question), MAX_ANSWER_BYTES))
            if status == 200:
                holdings = await _call(long, self.service.read, answer, question)
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
                self._on_late()
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
        # From a file it goes out piece by piece, and other requests are served in between.
        async with self._session.http.post(
            self._url, data=io.BytesIO(body), headers={"Content-Type": "application/json"}, allow_redirects=False
        ) as response:
            if response.status != 200:
                return response.status, b""
            if not is_plain(response):
                raise UnreadableError("the answer is encoded though nothing but plain JSON was asked for")
            if (answer := await read_within(response, largest)) is None:
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


async def _call(in_thread: bool, function: Callable[..., T], *arguments: object) -> T:
    """*function* of *arguments*, in a thread or here."""
    return await asyncio.to_thread(function, *arguments) if in_thread else function(*arguments)


# LMCache's controller (`lmcache_controller`, in-process mode): `POST /lookup`.
#
# For every chunk it names one instance only, the one among its holders that registered first, and of that instance only
# where its last such chunk ends. So:
#
# - One instance named: it holds every chunk up to there, and nobody holds the next one. That is exact for it. Others
# may
#   hold any part of the same; they are unknown.
# - Several named: the chunks are split among them in a way that is not told. An instance may be named for a chunk in
# the
#   middle without holding the beginning, so no length is certain. The instance whose chunks reach furthest most
# probably
#   holds everything before them too, since an engine stores a prompt's chunks together (sessions that share a system
#   prompt look like this: its chunks are credited to whoever registered first). It is given as `likely`; the others are
#   unknown.
# - Nobody named: unknown. A controller that hashes otherwise than the engines answers like this for ever.
#
# Keys carry no model, adapter or salt: a salted prompt is not asked for. With tensor parallelism one rank's chunks
# count as the instance's.

#: Where an instance keeps chunks of its own: in host memory, on its disk.
HOST, DISK = "LocalCPUBackend", "LocalDiskBackend"
#: Bytes an answer may have; an instance takes about 50.
MAX_BYTES = 1024 * 1024

_Length = Annotated[int, msgspec.Meta(gt=0)]


class _Answer(msgspec.Struct):
    layout_info: dict[InstanceId, tuple[str, _Length]]


_ANSWER = msgspec.json.Decoder(_Answer)


class Controller:
    """Asks the controller."""

    path = "/lookup"
    #: A salted prompt would be found under the same key as any other.
    knows_salts = False

    def body(self, question: Question) -> bytes:
        """The request body for *question*."""
        return orjson.dumps({"tokens": question.tokens.tolist()})

    def largest(self, question: Question) -> int:
        """Bytes of the largest answer that makes sense."""
        return MAX_BYTES

    def read(self, body: bytes, question: Question) -> Holdings:
        """What the answer *body* says.

        Raises:
            UnreadableError: it is no answer to *question*.
        """
        try:
            layout = _ANSWER.decode(body).layout_info
        except UNREADABLE as error:
            raise UnreadableError("the answer is no layout") from error
        if not layout:
            return NOTHING
        furthest, (place, length) = max(layout.items(), key=lambda item: item[1][1])
        if length > len(question.tokens):
            raise UnreadableError(f"{len(question.tokens)} tokens were asked for and {length} are said to be held")
        if len(layout) > 1:
            # Two cannot own the last chunk; if they do, nothing can be read from this.
            alone = sum(end == length for _, end in layout.values()) == 1
            return Holdings(likely={furthest: length}) if alone and place == HOST else NOTHING
        return Holdings(
            host={furthest: length} if place == HOST else {},
            own={furthest: length} if place in (HOST, DISK) else {},
        )


# LMCache's coordinator (`lmcache coordinator`, multi-process mode, 0.5.3 on): `POST /directory/lookup`.
#
# It names every instance and tier for every chunk, so each instance's prefix is exact: its chunks from the first one to
# the first gap.

#: The tier in an instance's host memory; every other tier of its own lies on its disk.
HOST_TIER = "l1"
#: Bytes an answer may have: whatever the question, and for each key. Real ones repeat the tokens, 2 KB a key, and take
#: 140 bytes for each placement.
BASE_BYTES, KEY_BYTES = 1024 * 1024, 16 * 1024


# An answer for a long prompt has tens of thousands of these, none in a cycle: the collector need not look at them.
class _Placement(msgspec.Struct, gc=False):
    instance_id: InstanceId
    tier: str
    shared: bool = False


class _Key(msgspec.Struct, gc=False):
    chunk_hash_hex: str


class _Result(msgspec.Struct, gc=False):
    key: _Key
    placements: list[_Placement]


class _CoordinatorAnswer(msgspec.Struct, gc=False):
    chunks: int
    results: list[_Result]


_COORDINATOR_ANSWER = msgspec.json.Decoder(_CoordinatorAnswer)


class Coordinator:
    """Asks the coordinator's directory.

    Args:
        chunk_size: tokens of a chunk, as the servers are started.
        world_size: tensor-parallel ranks of an engine; each holds its own part of every chunk.
    """

    path = "/directory/lookup"
    #: A salt is part of the keys.
    knows_salts = True

    def __init__(self, chunk_size: int, world_size: int) -> None:
        self._chunk_size = chunk_size
        self._world_size = world_size

    def body(self, question: Question) -> bytes:
        """The request body for *question*."""
        return orjson.dumps(
            {
                "token_ids": question.tokens.tolist(),
                "model_name": question.model,
                "world_size": self._world_size,
                "cache_salt": question.salt,
            }
        )

    def largest(self, question: Question) -> int:
        """Bytes of the largest answer that makes sense."""
        return BASE_BYTES + len(question.tokens) // self._chunk_size * self._world_size * KEY_BYTES

    def read(self, body: bytes, question: Question) -> Holdings:
        """What the answer *body* says.

        Raises:
            UnreadableError: it is no answer to *question*.
        """
        try:
            answer = _COORDINATOR_ANSWER.decode(body)
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
                raise UnreadableError(f"the {ranks} keys of a chunk do not stand together")
        return self._walk(chunks)

    def _walk(self, chunks: Sequence[Sequence[_Result]]) -> Holdings:
        """Follow every instance from the first chunk to its first gap. A chunk is held if all its ranks' parts are."""
        host, own, shared = _Prefixes(), _Prefixes(), 0
        for number, ranks in enumerate(chunks):
            host.follow(
                number, [{p.instance_id for p in r.placements if p.tier == HOST_TIER and not p.shared} for r in ranks]
            )
            own.follow(number, [{p.instance_id for p in r.placements if not p.shared} for r in ranks])
            if shared == number and all(any(p.shared for p in r.placements) for r in ranks):
                shared += 1
            elif not own.following:
                break
        size = self._chunk_size
        return Holdings(
            host={id: chunks * size for id, chunks in host.lengths.items()},
            own={id: chunks * size for id, chunks in own.lengths.items()},
            shared=shared * size or None,
        )


class _Prefixes:
    """How many leading chunks each holder has, while a prompt is walked along."""

    __slots__ = ("following", "lengths")

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        #: Those that have held every chunk so far.
        self.following: set[str] = set()

    def follow(self, number: int, holders: Sequence[set[str]]) -> None:
        """The chunk *number*, counted from 0, has these holders, one set for each rank."""
        here = set.intersection(*holders)
        self.following = here if number == 0 else self.following & here
        for id in self.following:
            self.lengths[id] = number + 1

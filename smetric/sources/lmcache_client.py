"""Asks one LMCache lookup service a question: its connections, its breaker, and what came of it.

The deadline is the router's: a question that is cancelled ends its request at once. What the questions and answers look
like is in `lmcache_coordinator` and `lmcache_controller`, what is asked for and what of it is remembered in
`lmcache_lookup`.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import aiohttp
import structlog

from smetric.sources.addresses import resolve
from smetric.sources.answer_body import is_plain, read_within
from smetric.sources.breaker import Breaker
from smetric.sources.lmcache_holdings import NOTHING, Holdings, Question, UnreadableError
from smetric.sources.plain_session import PlainSession
from smetric.telemetry import names

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

"""Small, bounded HTTP exchanges with engines, lookup services and other routers. What answers mean is not here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from smetric.config.credential import Credential
from smetric.sources.answer_body import is_plain, read_within

#: Largest answer that is read, bytes.
MAX_BYTES = 8 * 1024 * 1024


def reason_of(error: OSError) -> str:
    """Why there is no connection, in the system's words: connection refused, no route to host, …"""
    return os.strerror(error.errno).lower() if error.errno else "no connection"


class NoAnswer(Exception):
    """There was no answer that could be read; the message says why: refused, no answer in 2 s, …"""


class TooLong(NoAnswer):
    """The answer has more bytes than were wanted."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and when it came in seconds since the epoch; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    came_at: float

    @property
    def clock_ahead_s(self) -> float | None:
        """Seconds by which the clock of whoever answered is ahead of ours; None where it does not say."""
        try:
            return parsedate_to_datetime(self.headers["date"]).timestamp() - self.came_at
        except (KeyError, ValueError, OverflowError):
            return None


class Wire:
    """Asks; open while it is entered.

    Args:
        keys: by the base URL that they are shown to, and to no other.
    """

    def __init__(self, keys: Mapping[str, Credential] | None = None) -> None:
        self._keys = keys or {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=256, force_close=True),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding",),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(
        self,
        url: str,
        *,
        within_s: float,
        headers: Mapping[str, str] | None = None,
        verifies: bool = True,
        most: int = MAX_BYTES,
    ) -> Answer:
        """What `GET` gives, up to *most* bytes; who answers at an https *url* has to prove who it is if it *verifies*.

        Raises:
            NoAnswer: nothing, within *within_s* seconds.
        """
        return await self._ask("GET", url, within_s, headers or {}, None, verifies, most)

    async def post(self, url: str, body: bytes, *, within_s: float) -> Answer:
        """What `POST` of the JSON *body* gives.

        Raises:
            NoAnswer: nothing, within *within_s* seconds.
        """
        return await self._ask("POST", url, within_s, {"Content-Type": "application/json"}, body)

    async def _ask(
        self,
        method: str,
        url: str,
        within_s: float,
        headers: Mapping[str, str],
        body: bytes | None,
        verifies: bool = True,
        most: int = MAX_BYTES,
    ) -> Answer:
        assert self._session is not None, "enter it first"
        parts = urlsplit(url)
        key = self._keys.get(f"{parts.scheme}://{parts.netloc}")
        if key is not None:
            headers = {"Authorization": f"Bearer {key.text}", **headers}
        try:
            async with self._session.request(
                method,
                url,
                data=body,
                headers=headers,
                allow_redirects=False,
                ssl=verifies,
                timeout=aiohttp.ClientTimeout(total=within_s),
            ) as response:
                if not is_plain(response):
                    # the router does not read it either
                    raise NoAnswer("an answer that is compressed, which was not asked for")
                if (answer := await read_within(response, most)) is None:
                    raise TooLong(f"an answer of more than {most} bytes")
                found = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, found, bytes(answer), time.time())
        except TimeoutError:
            raise NoAnswer(f"no answer in {within_s:g} s") from None
        except aiohttp.ClientConnectorDNSError:
            raise NoAnswer("the host name is unknown") from None
        except aiohttp.ClientConnectorError as error:
            raise NoAnswer(reason_of(error.os_error)) from None
        except aiohttp.ServerDisconnectedError:
            raise NoAnswer("the connection was closed without an answer") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"an answer that is no HTTP ({type(error).__name__})") from None

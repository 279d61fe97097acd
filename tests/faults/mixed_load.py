"""Mixed clients: most are served; others disconnect, send invalid requests or meet failing engines."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from tests.fakes import DONE, Call, RawClient, chunk, delta, head, healthy, request

#: Of a hundred requests: served, left, wrong; the rest meets an engine that fails.
SERVED, LEFT, WRONG = 70, 10, 10
FAULTS = ("close", "reset", "garbage", "busy", "broken", "cut", "torn", "endless")
#: Words of a prompt: some KiB of text that never repeats, so that every bounded store fills up.
WORDS = 400


async def obedient(call: Call) -> None:
    """An engine that fails as the request asks it to."""
    fault = next((name for name in FAULTS if b'"fault":"%b"' % name.encode() in call.body), "")
    events = head(200, (b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked"))
    match fault:
        case "close":
            call.close()
        case "reset":
            call.reset()
        case "garbage":
            await call.send(b"\x00 no HTTP\r\n\r\n")
            call.close()
        case "busy":
            await call.answer(503, b"{}", (b"retry-after", b"1"))
        case "broken":
            await call.answer(500, b'{"error":{}}')
        case "cut":
            await call.send(events + chunk(delta("a")))
            call.close()
        case "torn":
            await call.send(events + chunk(delta("a")))
            call.reset()
        case "endless":
            await call.send(events + chunk(delta("a")))
            await asyncio.Event().wait()
        case _:
            await healthy(call)


@dataclass
class Mix:
    """Requests against the router at *url*, from a seed.

    Args:
        url: its data port.
        seed: of everything random.
    """

    url: str
    seed: int
    #: How often each kind of request ended how: `served 200`, `left`, `wrong 400`, `cut 200 broken off`.
    ends: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._sent = 0

    async def send(self, count: int, at_once: int = 32) -> None:
        """Send *count* requests, *at_once* of them at a time."""
        last = self._sent + count

        async def client() -> None:
            kept: RawClient | None = None
            while self._sent < last:
                self._sent += 1
                kept = await self._one(kept)
            if kept is not None:
                kept.leave()

        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(client())

    async def _one(self, kept: RawClient | None) -> RawClient | None:
        """One request, over the connection *kept* where it may be; returns the connection if it can be kept."""
        kind = self._rng.randrange(100)
        if kind >= SERVED and kept is not None:
            kept.leave()
            kept = None
        client = kept or await RawClient.connect(self.url)
        try:
            if kind < SERVED:
                await client.send(self._body(stream=kind % 2 == 0))
                answer = await client.response()
                whole = answer.complete and (kind % 2 == 1 or answer.body.endswith(DONE))
                self.ends[f"served {answer.status}{'' if whole else ' broken off'}"] += 1
                if whole and self._rng.random() < 0.8:
                    return client
            elif kind < SERVED + LEFT:
                await self._leave(client)
            elif kind < SERVED + LEFT + WRONG:
                name, raw = self._rng.choice(WRONGS)
                await client.send(raw())
                self.ends[f"{name} {(await client.response()).status}"] += 1
            else:
                await self._fail(client)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.ends["no answer"] += 1
        client.leave()
        return None

    async def _leave(self, client: RawClient) -> None:
        await client.send(self._body(stream=True, fault="endless"))
        if self._rng.random() < 0.5:
            await client.head()
        await asyncio.sleep(self._rng.random() * 0.01)
        client.reset() if self._rng.random() < 0.5 else client.leave()
        self.ends["left"] += 1

    async def _fail(self, client: RawClient) -> None:
        fault = self._rng.choice(FAULTS[:-1])
        await client.send(self._body(stream=True, fault=fault))
        answer = await client.response()
        self.ends[f"{fault} {answer.status}{'' if answer.complete else ' broken off'}"] += 1

    def _body(self, *, stream: bool, fault: str = "") -> bytes:
        content = " ".join(f"{self._rng.getrandbits(40):x}" for _ in range(WORDS))
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "stream": stream, "fault": fault}
        return request("POST", "/v1/chat/completions", orjson.dumps(body))


def _raw(head: str, body: bytes = b"") -> Callable[[], bytes]:
    raw = head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body
    return lambda: raw


WRONGS: tuple[tuple[str, Callable[[], bytes]], ...] = (
    ("no JSON", lambda: request("POST", "/v1/chat/completions", b"{")),
    ("no model", lambda: request("POST", "/v1/chat/completions", b'{"messages":[]}')),
    ("another model", lambda: request("POST", "/v1/chat/completions", b'{"model":"none","messages":[]}')),
    ("no such path", lambda: request("GET", "/v1/nothing")),
    ("two framings", _raw("POST /v1/x HTTP/1.1\nHost: x\nContent-Length: 5\nTransfer-Encoding: chunked", b"0\r\n\r\n")),
    ("too long a head", _raw(f"GET /v1/models HTTP/1.1\nHost: x\nX: {'a' * 70_000}")),
    ("too large a body", _raw("POST /v1/chat/completions HTTP/1.1\nHost: x\nContent-Length: 99999999999")),
    ("no HTTP", _raw("\x16\x03\x01")),
)

"""Row A12: generated requests, read by the router as by the engine's own server."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from smetric.config.settings import InstanceSettings
from smetric.http.headers import Receive, Scope, Send
from smetric.http.listener import address_of, listen
from tests.fakes import CHAT_ANSWER, DONE, METRICS, MODELS, RawClient, delta, until
from tests.faults.corpus import corpus
from tests.faults.generated import body_of, generated, sentinel
from tests.faults.harness import Running, Tell, running

SEED = 20
#: Connections at a time, and seconds of silence of which two mean that a server waits for more.
AT_ONCE = 25
SILENCE_S = 0.08


@dataclass
class Engine:
    """An engine as vLLM is one: an ASGI app under uvicorn and httptools, which notes what it is asked."""

    url: str = ""
    #: Bodies of the requests that its app and its server read to the end, in order.
    bodies: list[bytes] = field(default_factory=list)
    read: list[bytes] = field(default_factory=list)

    def protocol(self) -> type[HttpToolsProtocol]:
        """Server that records each request read to its end."""
        read = self.read

        class Noting(HttpToolsProtocol):
            def on_message_begin(self) -> None:
                super().on_message_begin()
                self.noted = b""

            def on_body(self, body: bytes) -> None:
                super().on_body(body)
                self.noted += body

            def on_message_complete(self) -> None:
                super().on_message_complete()
                read.append(self.noted)

        return Noting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        pages = {"/health": b"", "/metrics": METRICS, "/v1/models": MODELS}
        kind, answer = b"application/json", pages.get(scope["path"], CHAT_ANSWER)
        if scope["path"] == "/metrics":
            kind = b"text/plain; version=0.0.4"
        elif scope["path"] not in pages:
            self.bodies.append(body)
            if b'"stream":true' in body:
                kind, answer = b"text/event-stream", delta("ok") + DONE
        fields = [(b"content-type", kind), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": answer})


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    app = Engine()
    sock = listen("127.0.0.1", 0)
    app.url = address_of(sock)
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, log_level="critical", http=app.protocol(), lifespan="off")
    )
    served = asyncio.create_task(server.serve([sock]))
    try:
        yield app
    finally:
        server.should_exit = True
        async with asyncio.timeout(10):
            await served


async def said(url: str, raw: bytes, rng: random.Random, is_patient: Callable[[], bool]) -> tuple[bytes, bool]:
    """Send *raw* in one to three pieces; what comes back until silence, and whether the server closed.

    Silence does not count while *is_patient*.
    """
    cuts = sorted(rng.randrange(len(raw)) for _ in range(rng.choice((0, 0, 1, 2))))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    heard = b""
    async with await RawClient.connect(url) as client:
        try:
            for piece in pieces:
                if client.writer.transport.is_closing():
                    break  # it has heard enough
                client.writer.write(piece)
                await asyncio.sleep(0.002 if len(pieces) > 1 else 0)
            clock = asyncio.get_running_loop().time
            began, silences = clock(), 0
            while True:
                asked = clock()
                try:
                    async with asyncio.timeout(SILENCE_S):
                        data = await client.reader.read(65536)
                except TimeoutError:
                    # A loop that is late itself has not listened; and one silence may fall between two steps.
                    is_silent = clock() - asked < 2 * SILENCE_S and not is_patient()
                    silences = silences + 1 if is_silent else 0
                    if silences == 2 or clock() - began > 5.0:
                        return heard, False
                    continue
                if not data:
                    return heard, True
                heard += data
        except ConnectionError:
            return heard, True


def answers(heard: bytes) -> list[tuple[int, bool]]:
    """Status of each answer, and whether the request was sent to an engine; fails on what is no HTTP/1.1."""
    found = []
    while heard:
        head, end, rest = heard.partition(b"\r\n\r\n")
        assert end, head[-200:]
        line, *lines = head.decode("latin-1").split("\r\n")
        version, status = line.split(" ")[:2]
        assert version == "HTTP/1.1", line
        fields = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
        if status == "100":
            heard = rest
            continue
        size = int(fields["content-length"])
        assert len(rest) >= size
        found.append((int(status), "x-smetric-instance" in fields))
        heard = rest[size:]
    return found


async def compare(router: Running, behind: Engine, beside: Engine, inputs: Mapping[str, bytes]) -> int:
    """Send the inputs to the router and to an engine; returns how many answers were 2xx."""
    counted = 0

    async def one(name: str, raw: bytes) -> None:
        nonlocal counted
        last = body_of(f"{name}.last")

        def is_read() -> bool:
            return last in beside.read

        def is_expected() -> bool:
            return is_read() or router.counted()[0] > 0

        (heard, is_closed), _ = await asyncio.gather(
            said(router.url, raw, random.Random(name), is_expected),
            said(beside.url, raw, random.Random(name), lambda: False),
        )
        seen = answers(heard)
        assert not any(status >= 500 and status not in (501, 505) for status, _ in seen), (name, seen)
        assert seen or is_closed or not is_read(), f"input {name}: no answer to what an engine has read"
        counted += sum(passed and status < 300 for status, passed in seen)

    before = len(behind.bodies)
    begun = len(beside.read)
    await asyncio.gather(*(one(name, raw) for name, raw in inputs.items()))
    passed = behind.bodies[before:]
    assert len(passed) == counted, (
        f"inputs {list(inputs)}: {counted} answers of an engine that was asked {len(passed)} times"
    )
    passed_on = Counter(passed)
    try:
        await until(lambda: passed_on <= Counter(beside.read[begun:]))
    except AssertionError:
        other = passed_on - Counter(beside.read[begun:])
        raise AssertionError(
            f"inputs {list(inputs)}: passed on, but an engine reads otherwise: {list(other)}"
        ) from None
    return counted


async def try_inputs(inputs: Mapping[str, bytes]) -> tuple[int, int]:
    """Try all inputs; how many requests were passed on, and how many an engine read by itself."""
    async with engine() as behind, engine() as beside:
        instances = (InstanceSettings(url=behind.url, id="e0"),)
        async with running(instances=instances, within_s=60.0 + len(inputs) / 20) as router:
            passed = 0
            rest = iter(inputs.items())
            while some := dict(itertools.islice(rest, AT_ONCE)):
                passed += await compare(router, behind, beside, some)
                read = len(beside.read)
            assert not any('"level":"error"' in line for line in router.logged().splitlines())
    return passed, read


def generate(count: int) -> dict[str, bytes]:
    return {str(number): generated(SEED, number) for number in range(count)}


async def test_corpus_of_ambiguous_requests_reads_as_an_engine_does(record_property: Tell) -> None:
    inputs = corpus()
    assert len(inputs) >= 80
    passed, read = await try_inputs(inputs)
    assert 0 < passed <= read
    record_property("F8 by hand", f"{len(inputs)} by hand: 0, 0, 0")
    record_property("F9 by hand", f"0 in {len(inputs)} by hand")


def test_generator_is_reproducible_with_whole_sentinels() -> None:
    assert [generated(SEED, n) for n in range(50)] == [generated(SEED, n) for n in range(50)]
    assert all(generated(SEED, n).endswith(sentinel(f"{n}.last")) for n in range(50))
    assert len({generated(SEED, n) for n in range(200)}) == 200


def tell(record: Tell, inputs: int, passed: int) -> None:
    record("F8", f"{inputs:,} generated: 0, 0, 0")
    record("F9", f"0 in {inputs:,} generated, of which {passed:,} requests came through")


@pytest.mark.slow
async def test_a12_thousand_generated_requests_read_as_an_engine_does(record_property: Tell) -> None:
    passed, read = await try_inputs(generate(1_000))
    assert 300 < passed <= read
    tell(record_property, 1_000, passed)


@pytest.mark.soak
async def test_a12_twenty_thousand_requests_read_as_an_engine_does(record_property: Tell) -> None:
    passed, read = await try_inputs(generate(20_000))
    assert 6_000 < passed <= read
    tell(record_property, 20_000, passed)

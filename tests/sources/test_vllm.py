"""Polling instances: load, restarts, models, against servers that misbehave."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from smetric.fleet.instance import Instance
from smetric.http import addresses
from smetric.sources.vllm import MAX_PAGE_BYTES, Scraper
from tests.clock import Clock
from tests.resolver import Resolver

CAPTURE = Path(__file__).parents[1] / "data" / "vllm" / "metrics_load.http"
Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def ok(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n%b\r\n" % (len(body), extra) + body


def page(running: float = 1, waiting: float = 0, generated: float = 0, started: float = 1000, more: str = "") -> bytes:
    return ok(
        f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
        f"vllm:generation_tokens_total {generated}\nprocess_start_time_seconds {started}\n{more}".encode()
    )


def models(*names: str) -> bytes:
    return ok(json.dumps({"object": "list", "data": [{"id": name, "parent": None} for name in names]}).encode())


class Engine:
    """Answers each path with given bytes, or with whatever a coroutine writes."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {"/metrics": page(), "/v1/models": models("m")}
        self.asked: list[str] = []
        self.heads: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            self.heads.append(head)
            answer = self.answers[path]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


class Bench:
    """One instance in front of one engine, and what the source reported."""

    def __init__(self, instance: Instance, engine: Engine, timeout_s: float) -> None:
        self.instance, self.engine, self.clock = instance, engine, Clock(100.0)
        self.restarts: list[int] = []
        self.results: list[str] = []
        self.source = Scraper(
            [instance],
            interval_s=3600,
            timeout_s=timeout_s,
            on_restart=lambda restarted: self.restarts.append(restarted.incarnation),
            on_scrape=lambda _, result, seconds: self.results.append(result),
            clock=self.clock,
        )

    def models(self) -> set[str]:
        return set(self.instance.models or ())

    async def scrape(self, answer: Answer | None = None) -> str:
        """A second later, one scrape, answered with *answer* from now on."""
        if answer is not None:
            self.engine.answers["/metrics"] = answer
        self.clock.now += 1
        return await self.source.scrape(self.instance)


@asynccontextmanager
async def bench(
    *, timeout_s: float = 2.0, models: list[str] | None = None, first: bytes | None = None
) -> AsyncIterator[Bench]:
    engine = Engine()
    engine.answers["/metrics"] = first or page()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    one = Bench(Instance("a", f"http://127.0.0.1:{port}", models=models), engine, timeout_s)
    await one.source.start()
    for _ in range(2000):
        if one.results and one.instance.models is not None:
            break
        await asyncio.sleep(0.001)
    try:
        yield one
    finally:
        await one.source.stop()
        server.close()
        await server.wait_closed()


# ── what a good page does ────────────────────────────────────────────────────


async def test_a_real_page_becomes_a_scrape_and_a_cache_configuration() -> None:
    async with bench() as one:
        body = CAPTURE.read_bytes().split(b"===== RESPONSE =====", 1)[1].split(b"\r\n\r\n", 1)[1]
        one.instance.own = 7
        assert await one.scrape(ok(body)) == "ok"
        scrape = one.instance.scrape
        assert scrape is not None
        assert (scrape.running, scrape.waiting, scrape.own, scrape.measured_at) == (4, 6, 7, one.clock.now)
        assert one.instance.requests() == 10
        assert one.instance.cache.capacity_tokens == 32 * 200
        assert one.instance.cache.prefix_caching is True


async def test_own_requests_and_time_are_those_of_when_the_scrape_was_sent() -> None:
    async with bench() as one:
        one.instance.own = 2

        async def later(writer: asyncio.StreamWriter) -> None:
            one.instance.own = 5
            one.clock.now += 1.5
            writer.write(page(running=2))

        before = one.clock.now + 1
        await one.scrape(later)
        assert one.instance.scrape is not None
        assert (one.instance.scrape.own, one.instance.scrape.measured_at) == (2, before)
        assert one.instance.requests() == 5


async def test_no_compression_is_asked_for() -> None:
    async with bench() as one:
        assert all(b"accept-encoding" not in head.lower() for head in one.engine.heads)


# ── faults ───────────────────────────────────────────────────────────────────


async def _large(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    for _ in range(10):
        writer.write(b"x 1\n" * (MAX_PAGE_BYTES // 16))
        await writer.drain()


GOOD = b"vllm:num_requests_running 9\nvllm:num_requests_waiting 9\n"


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "http_error"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "http_error"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "http_error"),
        (_large, "bad_page"),
        (ok(b"<html>" * 100), "bad_page"),
        (ok(b""), "bad_page"),
        (ok(b"other_metric 1\n"), "bad_page"),
        (ok(gzip.compress(GOOD), b"Content-Encoding: gzip\r\n"), "bad_page"),
        (ok(gzip.compress(GOOD)), "bad_page"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + GOOD, "bad_page"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + GOOD, "bad_page"),
        (b"this is not HTTP\r\n\r\n", "bad_page"),
        (ok(b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 1\n"), "bad_page"),
        (ok(b"vllm:num_requests_running 1\nvllm:num_requests_waiting -1\n"), "bad_page"),
        (ok(b"vllm:num_requests_running 1\n"), "bad_page"),
        (ok(b"vllm:num_requests_renamed 1\nvllm:num_requests_waiting 1\n"), "bad_page"),
        (b"", "connect_error"),
    ],
)
async def test_a_page_that_cannot_be_used_is_counted_and_leaves_the_last_values_to_grow_old(
    answer: Answer, result: str
) -> None:
    async with bench() as one:
        assert await one.scrape(page(running=3, waiting=2)) == "ok"
        before = one.instance.scrape
        assert await one.scrape(answer) == result
        assert one.results[-1] == result
        assert one.instance.scrape is before
        assert one.restarts == []


async def test_an_insane_usage_is_unknown_and_the_rest_is_taken() -> None:
    async with bench() as one:
        assert await one.scrape(page(running=3, more="vllm:kv_cache_usage_perc -1\n")) == "bad_page"
        assert one.instance.scrape is not None
        assert (one.instance.scrape.running, one.instance.scrape.kv_usage) == (3, None)


async def test_a_page_is_had_from_the_last_good_address_while_the_name_cannot_be_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    resolver = Resolver("127.0.0.2", "127.0.0.1")  # nobody is at the first
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    instance = Instance("a", f"http://engine.test:{server.sockets[0].getsockname()[1]}", models=["m"])
    source = Scraper(
        [instance], interval_s=3600, on_restart=lambda _: None, on_scrape=lambda *_: None, resolve=resolver
    )
    await source.start()
    await source.first_look(5)
    assert instance.scrape is not None
    resolver.found = ()
    assert await source.scrape(instance) == "ok"
    await source.stop()
    server.close()
    await server.wait_closed()


async def test_one_that_hangs_times_out_and_delays_no_other() -> None:
    hanging, answering = Engine(), Engine()
    release = asyncio.Event()

    async def hang(writer: asyncio.StreamWriter) -> None:
        await release.wait()

    hanging.answers["/metrics"] = hang
    servers = [await asyncio.start_server(engine.serve, "127.0.0.1", 0) for engine in (hanging, answering)]
    urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    results: dict[str, list[str]] = {"hanging": [], "answering": []}
    fleet = [Instance(name, url, models=["m"]) for name, url in zip(results, urls, strict=True)]
    enough = asyncio.Event()

    def on_scrape(instance: Instance, result: str, seconds: float) -> None:
        results[instance.id].append(result)
        if len(results["hanging"]) >= 2:
            enough.set()

    source = Scraper(fleet, interval_s=0.02, timeout_s=0.2, on_restart=lambda _: None, on_scrape=on_scrape)
    await source.start()
    async with asyncio.timeout(5):
        await enough.wait()
    await source.stop()
    release.set()
    for server in servers:
        server.close()
        await server.wait_closed()
    assert set(results["hanging"]) == {"timeout"}
    assert set(results["answering"]) == {"ok"}
    assert len(results["answering"]) > 2 * len(results["hanging"])


async def test_a_failing_callback_does_not_end_the_polling() -> None:
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    instance = Instance("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", models=["m"])
    calls = 0
    thrice = asyncio.Event()

    def on_scrape(_: Instance, result: str, seconds: float) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            thrice.set()
        raise RuntimeError("a bug")

    source = Scraper([instance], interval_s=0.01, on_restart=lambda _: None, on_scrape=on_scrape)
    await source.start()
    async with asyncio.timeout(5):
        await thrice.wait()
    await source.stop()
    server.close()
    await server.wait_closed()


# ── frozen series ────────────────────────────────────────────────────────────


async def test_a_busy_engine_whose_series_stand_still_is_as_old_as_their_last_change() -> None:
    async with bench() as one:
        await one.scrape(page(running=4, generated=10))
        moved_at = one.clock.now
        one.instance.own = 9
        for _ in range(3):
            assert await one.scrape() == "ok"
        scrape = one.instance.scrape
        assert scrape is not None
        assert (scrape.measured_at, scrape.own) == (moved_at, 0)
        await one.scrape(page(running=4, generated=11))
        assert one.instance.scrape is not None
        assert one.instance.scrape.measured_at == one.clock.now


async def test_an_idle_engine_may_stand_still() -> None:
    async with bench() as one:
        await one.scrape(page(running=0, generated=10))
        await one.scrape()
        assert one.instance.scrape is not None
        assert one.instance.scrape.measured_at == one.clock.now


async def test_a_page_without_counters_is_taken_as_fresh() -> None:
    async with bench() as one:
        for _ in range(2):
            await one.scrape(ok(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n"))
        assert one.instance.scrape is not None
        assert one.instance.scrape.measured_at == one.clock.now


# ── restarts ─────────────────────────────────────────────────────────────────


async def test_another_start_time_is_another_incarnation() -> None:
    async with bench() as one:
        await one.scrape(page(generated=5, started=1000))
        await one.scrape(page(generated=50, started=2000))
        assert one.restarts == [1]
        assert one.instance.incarnation == 1
        await one.scrape(page(generated=60, started=2000))
        assert one.restarts == [1]


@pytest.mark.parametrize(("generated", "seen_empty"), [(0, True), (7, False)])
async def test_an_engine_that_had_computed_nothing_when_first_seen_was_seen_empty(
    generated: float, seen_empty: bool
) -> None:
    async with bench(first=page(generated=generated)) as one:
        await one.scrape(page(generated=9))
        assert (one.instance.seen_empty, one.instance.started_at) == (seen_empty, 1000)
        await one.scrape(page(generated=generated, started=2000))
        assert (one.instance.seen_empty, one.instance.started_at) == (seen_empty, 2000)


async def test_a_new_process_that_may_have_been_sent_a_request_before_it_was_seen_is_not_seen_empty() -> None:
    async with bench() as one:
        lease = one.instance.charge(1, 100)
        await one.scrape(page(started=2000))
        assert (lease.is_past, one.instance.seen_empty) == (True, False)


async def test_several_engines_at_one_address_do_not_fill_the_log() -> None:
    async with bench() as one:
        with structlog.testing.capture_logs() as logs:
            for nth in range(40):
                await one.scrape(page(started=1000 + 500 * nth) if nth % 3 else b"HTTP/1.1 500 x\r\n\r\n")
            assert len(one.restarts) > 20
            told = [line["event"] for line in logs]
            assert {event: told.count(event) for event in set(told)} == {
                "smetric.instance.restarted": 10,
                "smetric.scrape.changed": 10,
            }
            one.clock.now += 60
            await one.scrape(page(started=1000))
        kept_back = {line["event"]: line["kept_back"] for line in logs[20:]}
        assert kept_back["smetric.instance.restarted"] == len(one.restarts) - 11


async def test_the_first_look_is_over_when_each_was_asked_once_or_the_time_is_up() -> None:
    async with bench(first=b"nonsense") as one:
        await asyncio.wait_for(one.source.first_look(60), 1)
        fresh = Bench(Instance("b", "http://127.0.0.1:1"), one.engine, 1.0)
        await asyncio.wait_for(fresh.source.first_look(0.01), 1)


async def test_a_counter_that_falls_is_a_restart_where_no_start_time_is_given() -> None:
    async with bench() as one:
        text = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:prompt_tokens_total %d\n"
        await one.scrape(ok(text % 500))
        await one.scrape(ok(text % 700))
        assert one.restarts == []
        await one.scrape(ok(text % 20))
        assert one.restarts == [1]
        await one.scrape(ok(text % 30))
        assert one.restarts == [1]


async def test_a_restart_while_pages_fail_is_seen_with_the_next_good_one() -> None:
    async with bench() as one:
        await one.scrape(page(started=1000))
        await one.scrape(b"")
        await one.scrape(page(started=2000))
        assert one.restarts == [1]


# ── models ───────────────────────────────────────────────────────────────────


async def test_models_are_read_at_the_start_every_thirty_seconds_and_after_a_restart() -> None:
    async with bench() as one:
        assert one.models() == {"m"}
        one.engine.answers["/v1/models"] = models("m", "adapter")
        await one.scrape()
        assert one.models() == {"m"}
        one.clock.now += 30
        await one.scrape()
        assert one.models() == {"m", "adapter"}
        one.engine.answers["/v1/models"] = models("other")
        await one.scrape(page(started=2000))
        assert one.models() == {"other"}


async def test_models_with_a_parent_are_adapters() -> None:
    async with bench() as one:
        assert one.instance.adapters == frozenset()
        cards = [{"id": "m", "parent": None}, {"id": "fr", "parent": "m"}, {"id": "alias"}]
        one.engine.answers["/v1/models"] = ok(json.dumps({"object": "list", "data": cards}).encode())
        one.clock.now += 30
        await one.scrape()
        assert one.models() == {"m", "fr", "alias"}
        assert one.instance.adapters == {"fr"}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        ok(b"not json"),
        ok(b'{"data":[{"id":5}]}'),
        ok(b'{"data":"' + b"x" * 2_000_000 + b'"}'),
        ok(b'{"data":[],"more":' + b"[" * 9_000),
    ],
)
async def test_a_model_list_that_cannot_be_read_leaves_the_last_one(answer: bytes) -> None:
    async with bench() as one:
        one.engine.answers["/v1/models"] = answer
        one.clock.now += 60
        assert await one.scrape() == "ok"
        assert one.engine.asked[-1] == "/v1/models"
        assert one.models() == {"m"}


async def test_configured_models_are_never_asked_for() -> None:
    async with bench(models=["fixed"]) as one:
        one.clock.now += 60
        await one.scrape()
        assert set(one.engine.asked) == {"/metrics"}
        assert one.models() == {"fixed"}

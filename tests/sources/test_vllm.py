"""Scrapes and probes, against real captures and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import structlog
import trustme
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from smetric.config.settings import HealthSettings
from smetric.fleet.health import Health
from smetric.fleet.instance import Instance, PrefixTokens, State
from smetric.http import addresses
from smetric.sources import vllm
from smetric.sources.vllm import MAX_PAGE_BYTES, MAX_SERIES, Page, Prober, Scraper, next_turn, parse_page
from tests.clock import Clock
from tests.fakes import FakeEngine, capture, hang, until
from tests.resolver import Resolver

LOAD = b"vllm:num_requests_running 4.0\nvllm:num_requests_waiting 6.0\n"
Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def body_of(name: str) -> bytes:
    """The body of a captured response."""
    return capture(name)[1].partition(b"\r\n\r\n")[2]


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
    """Engine that answers each path with given bytes, or with those that a coroutine writes."""

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


@asynccontextmanager
async def served(*engines: Engine) -> AsyncIterator[list[str]]:
    """The URLs of *engines*."""
    async with AsyncExitStack() as stack:
        servers = [await asyncio.start_server(engine.serve, "127.0.0.1", 0) for engine in engines]
        for server in servers:
            await stack.enter_async_context(server)
        yield [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]


class Bench:
    """Instance in front of one engine, and the results that the scraper reported."""

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
    async with served(engine) as (url,):
        one = Bench(Instance("a", url, models=models), engine, timeout_s)
        await one.source.start()
        await until(lambda: bool(one.results) and one.instance.models is not None)
        try:
            yield one
        finally:
            await one.source.stop()


# ── good pages ────────────────────────────────────────────────────────────


async def test_scrape_of_a_real_page_sets_load_and_cache_configuration() -> None:
    async with bench() as one:
        one.instance.own = 7
        assert await one.scrape(ok(body_of("metrics_load"))) == "ok"
        scrape = one.instance.scrape
        assert scrape is not None
        assert (scrape.running, scrape.waiting, scrape.own, scrape.measured_at) == (4, 6, 7, one.clock.now)
        assert one.instance.requests() == 10
        assert one.instance.cache.capacity_tokens == 32 * 200
        assert one.instance.cache.prefix_caching is True
        assert all(b"accept-encoding" not in head.lower() for head in one.engine.heads)


async def test_scrape_records_own_requests_and_time_of_its_sending() -> None:
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
        (ok(gzip.compress(GOOD, mtime=0), b"Content-Encoding: gzip\r\n"), "bad_page"),
        (ok(gzip.compress(GOOD, mtime=0)), "bad_page"),
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
async def test_scrape_that_fails_is_counted_and_leaves_the_last_values(answer: Answer, result: str) -> None:
    async with bench() as one:
        assert await one.scrape(page(running=3, waiting=2)) == "ok"
        before = one.instance.scrape
        assert await one.scrape(answer) == result
        assert one.results[-1] == result
        assert one.instance.scrape is before
        assert one.restarts == []


async def test_scrape_with_invalid_usage_takes_the_rest() -> None:
    async with bench() as one:
        assert await one.scrape(page(running=3, more="vllm:kv_cache_usage_perc NaN\n")) == "ok"
        assert one.instance.scrape is not None
        assert (one.instance.scrape.running, one.instance.scrape.kv_usage) == (3, None)


@pytest.mark.parametrize(
    ("answer", "running"),
    [
        (ok(LOAD[:-1]), 4),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(LOAD) - 1, LOAD[:-1]), 4),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + LOAD[:-1], 1),
    ],
    ids=["length", "chunked", "may be truncated"],
)
async def test_last_line_without_a_line_feed_counts_if_the_page_is_whole(answer: bytes, running: float) -> None:
    async with bench() as one:
        assert await one.scrape(answer) == ("ok" if running == 4 else "bad_page")
        assert one.instance.scrape is not None
        assert one.instance.scrape.running == running


async def test_scrape_reports_an_engine_that_sleeps_and_counts_its_cache_as_empty() -> None:
    async with bench() as one:
        said: list[bool] = []
        one.source._on_sleep = lambda _, asleep: said.append(asleep)
        awake, asleep = (f'vllm:engine_sleep_state{{sleep_state="awake"}} {value}\n' for value in (1, 0))
        for more in (awake, asleep, asleep, awake, ""):
            await one.scrape(page(more=more))
        assert said == [False, True, True, False, False]
        assert (one.restarts, one.instance.seen_empty, one.instance.started_at) == ([1], True, 1000)


async def test_scrape_uses_the_last_good_address_while_look_ups_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    resolver = Resolver("127.0.0.2", "127.0.0.1")  # nothing listens at the first
    async with served(Engine()) as (url,):
        instance = Instance("a", url.replace("127.0.0.1", "engine.test"), models=["m"])
        source = Scraper(
            [instance], interval_s=3600, on_restart=lambda _: None, on_scrape=lambda *_: None, resolve=resolver
        )
        await source.start()
        await source.first_look(5)
        assert instance.scrape is not None
        resolver.found = ()
        assert await source.scrape(instance) == "ok"
        await source.stop()


async def test_scrape_that_hangs_times_out_and_delays_no_other() -> None:
    hanging, answering, release = Engine(), Engine(), asyncio.Event()

    async def hang(writer: asyncio.StreamWriter) -> None:
        await release.wait()

    hanging.answers["/metrics"] = hang
    results: dict[str, list[str]] = {"hanging": [], "answering": []}
    async with served(hanging, answering) as urls:
        source = Scraper(
            [Instance(name, url, models=["m"]) for name, url in zip(results, urls, strict=True)],
            interval_s=0.02,
            timeout_s=0.2,
            on_restart=lambda _: None,
            on_scrape=lambda instance, result, _: results[instance.id].append(result),
        )
        await source.start()
        await until(lambda: len(results["hanging"]) >= 2)
        await source.stop()
        release.set()
    assert set(results["hanging"]) == {"timeout"}
    assert set(results["answering"]) == {"ok"}
    assert len(results["answering"]) > 2 * len(results["hanging"])


# ── frozen series ────────────────────────────────────────────────────────────


async def test_scrape_of_a_busy_frozen_engine_keeps_its_age() -> None:
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


@pytest.mark.parametrize(
    "answer", [page(running=0, generated=10), ok(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 1\n")]
)
async def test_scrape_of_an_idle_engine_or_without_counters_is_fresh(answer: bytes) -> None:
    async with bench() as one:
        for _ in range(2):
            await one.scrape(answer)
        assert one.instance.scrape is not None
        assert one.instance.scrape.measured_at == one.clock.now


# ── restarts ─────────────────────────────────────────────────────────────────


async def test_restart_is_seen_by_another_start_time() -> None:
    async with bench() as one:
        await one.scrape(page(generated=5, started=1000))
        await one.scrape(page(generated=50, started=2000))
        assert one.restarts == [1]
        assert one.instance.incarnation == 1
        await one.scrape(page(generated=60, started=2000))
        assert one.restarts == [1]
        await one.scrape(b"")  # scrapes fail meanwhile
        await one.scrape(page(started=3000))
        assert one.restarts == [1, 2]


@pytest.mark.parametrize(("generated", "seen_empty"), [(0, True), (7, False)])
async def test_engine_that_has_computed_nothing_is_seen_empty(generated: float, seen_empty: bool) -> None:
    async with bench(first=page(generated=generated)) as one:
        await one.scrape(page(generated=9))
        assert (one.instance.seen_empty, one.instance.started_at) == (seen_empty, 1000)
        await one.scrape(page(generated=generated, started=2000))
        assert (one.instance.seen_empty, one.instance.started_at) == (seen_empty, 2000)


async def test_restarted_engine_with_requests_in_flight_is_not_seen_empty() -> None:
    async with bench() as one:
        lease = one.instance.charge(1, 100)
        await one.scrape(page(started=2000))
        assert (lease.is_past, one.instance.seen_empty) == (True, False)


async def test_restarts_of_several_engines_at_one_address_do_not_fill_the_log() -> None:
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


async def test_first_look_ends_after_one_scrape_each_or_the_timeout() -> None:
    async with bench(first=b"nonsense") as one:
        await asyncio.wait_for(one.source.first_look(60), 1)
        fresh = Bench(Instance("b", "http://127.0.0.1:1"), one.engine, 1.0)
        await asyncio.wait_for(fresh.source.first_look(0.01), 1)


async def test_restart_is_seen_by_a_falling_counter_without_start_time() -> None:
    async with bench() as one:
        text = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:prompt_tokens_total %d\n"
        await one.scrape(ok(text % 500))
        await one.scrape(ok(text % 700))
        assert one.restarts == []
        await one.scrape(ok(text % 20))
        assert one.restarts == [1]
        await one.scrape(ok(text % 30))
        assert one.restarts == [1]


# ── models ───────────────────────────────────────────────────────────────────


async def test_models_are_read_at_start_every_thirty_seconds_and_after_a_restart() -> None:
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
async def test_models_stay_when_the_list_cannot_be_read(answer: bytes) -> None:
    async with bench() as one:
        one.engine.answers["/v1/models"] = answer
        one.clock.now += 60
        assert await one.scrape() == "ok"
        assert one.engine.asked[-1] == "/v1/models"
        assert one.models() == {"m"}


async def test_models_that_are_configured_are_not_read() -> None:
    async with bench(models=["fixed"]) as one:
        one.clock.now += 60
        await one.scrape()
        assert set(one.engine.asked) == {"/metrics"}
        assert one.models() == {"fixed"}


@pytest.mark.parametrize(
    ("name", "running", "waiting", "usage", "block_size", "blocks"),
    [
        ("metrics_idle", 0, 0, 0.0, "32", "200"),
        ("metrics_load", 4, 6, 0.40201005025125625, "32", "200"),
        ("b_metrics_idle", 0, 0, 0.0, "128", "64"),
        ("dp2_metrics_load", 8, 2, (0.12698412698412698 + 0.06349206349206349) / 2, "128", "128"),
    ],
)
def test_page_of_a_real_engine_is_read(
    name: str, running: float, waiting: float, usage: float, block_size: str, blocks: str
) -> None:
    page = parse_page(body_of(name))
    assert (page.running, page.waiting, page.kv_usage, page.refused) == (running, waiting, usage, 0)
    assert page.cache["block_size"] == block_size
    assert page.cache["num_gpu_blocks"] == blocks
    assert page.cache["enable_prefix_caching"] == "True"
    # Several API servers behind one port export no start time.
    assert (page.started_at is None) == (name == "dp2_metrics_load")
    assert set(page.counters) == {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_hits_total",
    }


def test_page_counters_are_summed_over_engines() -> None:
    assert parse_page(body_of("dp2_metrics_load")).counters["vllm:prompt_tokens_total"] == 1212 + 612


def test_page_with_old_names_is_read_and_new_names_win() -> None:
    old = b"vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_queries_total 7\n"
    page = parse_page(LOAD + old)
    assert page.kv_usage == 0.5
    assert page.counters == {"vllm:gpu_prefix_cache_queries_total": 7.0}
    assert parse_page(LOAD + old + b"vllm:kv_cache_usage_perc 0.25\n").kv_usage == 0.25


@pytest.mark.parametrize(
    "text",
    [
        b'vllm:num_requests_running{engine="0"} 2 1700000000000\n',
        b'vllm:num_requests_running{model_name="a} 9 \\"x\\" {b",engine="0"} 2.0\n',
        b'vllm:num_requests_running{engine="0"} 2.0\n' * 2,
    ],
    ids=["time stamp", "any label", "given twice"],
)
def test_page_series_may_have_unusual_forms(text: bytes) -> None:
    assert parse_page(text).running == 2.0


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"-1", b"1e308", b"words", b"0x10", b"1_0_"])
def test_page_value_that_is_invalid_is_unknown_and_counted(value: bytes) -> None:
    page = parse_page(b"vllm:num_requests_running %b\nvllm:num_requests_waiting 1\n" % value)
    assert (page.running, page.waiting, page.refused) == (None, 1.0, 1)


def test_page_engine_with_an_invalid_value_counts_as_the_mean_of_the_others() -> None:
    series = b'%b{engine="0"} 4\n%b{engine="1"} NaN\n%b{engine="2"} 2\n'
    names = (b"vllm:num_requests_running", b"vllm:prompt_tokens_total")
    page = parse_page(b"".join(series % (name, name, name) for name in names))
    assert (page.running, page.counters, page.refused) == (9.0, {}, 2)


@pytest.mark.parametrize("values", [(b"9", b"0"), (b"0", b"9"), (b"NaN", b"9"), (b"9", b"NaN")])
def test_page_equal_series_that_differ_count_with_the_larger_value(values: tuple[bytes, bytes]) -> None:
    page = parse_page(b"".join(b'vllm:num_requests_running{engine="0"} %b\n' % value for value in values))
    assert (page.running, page.refused) == (9.0, 0)


@pytest.mark.parametrize(
    ("ranks", "asleep"), [((1.0, 1.0), False), ((1.0, 0.0), True), ((0.0, 1.0), True), ((), False)]
)
def test_page_is_asleep_if_one_of_its_engines_is(ranks: tuple[float, ...], asleep: bool) -> None:
    series = 'vllm:engine_sleep_state{{engine="{0}",sleep_state="{1}"}} {2}\n'
    states = (("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0))
    text = "".join(
        series.format(rank, name, value if awake else 1 - value)
        for rank, awake in enumerate(ranks)
        for name, value in states
    )
    assert parse_page(LOAD + text.encode()).asleep is asleep
    assert not parse_page(body_of("metrics_load")).asleep


@pytest.mark.parametrize(("value", "usage"), [(b"1.0000001", 1.0), (b"1", 1.0), (b"1.5", None), (b"40.2", None)])
def test_page_usage_is_a_share(value: bytes, usage: float | None) -> None:
    assert parse_page(b"vllm:kv_cache_usage_perc " + value + b"\n").kv_usage == usage


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>404</html>",
        b"\x1f\x8b\x08\x00garbage",
        b"other:num_requests_running 4\n",
        b"vllm:num_requests_running_max 4\n",
        b"# HELP vllm:num_requests_running 4\n",
        b"x vllm:num_requests_running 4\n",
        b'vllm:num_requests_waiting_by_reason{reason="capacity"} 4\n',
    ],
)
def test_page_without_wanted_series_is_empty(text: bytes) -> None:
    assert parse_page(text) == Page()


def test_page_number_that_is_truncated_is_not_read() -> None:
    whole = body_of("metrics_load")
    at = whole.index(b"\nvllm:num_requests_waiting{")
    end = whole.index(b"\n", at + 1)
    assert parse_page(whole[: end + 1]).waiting == 6.0
    for cut in range(at, end):
        assert parse_page(whole[:cut]).waiting is None


def test_page_series_on_the_border_of_two_stretches_is_read() -> None:
    for padding in range(65480, 65560):
        text = b"#" * padding + b"\n" + LOAD + b"y 1\n" * 20000
        assert parse_page(text).running == 4.0
        assert parse_page(text).waiting == 6.0


@pytest.mark.parametrize(
    "text",
    [
        b"vllm:num_requests_running{" + b"}" * 500_000 + b" 4\n",
        b'vllm:num_requests_running{a="' + b"x" * 500_000 + b'"} 4\n',
        b"vllm:num_requests_running " + b"9" * 500_000 + b"\n",
    ],
)
def test_page_line_that_is_hostile_is_skipped(text: bytes) -> None:
    page = parse_page(text + b"vllm:num_requests_waiting 1\n")
    assert (page.running, page.waiting) == (None, 1.0)


def test_page_with_too_many_series_is_refused() -> None:
    lines = [b'vllm:num_requests_running{engine="%d"} 1\n' % i for i in range(MAX_SERIES + 1)]
    assert parse_page(b"".join(lines)) == Page(refused=MAX_SERIES + 1)
    assert parse_page(b"".join(lines[1:])).running == MAX_SERIES


LINES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda name, labels, value: name + labels + b" " + value,
            st.sampled_from([b"vllm:num_requests_running", b"vllm:kv_cache_usage_perc", b"process_start_time_seconds"]),
            st.sampled_from([b"", b"{}", b'{engine="0"}', b'{engine="1"}', b"{"]),
            st.sampled_from([b"1", b"0.5", b"nan", b"-3", b"1e400", b""]),
        ),
    )
)


@given(LINES)
def test_page_values_are_always_valid(lines: list[bytes]) -> None:
    page = parse_page(b"\n".join(lines))
    for value in (page.running, page.waiting, page.started_at, *page.counters.values()):
        assert value is None or 0 <= value <= 1e15 * MAX_SERIES
    assert page.kv_usage is None or 0 <= page.kv_usage <= 1


def test_page_prefix_tokens_are_read_under_new_and_old_names() -> None:
    assert parse_page(body_of("metrics_load")).prefix_tokens == PrefixTokens(local=2272, external=0, missed=2427)
    old = b"vllm:gpu_prefix_cache_queries_total 100.0\nvllm:gpu_prefix_cache_hits_total 60.0\n"
    assert parse_page(old).prefix_tokens == PrefixTokens(local=60, external=0, missed=40)
    connected = (
        b"vllm:prefix_cache_queries_total 100.0\nvllm:prefix_cache_hits_total 60.0\n"
        b"vllm:external_prefix_cache_hits_total 30.0\n"
    )
    assert parse_page(connected).prefix_tokens == PrefixTokens(local=60, external=30, missed=10)
    assert parse_page(b"vllm:prefix_cache_hits_total 60.0\n").prefix_tokens is None
    assert parse_page(b"vllm:prefix_cache_queries_total 60.0\n").prefix_tokens is None


def lora(value: float, running: str, waiting: str = "", most: str = "4") -> bytes:
    labels = b'max_lora="%b",running_lora_adapters="%b",waiting_lora_adapters="%b"'
    return b"vllm:lora_requests_info{%b} %f\n" % (
        labels % (most.encode(), running.encode(), waiting.encode()),
        value,
    )


def test_page_adapters_are_those_of_the_newest_series() -> None:
    page = parse_page(LOAD + lora(1.7e9 + 2, "sql,law", "law, tax") + lora(1.7e9, "old"))
    assert (page.loras, page.lora_room) == (frozenset({"sql", "law", "tax"}), True)


def test_page_with_many_adapter_series_is_read() -> None:
    before = b"".join(lora(1.7e9 + at, f"a{at}") for at in range(MAX_SERIES))
    page = parse_page(LOAD + before + lora(1.7e9 + MAX_SERIES, "sql"))
    assert (page.running, page.loras) == (4.0, frozenset({"sql"}))


@pytest.mark.parametrize(
    ("series", "room"),
    [(lora(1.7e9, "a,b,c,d"), False), (lora(1.7e9, ""), True), (lora(1.7e9, "sql", most="many"), None), (b"", None)],
)
def test_page_adapter_room_depends_on_the_maximum(series: bytes, room: bool | None) -> None:
    page = parse_page(LOAD + series)
    assert page.lora_room is room
    assert (page.loras is None) == (not series)


# ── probes ───────────────────────────────────────────────────────────────────


def prober(instance: Instance, *, timeout_s: float = 1.0) -> Prober:
    health = Health([instance], HealthSettings(fall=1, rise=1, slow_start=0))
    return Prober([instance], health, interval_s=0.01, timeout_s=timeout_s)


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[Instance]:
    """An instance that answers one connection with *pieces*, a moment between two, and keeps it open."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.01)
            await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield Instance("a", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await ended.wait()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("pieces", "state"),
    [
        ([capture("health")[1]], State.WELL),
        ([b"HTTP/1.1 401 Unauthorized\r\n\r\n"], State.WELL),
        ([b"HTTP/1.0 404 Not Found\r\n\r\n"], State.WELL),
        ([b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n"], State.WELL),
        ([b"HTTP", b"/1.1 2", b"00 OK\r", b"\n\r\n"], State.WELL),
        ([b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"], State.ILL),
        ([b"HTTP/1.1 500 X\r\n\r\n"], State.ILL),
        ([b"HTTP/1.1 2000 X\r\n\r\n"], State.ILL),
        ([b"HTTP/2 200\r\n\r\n"], State.ILL),
        ([b"\x00\xff" * 8000], State.ILL),
        ([b"SSH-2.0-OpenSSH\r\n"], State.ILL),
        ([b"HTTP/1.1 200 OK"], State.ILL),
        ([], State.ILL),
    ],
)
async def test_probe_is_good_with_a_status_below_500(pieces: list[bytes], state: State) -> None:
    async with answering(*pieces) as instance:
        await prober(instance, timeout_s=1.0 if len(pieces) > 1 else 0.1).probe(instance)
    assert instance.state is state


async def test_probing_continues_after_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeEngine() as engine:
        instance = Instance("a", engine.url)
        health = Health([instance], HealthSettings(fall=1, rise=1, slow_start=0))
        one = Prober([instance], health, interval_s=0.01)
        with monkeypatch.context() as broken, capture_logs() as logs:
            broken.setattr(health, "settle", lambda: 1 / 0)
            await one.start()
            await until(lambda: bool(logs))
        assert [(line["event"], line["instance"]) for line in logs] == [("smetric.probe.crashed", "a")]
    await until(lambda: instance.state is State.REFUSING)
    await one.stop()


async def test_probes_read_the_system_authorities_once(monkeypatch: pytest.MonkeyPatch) -> None:
    authority, made = trustme.CA(), []

    def trusting() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        authority.configure_trust(made[-1])
        return made[-1]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()
        writer.close()

    monkeypatch.setattr(ssl, "create_default_context", trusting)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        instance = Instance("a", f"https://localhost:{server.sockets[0].getsockname()[1]}")
        probing = prober(instance)
        for _ in range(3):
            await probing.probe(instance)
            assert instance.state is State.WELL
    assert len(made) == 1


async def test_probe_is_ignored_if_the_process_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "LATE_S", 0.05)
    async with answering(b"") as instance:
        asyncio.get_running_loop().call_later(0.01, time.sleep, 0.2)
        await prober(instance, timeout_s=0.05).probe(instance)
    assert instance.state is State.WELL


async def test_probe_of_a_closed_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        instance = Instance("a", f"http://127.0.0.1:{taken.getsockname()[1]}")
        await prober(instance).probe(instance)
    assert instance.state is State.REFUSING


async def test_probe_tries_all_addresses_and_keeps_them_while_look_ups_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "TTL_S", 0.0)
    resolver = Resolver("127.0.0.2", "127.0.0.1")  # nothing listens at the first
    async with FakeEngine() as engine:
        instance = Instance("a", engine.url.replace("127.0.0.1", "engine.test"))
        probing = Prober([instance], Health([instance], HealthSettings(fall=1, slow_start=0)), resolve=resolver)
        for _ in range(2):
            await probing.probe(instance)
            resolver.found = ()
        assert engine.connections == 2
        assert instance.healthy
    await probing.probe(instance)
    assert instance.state is State.REFUSING


async def test_probe_that_hangs_delays_no_other() -> None:
    async with FakeEngine() as hanging, FakeEngine() as answering:
        hanging.health = hang
        instances = [Instance("e0", hanging.url), Instance("e1", answering.url)]
        health = Health(instances, HealthSettings(fall=1, rise=1, slow_start=0))
        probing = Prober(instances, health, interval_s=0.02, timeout_s=0.2)
        await probing.start()
        await until(lambda: answering.connections >= 10 and instances[0].state is State.ILL)
        assert answering.connections > 2 * hanging.connections
        assert instances[1].state is State.WELL
        hanging.recover()
        await until(lambda: instances[0].state is State.WELL)
        await probing.stop()


# ── the pace of both ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("now", "turn"),
    [(10.5, 11.25), (11.25, 11.25), (11.26, 11.25), (12.2, 11.25), (12.5, 13.25), (70.5, 71.25)],
)
def test_next_turn_keeps_the_interval_and_skips_missed_turns(now: float, turn: float) -> None:
    assert next_turn(10.25, 1.0, now) == turn


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 3600))
def test_next_turn_keeps_loops_apart_after_a_pause(a: float, b: float, pause_s: float) -> None:
    later = [next_turn(due, 1.0, 1.0 + pause_s) % 1.0 for due in (a, b)]
    apart = abs(later[0] - later[1]) % 1.0
    was = abs(a - b) % 1.0
    assert abs(min(apart, 1 - apart) - min(was, 1 - was)) < 1e-6

"""Rows E: failing metrics pages and collectors."""

from __future__ import annotations

import asyncio
import gzip
import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from ipaddress import ip_network
from statistics import quantiles
from urllib.parse import urlsplit

import orjson
import pytest

from smetric.config.settings import InstanceSettings, ScrapeSettings
from smetric.fleet.instance import Instance
from tests.fakes import METRICS, Call, FakeEngine, Script, capture, hang, until
from tests.faults.gated import figures
from tests.faults.harness import CANARY, Running, Tell, chat, running
from tests.faults.stall import Stall
from tests.telemetry.otlp_receiver import Receiver, receiving

#: Longest that one page may hold up everything else, seconds of CPU.
STALL_S = 0.02
TEXT = (b"content-type", b"text/plain; version=0.0.4")


def page(body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> Script:
    """A `/metrics` answer."""
    return lambda call: call.answer(status, body, *(headers or (TEXT,)))


async def cut_off(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + METRICS)
    call.close()


async def refused(call: Call) -> None:
    call.reset()


def values(running: bytes, waiting: bytes = b"0") -> Script:
    return page(b"vllm:num_requests_running %b\nvllm:num_requests_waiting %b\n" % (running, waiting))


def finite(router: Running) -> bool:
    """Every number any decision so far has looked at is one."""
    snapshots = [
        record.decision.snapshot for record in router.application.telemetry.decisions.recent(1000) if record.decision
    ]
    cells = [cell for snapshot in snapshots for column in snapshot.columns.values() for cell in column]
    return bool(cells) and all(math.isfinite(cell) for cell in cells if isinstance(cell, (int, float)))


@pytest.mark.parametrize(
    ("metrics", "result"),
    [
        (refused, "connect_error"),
        (hang, "timeout"),
        (page(b"down", status=500), "http_error"),
        (page(b"x" * (10 << 20)), "bad_page"),
        (page(b"\x00\xff not a page {{{ \n\n}"), "bad_page"),
        (cut_off, "bad_page"),
        (page(gzip.compress(METRICS, mtime=0), (b"content-encoding", b"gzip")), "bad_page"),
        (page(b'{"running": 1}', (b"content-type", b"application/json")), "bad_page"),
        (page(b"other:series 1\n"), "bad_page"),
        (page(b"vllm:num_requests_running 3\n"), "bad_page"),
        (values(b"NaN"), "bad_page"),
        (values(b"+Inf"), "bad_page"),
        (values(b"-1"), "bad_page"),
        (values(b"1e308"), "bad_page"),
    ],
    ids=[
        *("refused", "hang", "500", "10 MB", "garbage", "cut off", "gzip", "JSON", "renamed", "a series missing"),
        *("NaN", "Inf", "negative", "1e308"),
    ],
)
async def test_e1_bad_metrics_page_delays_no_request(metrics: Script, result: str) -> None:
    scrape = ScrapeSettings(interval=0.05, timeout=0.2)
    async with running(FakeEngine(), FakeEngine(), policy="smetric", scrape=scrape) as router:
        bad = router.engines[0]
        bad.metrics = metrics
        instance = router.instance_of(bad)
        counted = f'smetric_telemetry_scrapes_total{{instance="{instance.id}",result="{result}"}}'
        await until(lambda: any(line["result"] == result for line in router.lines("smetric.scrape.changed")))
        answers = await asyncio.gather(*(router.chat() for _ in range(8)))
        assert [answer.status for answer in answers] == [200] * 8
        # Two equal instances: the one without measurements is neither avoided nor preferred.
        assert {answer.value("x-smetric-instance") for answer in answers} == {"e0", "e1"}
        assert finite(router)
        bad.metrics = page(METRICS)
        await until(lambda: any(line["result"] == "ok" for line in router.lines("smetric.scrape.changed")))
        text = (await router.admin("/metrics")).body.decode()
        assert counted in text
        assert f'smetric_telemetry_age_seconds{{instance="{instance.id}"' in text


async def test_e1_repeated_series_of_a_page_counts_once() -> None:
    async with running(FakeEngine(), policy="smetric", scrape=ScrapeSettings(interval=0.05, timeout=0.2)) as router:
        instance = router.instance_of(router.engines[0])
        router.engines[0].metrics = values(b"3\nvllm:num_requests_running 3")
        await until(lambda: instance.scrape is not None and instance.scrape.running > 0)
        assert instance.requests() == 3


async def test_e1_hanging_metrics_page_attracts_no_requests() -> None:
    scrape = ScrapeSettings(interval=0.05, timeout=0.2)
    engines = [FakeEngine() for _ in range(4)]
    async with running(*engines, policy="smetric", scrape=scrape) as router:
        engines[0].metrics = hang
        await until(lambda: any(line["result"] == "timeout" for line in router.lines("smetric.scrape.changed")))
        for _ in range(10):
            await asyncio.gather(*(router.chat() for _ in range(8)))
        share = len(engines[0].calls) / sum(len(engine.calls) for engine in engines)
        assert share <= 1.2 / 4


@pytest.mark.parametrize(
    "body",
    [
        b"vllm:num_requests_running{" + b'a="' + b"\\" * 500_000 + b'"} 1\n',
        METRICS + b"".join(b'other:series{label="%d"} 1\n' % i for i in range(50_000)),
        b"vllm:num_requests_running{" + b",".join(b'l%d="v"' % i for i in range(20_000)) + b"} 1\n",
    ],
    ids=["a line of 0.5 MB", "50,000 series", "20,000 labels"],
)
async def test_e2_hostile_page_does_not_stall(body: bytes, record_property: Tell) -> None:
    async with running(FakeEngine(), scrape=ScrapeSettings(interval=0.1, timeout=2.0)) as router:
        served = 0

        async def hostile(call: Call) -> None:
            nonlocal served
            served += 1
            await call.answer(200, body, TEXT)

        router.engines[0].metrics = hostile
        answers = await asyncio.gather(*(router.chat(stream=True) for _ in range(50)))
        assert all(answer.complete for answer in answers)
        await until(lambda: served >= 2)
        with Stall() as stall:
            await until(lambda: served >= 5)
        assert stall.seconds <= STALL_S
        if stall.seconds > STALL_S / 10:
            record_property("F7 by pages", f"a page of metrics: {1000 * stall.seconds:.0f} ms")
        assert finite(router)


async def test_e2_scraping_200_instances_each_second_does_not_stall() -> None:
    """Addresses that all lead to one engine with a page of real length."""
    _, answer = capture("b_metrics_idle")
    engine = FakeEngine()
    engine.metrics = lambda call: call.send(answer)
    await engine.start(host="0.0.0.0")
    port = urlsplit(engine.url).port
    fleet = tuple(InstanceSettings(url=f"http://127.0.1.{i}:{port}", id=f"e{i}") for i in range(1, 201))
    async with running(instances=fleet, scrape=ScrapeSettings(interval=1.0, timeout=2.0), check_after=False) as router:
        instances = router.application.fleet.instances
        before = [one.scrape for one in instances]
        with Stall() as stall:
            await until(lambda: all(one.scrape is not old for one, old in zip(instances, before, strict=True)))
        assert stall.seconds <= STALL_S
    await engine.stop()


async def test_e4_stale_measurements_fall_back_to_own_counts() -> None:
    with receiving() as collector, exporting(collector.url) as environ:
        scrape = ScrapeSettings(interval=0.05, timeout=0.2, unknown_after=1.0)
        engines = [FakeEngine(), FakeEngine()]
        async with running(*engines, policy="smetric", scrape=scrape, environ=environ) as router:
            # e0 looks crowded by its last page, which is ignored once it is old
            engines[0].metrics = values(b"50")
            e0 = router.instance_of(engines[0])
            await until(lambda: e0.requests() == 50)
            for engine in engines:
                engine.metrics = hang
            fleet = router.application.fleet

            def is_old(instance: Instance) -> bool:
                return instance.scrape is not None and fleet.clock() - instance.scrape.measured_at > 1

            await until(lambda: all(map(is_old, fleet.instances)))
            answers = await asyncio.gather(*(router.chat() for _ in range(12)))
            assert [answer.status for answer in answers] == [200] * 12
            assert len({answer.value("x-smetric-policy") for answer in answers}) == 1
            assert [len(engine.calls) for engine in engines] == [6, 6]
            for record in router.application.telemetry.decisions.recent(12):
                assert record.decision is not None
                assert record.decision.snapshot.is_known("requests") == [False, False]
            page = (await router.admin("/metrics")).body.decode()
            ages = re.findall(r'^smetric_telemetry_age_seconds\{instance="e\d"\} (\S+)$', page, re.M)
            assert len(ages) == 2
            assert all(float(age) > 1 for age in ages)
            await until(lambda: len(collector.named("route ")) >= 14)
            shown = [
                orjson.loads(span.attributes["smetric.candidates.json"]) for span in collector.named("route ")[-12:]
            ]
            assert all(row["unknown"] == ["requests"] for rows in shown for row in rows)


#: A queue that is soon full. Each request makes three spans.
QUEUE, BATCH, SPANS = 64, 16, 3


@contextmanager
def exporting(url: str) -> Iterator[dict[str, str]]:
    """The environment of a router that sends its traces to *url*: the SDK reads its own part of the process's."""
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "OTEL_BSP_MAX_QUEUE_SIZE": str(QUEUE),
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": str(BATCH),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        yield environ


@contextmanager
def black_hole(*, listens: bool) -> Iterator[Receiver]:
    """Collector that refuses connections or never answers."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if listens:
            hole.listen()
        yield Receiver(f"http://127.0.0.1:{hole.getsockname()[1]}")


COLLECTORS: dict[str, Callable[[], AbstractContextManager[Receiver]]] = {
    "refuses connections": partial(black_hole, listens=False),
    "never answers": partial(black_hole, listens=True),
    "is slow": partial(receiving, after_s=0.5),
}


@pytest.mark.parametrize("name", COLLECTORS)
async def test_e5_failing_collector_delays_nothing_and_losses_are_counted(name: str) -> None:
    requests = 200
    # The exporter holds a socket of its own, which the leak probe would count.
    with COLLECTORS[name]() as collector, exporting(collector.url) as environ:
        async with running(FakeEngine(), environ=environ, check_after=False) as router:
            answers = [
                answer
                for _ in range(4)
                for answer in await asyncio.gather(*(router.chat() for _ in range(requests // 4)))
            ]
            assert [answer.status for answer in answers] == [200] * requests
            assert router.counted() == (0, 0, 0)
            # Beside what came there, no more wait than the queue holds, and a batch is on its way.
            lost = figures(router, "smetric_trace_spans_dropped_total")["smetric_trace_spans_dropped_total"]
            assert SPANS * requests - QUEUE - BATCH - len(collector.spans) <= lost < SPANS * requests
            ended = time.monotonic()
        assert time.monotonic() - ended < 5


COLLECTOR = """
from tests.telemetry.otlp_receiver import receiving
with receiving() as collector:
    print(collector.url, flush=True)
    input()
"""


@asynccontextmanager
async def collector_of_its_own() -> AsyncIterator[str]:
    """Collector in a separate process; in this one requests would wait for it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COLLECTOR), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.stdin.write(b"\n")
        async with asyncio.timeout(10):
            assert await process.wait() == 0


@pytest.mark.slow
async def test_e5_hanging_collector_delays_no_request(record_property: Tell) -> None:
    """Compare with a router whose collector accepts everything; the figure is the ratio."""
    seconds: dict[str, list[float]] = {"well": [], "hangs": []}
    async with AsyncExitStack() as stack:
        routers: dict[str, Running] = {}
        for kind, url in (
            ("well", await stack.enter_async_context(collector_of_its_own())),
            ("hangs", stack.enter_context(black_hole(listens=True)).url),
        ):
            with exporting(url) as environ:
                routers[kind] = await stack.enter_async_context(
                    running(FakeEngine(), environ=environ, check_after=False)
                )
        for number in range(500):
            for kind in ("well", "hangs") if number % 2 else ("hangs", "well"):
                began = time.perf_counter()
                assert (await routers[kind].chat()).status == 200
                seconds[kind].append(time.perf_counter() - began)
    well, hangs = (quantiles(seconds[kind], n=100) for kind in ("well", "hangs"))
    assert hangs[49] <= 1.25 * well[49]
    record_property(
        "F18", f"{hangs[49] / well[49]:.2f} (median), {hangs[98] / well[98]:.2f} (p99) of 500 requests each"
    )


async def test_e5_refusing_collector_loses_only_spans() -> None:
    with receiving(status=413) as collector, exporting(collector.url) as environ:
        async with running(FakeEngine(), environ=environ) as router:
            assert [(await router.chat()).status for _ in range(20)] == [200] * 20
            await until(lambda: router.application.tracing.dropped > 0)


async def test_h4_untrusted_sampled_flag_is_ignored_and_its_trace_linked() -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    forced = ("traceparent", f"00-{trace}-{parent}-01")
    for share, trusted, recorded in (("0", False, []), ("1", False, ["other"]), ("0", True, ["same"])):
        with receiving() as collector, exporting(collector.url) as environ:
            environ |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": share}
            proxies = (ip_network("127.0.0.0/8"),) if trusted else ()
            async with running(FakeEngine(), environ=environ, trusted_proxies=proxies, check_after=False) as router:
                assert (await router.ask("POST", "/v1/chat/completions", chat(), forced)).status == 200
            # by the router's end all there is has been sent, the request above last
            spans = [each.span for each in collector.named("POST ")[-1:]]
            assert bool(collector.spans) is bool(recorded)
            assert ["same" if span.trace_id.hex() == trace else "other" for span in spans] == recorded
            for span in spans:
                linked = [link.span_id.hex() for link in span.links]
                assert (linked, span.parent_span_id.hex()) == (([], parent) if trusted else ([parent], ""))


async def test_h6_prompt_is_in_no_span() -> None:
    with receiving() as collector, exporting(collector.url) as environ:
        async with running(FakeEngine(), FakeEngine(), policy="smetric", environ=environ) as router:
            await router.chat(stream=True)
            await router.chat(messages=[{"role": "user", "content": CANARY}, {"role": "assistant", "content": CANARY}])
            await router.ask("POST", "/v1/chat/completions", b'{"model": "tiny", "x": ' + CANARY.encode())
            router.engines[0].script = router.engines[1].script = refused
            await router.chat()
            # what went wrong is recorded too: a refused body and two failed attempts
            await until(lambda: len(collector.named("POST ")) >= 6)
            assert not any(CANARY in str(span.span) for span in collector.spans)
            assert collector.named("route ")

"""Router in this process on free ports, checked for leaks and service when a test ends."""

from __future__ import annotations

import asyncio
import gc
import io
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from smetric.app import Application
from smetric.config.settings import Forward, InstanceSettings, LimitSettings, ScrapeSettings, Settings
from smetric.http.listener import address_of, listen, serve_port
from smetric.sources.source import TokenIds
from smetric.telemetry import logs
from tests.fakes import DONE, FakeEngine, RawClient, Response, Script, fetch, request, until

#: A test's `record_property`: reports a figure of figures.toml, or a part of it, by name: `F8`, `F8 by hand`.
Tell = Callable[[str, object], None]

#: Stands in prompts, and must never be seen anywhere but in them and in the engines.
CANARY = "canary-7f3a9c51"
#: Seconds until everything must be as it was.
LEAK_PROBE_S = 5.0


def chat(*, stream: bool = False, model: str = "tiny", **fields: Any) -> bytes:
    """Return a chat request with the canary in its prompt."""
    body = {"model": model, "messages": [{"role": "user", "content": f"say {CANARY}"}], "stream": stream, **fields}
    return orjson.dumps(body)


class Count:
    """Counts that must not grow: tasks by coroutine, and open file descriptors."""

    def __init__(self) -> None:
        self.tasks = Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
        self.fds = len(os.listdir("/proc/self/fd"))

    def exceeded(self) -> str:
        """Return what was added since this count; empty for nothing."""
        now = Count()
        if now.tasks.total() <= self.tasks.total() and now.fds <= self.fds:
            return ""
        return f"{now.fds - self.fds} more file descriptors; more tasks: {now.tasks - self.tasks}"


@dataclass
class Running:
    """A router that runs."""

    application: Application
    url: str
    admin_url: str
    engines: Sequence[FakeEngine]
    log: io.StringIO
    baseline: Count | None = None

    async def chat(self, **fields: Any) -> Response:
        """One chat request on its own connection."""
        return await fetch(self.url, "POST", "/v1/chat/completions", chat(**fields))

    async def ask(self, method: str, target: str, body: bytes = b"", *headers: tuple[str, str]) -> Response:
        """One request on its own connection."""
        return await fetch(self.url, method, target, body, headers)

    async def admin(self, target: str) -> Response:
        """A page of the admin port."""
        return await fetch(self.admin_url, "GET", target)

    async def client(self, body: bytes = b"", target: str = "/v1/chat/completions") -> RawClient:
        """A client that has sent a request, if *body* is given, and read nothing yet."""
        client = await RawClient.connect(self.url)
        if body:
            await client.send(request("POST", target, body))
        return client

    async def figure(self, start: str, part: str = "") -> float:
        """The sum of its series that start with *start* and hold *part*."""
        lines = (await self.admin("/metrics")).body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start) and part in line)

    async def attempts(self, result: str) -> int:
        """How many attempts ended with *result*, by its own count."""
        return int(await self.figure("smetric_upstream_attempts_total{", f'result="{result}"'))

    def logged(self) -> str:
        """All that it has logged so far."""
        logs.flush()
        return self.log.getvalue()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The log lines of *event*."""
        return [line for line in map(orjson.loads, self.logged().splitlines()) if line["event"] == event]

    def instance_of(self, engine: FakeEngine) -> Any:
        """The router's instance for *engine*."""
        return next(one for one in self.application.fleet.instances if one.url == engine.url)

    def counted(self) -> tuple[int, int, int]:
        """The ledger's sums: requests, tokens not prefilled, tokens sent."""
        instances = self.application.fleet.instances
        return (
            sum(one.own for one in instances),
            sum(one.unprefilled for one in instances),
            sum(one.sent_tokens for one in instances),
        )

    async def warm_up(self) -> None:
        """Serve a request on every engine, and count what is there then."""
        for _ in self.engines:
            assert (await self.chat()).status == 200
        for engine in self.engines:
            engine.drop_idle()
        await asyncio.sleep(0.02)
        self.baseline = Count()

    async def check_well(self) -> None:
        """Healthy after: a normal request works; tasks, file descriptors and the ledger are back; no canary is out."""
        for engine in self.engines:
            engine.recover()
        answer = await self.chat(stream=True)
        assert (answer.status, answer.complete, answer.body[-len(DONE) :]) == (200, True, DONE)
        await until(lambda: self.counted() == (0, 0, 0))
        baseline = self.baseline
        assert baseline is not None
        gc.collect()
        deadline = asyncio.get_running_loop().time() + LEAK_PROBE_S
        while left := baseline.exceeded():
            for engine in self.engines:
                engine.drop_idle()
            assert asyncio.get_running_loop().time() < deadline, left
            await asyncio.sleep(0.01)
        pages = ["/metrics", "/admin/decisions?limit=1000"]
        pages += [f"/admin/{page}" for page in ("instances", "policy", "policies", "cache", "state", "savings")]
        decisions = self.application.telemetry.decisions.recent(5)
        pages += [f"/admin/decisions/{decision.id}{more}" for decision in decisions for more in ("", "/account")]
        shown = [await self.admin(page) for page in pages]
        assert not any(CANARY.encode() in page.body for page in shown)
        assert CANARY not in self.logged()


def instances_of(engines: Sequence[FakeEngine]) -> tuple[InstanceSettings, ...]:
    """The settings of *engines*: `e0`, `e1` and so on."""
    return tuple(InstanceSettings(url=engine.url, id=f"e{i}") for i, engine in enumerate(engines))


@asynccontextmanager
async def running(
    *engines: FakeEngine,
    policy: str = "load_only",
    forward: Forward | None = None,
    limits: LimitSettings | None = None,
    scrape: ScrapeSettings | None = None,
    environ: dict[str, str] | None = None,
    host: str = "127.0.0.1",
    drain_s: float = 1.0,
    check_after: bool = True,
    token_ids: TokenIds | None = None,
    within_s: float = 60.0,
    warm: bool = True,
    script: Script | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A router before *engines*, for *within_s* at most; at the end it must be well again.

    Where it is to end ill, *check_after* is off; where it can serve nothing as it is, *warm*. All engines follow
    *script* once the router is warm.
    """
    log = io.StringIO()
    logs.configure("debug", "json", log)
    async with asyncio.timeout(within_s), AsyncExitStack() as stack:
        for engine in engines:
            if not engine.url:
                await engine.start()
            stack.push_async_callback(engine.stop)
        application = Application(
            Settings(
                policy=policy,
                forward=forward or Forward(),
                limits=limits or LimitSettings(),
                scrape=scrape or ScrapeSettings(interval=0.2, timeout=1.0),
                **{"instances": instances_of(engines), **settings},
            ),
            environ or {},
            token_ids,
        )
        data, admin = listen(host, 0), listen("127.0.0.1", 0)
        ended = asyncio.Event()
        ports = [
            asyncio.create_task(serve_port(application.data_app(), data, stop=ended.wait, drain_s=drain_s)),
            asyncio.create_task(serve_port(application.admin_app(), admin, stop=ended.wait, drain_s=drain_s)),
        ]
        router = Running(application, address_of(data), address_of(admin), engines, log)
        try:
            await until(lambda: application.is_ready and all(one.scrape for one in application.fleet.instances))
            if warm:
                await router.warm_up()
            for engine in engines:
                engine.calls.clear()
                engine.script = script or engine.script
            yield router
            if check_after:
                await router.check_well()
        finally:
            ended.set()
            for failed in [each for each in await asyncio.gather(*ports, return_exceptions=True) if each is not None]:
                raise failed

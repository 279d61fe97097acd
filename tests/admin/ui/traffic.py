"""Simulated traffic for the live page: decisions of the real policy on a fleet of simulated engines.

No request is sent, so that thousands of decisions cost a test little.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from smetric import names
from smetric.app import Application
from smetric.config.settings import Admin, InstanceSettings, Settings
from smetric.fleet.exchange import Exchange
from smetric.fleet.instance import Instance, Lease, PrefixTokens, Scrape
from smetric.fleet.record import DecisionRecord, Shadowed
from smetric.policy import Decision, Outcome, Policy, Snapshot
from smetric.policy.snapshot import Origins
from smetric.request.request import Api, InferenceRequest, Usage
from smetric.telemetry import logs
from tests.fakes import listening

PATH = "/v1/chat/completions"
SCOPE = {"method": "POST", "path": PATH, "headers": [], "http_version": "1.1", "scheme": "http"}
CAPACITY = 24


@dataclass
class Session:
    """Conversation: its turn, the tokens of its history, and the cached ones on each instance."""

    turn: int = 0
    history: int = 0
    cached: dict[str, int] = field(default_factory=dict)


class Traffic:
    """Simulated requests through a router's policy and telemetry.

    Args:
        application: the router.
        sessions: concurrent conversations.
        service_s: mean duration of a request, seconds.
        shadows: policies in shadow.
        seed: of the random numbers.
    """

    def __init__(
        self,
        application: Application,
        sessions: int,
        service_s: float = 1.0,
        shadows: Sequence[Policy] = (),
        seed: int = 7,
    ) -> None:
        self.application = application
        self.random = random.Random(seed)
        self.sessions = [Session(self.random.randrange(8), self.random.randrange(6000)) for _ in range(sessions)]
        self.service_s = service_s
        self.shadows = shadows
        #: Slowdown factor of an instance, by its id.
        self.slow: dict[str, float] = {}
        self.cursors: dict[str, str] = {}
        self.now = 0.0
        self.made = 0
        self._ends: list[tuple[float, int, Lease, Exchange, Usage]] = []
        self._tokens: dict[str, tuple[int, int]] = {}
        self.scrape()

    def scrape(self, age_s: float = 0.0) -> None:
        """Set the load of every instance, measured moments ago."""
        for i, instance in enumerate(self.application.fleet.instances):
            measured_at = self.application.fleet.clock() - age_s - (i % 10) * 0.08
            running = min(instance.own, CAPACITY)
            instance.scrape = Scrape(
                measured_at, running, instance.own - running, running / (CAPACITY + 4), instance.own
            )
            found, missed = self._tokens.get(instance.id, (0, 0))
            instance.prefix_tokens = PrefixTokens(found, 0, missed)

    def request(self, model: str = "qwen3-30b") -> DecisionRecord:
        """Make a decision at once; its request ends when its simulated time has passed."""
        draw, application = self.random, self.application
        session = draw.choice(self.sessions)
        if session.turn > 9:
            session.turn, session.history = 0, 0
            session.cached.clear()
        prompt = session.history + draw.randrange(200, 1500)
        request = InferenceRequest(
            turn=session.turn,
            prompt_len=prompt,
            est_hit=session.history // 16 * 16,
            model=model,
            api=Api.CHAT,
            stream=True,
        )
        generation = application.policy_file.current
        seed = draw.getrandbits(63)
        decision = self._decide(generation.policy, request, session, seed)
        instance: Instance | None = None
        if decision.outcome is Outcome.ROUTE:
            self.cursors.update(decision.cursors)
            instance = application.fleet.get(str(decision.instance))
        record = DecisionRecord(
            time_ns=time.time_ns(),
            outcome={Outcome.ROUTE: names.ROUTED, Outcome.REJECT: names.REJECTED}[decision.outcome],
            request=request,
            policy=generation.policy,
            generation=generation.number,
            decision=decision,
            instance=instance,
            evaluate_s=draw.uniform(8e-6, 6e-5),
            lookup_s=2e-5 if "hit_len" in decision.snapshot.columns else 0.0,
        )
        record.shadowed = tuple(self._shadow(policy, decision, request, session) for policy in self.shadows)
        exchange = application.telemetry.begin(SCOPE, PATH, trusted=False)
        exchange.decided(record)
        self.made += 1
        if instance is None:
            exchange.end(429, error_type="rejected")
            return record
        hit = session.cached.get(instance.id, 0)
        actual = min(prompt, max(0, hit - draw.choice((0, 0, 0, 16, 64)))) // 16 * 16
        found, missed = self._tokens.get(instance.id, (0, 0))
        self._tokens[instance.id] = (found + actual, missed + prompt - actual)
        exchange.ttft_s = (prompt - actual) / 12_000 * draw.uniform(0.8, 1.3) + 0.02 + instance.own * 0.004
        lease = instance.charge(1, prompt, hit)
        end = self.now + draw.expovariate(1 / self.service_s) * self.slow.get(instance.id, 1.0)
        usage = Usage(prompt, draw.randrange(20, 400), actual)
        heapq.heappush(self._ends, (end, self.made, lease, exchange, usage))
        session.turn += 1
        session.history = prompt + 120
        session.cached[instance.id] = session.history // 16 * 16
        return record

    def _decide(self, policy: Policy, request: InferenceRequest, session: Session, seed: int) -> Decision:
        decided = policy.decide(self._snapshot(session, request, with_hits=False), request, self.cursors, seed)
        if not isinstance(decided, Decision):
            decided = policy.decide(self._snapshot(session, request, with_hits=True), request, self.cursors, seed)
        assert isinstance(decided, Decision)
        return decided

    def _snapshot(self, session: Session, request: InferenceRequest, *, with_hits: bool) -> Snapshot:
        instances = self.application.fleet.instances
        columns: dict[str, list[Any]] = {"requests": [one.requests() for one in instances]}
        measured = [one.scrape.measured_at if one.scrape is not None else None for one in instances]
        origins: dict[str, Origins] = {}
        if with_hits:
            most = float(request.prompt_len)
            columns["hit_len"] = [min(most, float(session.cached.get(one.id, 0))) for one in instances]
            origins["hit_len"] = "prefix_index"
        now = self.application.fleet.clock()
        return Snapshot([one.id for one in instances], columns, {}, {"requests": measured}, origins, now)

    def _shadow(self, policy: Policy, acting: Decision, request: InferenceRequest, session: Session) -> Shadowed:
        decided = policy.decide(self._snapshot(session, request, with_hits=True), request, {}, acting.seed)
        assert isinstance(decided, Decision)
        answer = names.AGREES if decided.choice == acting.choice else names.DIFFERS
        return Shadowed(policy, 1, answer, decision=decided)

    def pass_time(self, seconds: float) -> None:
        """Advance the time and end the requests that are due."""
        self.now += seconds
        while self._ends and self._ends[0][0] <= self.now:
            _, _, lease, exchange, usage = heapq.heappop(self._ends)
            lease.first_output()
            exchange.end(200, bytes_out=4000, usage=usage)
            lease.release()

    async def run(self, a_second: float, seconds: float = 3600.0) -> None:
        """Send requests in real time at a rate."""
        loop = asyncio.get_running_loop()
        began = last = scraped = loop.time()
        owed = 0.0
        while (now := loop.time()) < began + seconds:
            self.pass_time(now - last)
            if now - scraped >= 1.0 or self.made == 0:
                scraped = now
                self.scrape()
            owed += (now - last) * a_second
            last = now
            while owed >= 1.0:
                owed -= 1.0
                self.request()
            await asyncio.sleep(0.02)


@asynccontextmanager
async def simulated(
    instances: int, *, token: str = "", policy: str = "smetric", **settings: Any
) -> AsyncIterator[tuple[Application, str]]:
    """Run the parts of a router that the page needs, over simulated engines; yield it and its admin URL."""
    logs.configure("warning", "json")
    made = Settings(
        instances=tuple(
            InstanceSettings(id=f"vllm-{i:02}", url=f"http://127.0.0.1:{20000 + i}") for i in range(instances)
        ),
        policy=policy,
        admin=Admin(port=0, token=token),
    )
    application = Application(msgspec.structs.replace(made, **settings), {})
    async with listening(application.admin_app()) as admin:
        await application.live.feed.start()
        try:
            yield application, admin.url
        finally:
            await application.live.feed.stop()
    await application.upstream.close()

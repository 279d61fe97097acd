"""Composition root: builds every part from the settings and connects them. `smetric.cli.serve` serves its ports."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from smetric import names
from smetric.admin.app import admin_app
from smetric.admin.guard import AdminGuard
from smetric.admin.live import LiveStack, live_routes
from smetric.admin.operations import drain_routes, placement_routes, savings_routes
from smetric.admin.policies import policy_routes
from smetric.config import Settings
from smetric.config.credential import credential
from smetric.config.values import networks, odd_address
from smetric.fleet.drains import Drains
from smetric.fleet.fleet import fleet_of
from smetric.fleet.instance import Instance
from smetric.http.addresses import resolve_unless
from smetric.http.headers import App
from smetric.http.limits import HttpLimits
from smetric.http.listener import notify
from smetric.http.upstream import Upstream
from smetric.proxy.admission import Saturation, admission_of
from smetric.proxy.context import Deadlines, ProxyContext
from smetric.proxy.endpoints import EndpointContext, Models, TenantSalt, UnderWay, data_app
from smetric.proxy.intake import Intake
from smetric.records.recorder import RecordStack
from smetric.request.reader import ReaderSettings
from smetric.request.request import TokenRatio
from smetric.routing.policies import Policies
from smetric.routing.rejections import RejectionWatch
from smetric.routing.router import Router
from smetric.sources.build import build_sources, grains, require_token_ids
from smetric.sources.lookups import LookupDeadline
from smetric.sources.shared import MAX_BATCH_BYTES
from smetric.sources.source import TokenIds
from smetric.sources.tokens.request_tokens import request_tokens
from smetric.telemetry.cache_breaks import CacheBreaks
from smetric.telemetry.decisions import AtHand, DecisionLog
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.gauges import (
    cache_gauges,
    computed,
    fleet_gauges,
    index_gauges,
    kv_gauges,
    overload_gauges,
    peer_gauges,
    policy_gauges,
    refusal_gauges,
)
from smetric.telemetry.hit_truth import CacheWatch, HitTruth
from smetric.telemetry.logs import lost_lines
from smetric.telemetry.metrics import MAX_INSTANCES, Metrics, ModelLabels
from smetric.telemetry.outcomes import Outcomes, ServiceLevel
from smetric.telemetry.tracing import Tracing

#: Seconds that the start waits for instances to identify their process.
FIRST_LOOK_S = 2.0
#: Limit on the connections of the admin port: operators, scrapers and other routers.
ADMIN_CONNECTIONS = 256

log = structlog.get_logger("smetric.app")


class Application:
    """One router: its parts, and the ASGI apps of its two ports.

    Args:
        settings: all settings.
        environ: the `OTEL_…` variables.
        token_ids: source of token ids; by default the one that the section `tokenizer` names.

    Raises:
        ConfigError: a setting cannot be used.
        PolicyError: a policy does not check.
    """

    def __init__(
        self, settings: Settings, environ: Mapping[str, str] = os.environ, token_ids: TokenIds | None = None
    ) -> None:
        self.settings = settings
        self._environ = environ
        self.metrics = Metrics(per_instance=len(settings.instances) <= MAX_INSTANCES)
        self.fleet = fleet_of(settings, self.metrics.ejected)
        self.drains = Drains(self.fleet, Path(settings.state_dir) if settings.state_dir else None)
        self.policies = Policies(
            settings,
            lambda: self.fleet.instances,
            self.metrics.reloaded,
            self.metrics.restored,
            self._swapped,
        )
        self.routes = self.policies.routes
        self.policy_file = self.policies.default
        self.request_tokens = request_tokens(settings, self.fleet, self.metrics)
        self.token_ids = token_ids or self.request_tokens
        if token_ids is None:
            require_token_ids(settings)
        deadline = LookupDeadline(
            settings.lookup.deadline_base, settings.lookup.deadline_per_1k_tokens, settings.lookup.deadline_cap
        )
        self.sources = build_sources(settings, self.fleet, self.metrics, self.token_ids, deadline.of, self._restarted)
        self.records = RecordStack(settings, self.policies.recorded, self.metrics.recorded)
        self.router = Router(
            self.fleet,
            self.routes,
            self.sources.ranked,
            deadline=deadline,
            on_source_failed=self.metrics.source_failed,
            on_late=self.request_tokens.late,
            observed=self.policies.observed,
            models=self.sources.scraper.models,
        )
        self.tracing = Tracing(
            environ,
            candidates=settings.trace.candidates,
            ui_hints=settings.trace.ui_hints,
            keep=settings.trace.keep,
            keep_over_parent=settings.trace.keep_over_parent,
            resource={"smetric.policy.default": self.policy_file.current.policy.name},
        )
        self.rejections = RejectionWatch()
        level = ServiceLevel(settings.slo.ttft_base, settings.slo.ttft_per_1k_tokens / 1000, settings.slo.tpot)
        self.telemetry = Telemetry(
            tracing=self.tracing,
            metrics=self.metrics,
            decisions=DecisionLog(),
            outcomes=Outcomes(self.metrics.registry, level, self.sources.prefills.time_of, self.fleet.get),
            models=ModelLabels(self._models),
            instances=partial(getattr, self.fleet, "instances"),
            others=[
                one
                for one in (
                    self.routes.shadow_judge(),
                    self.rejections,
                    self.policies.guardrail,
                    self.records.decisions,
                    self.records.traffic,
                    self.request_tokens if self.request_tokens.compares else None,
                )
                if one is not None
            ],
        )
        self.caches = CacheWatch(
            HitTruth(self.metrics.hit_checked, grains=grains(settings)),
            CacheBreaks(self.metrics.cache_broke),
            lambda: self.fleet.instances,
        )
        self.at_hand = AtHand(self.fleet, self.telemetry.decisions)
        self.metrics.register(self._gauges)
        self.live = LiveStack(self.telemetry, self.fleet, self.routes, settings.trace.ui_url)
        self.tokens = TokenRatio()
        self.upstream = Upstream(
            connect_timeout_s=settings.forward.connect_timeout,
            resolve=resolve_unless(partial(odd_address, allowed=networks(settings.instance_networks))),
        )
        self.under_way = UnderWay()
        self.admission = admission_of(settings, self.fleet, self.metrics)
        self.admin_token = credential("admin.token_file", settings.admin.token, settings.admin.token_file, least=16)
        secret = credential("tenants.secret_file", settings.tenants.secret, settings.tenants.secret_file, least=16)
        self._salt = None
        if settings.tenants.cache_salt == "tenant" and secret is not None:
            self._salt = TenantSalt(settings.tenant_header.lower(), secret)
        self.is_ready = False
        #: Set when the router ends; a thread that tries a policy reads it.
        self._ending = threading.Event()

    def _gauges(self) -> Iterator[Metric]:
        """Yield the metrics that are read when the page is rendered."""
        yield from fleet_gauges(self.fleet.instances, self.fleet.clock())
        yield from cache_gauges(self.fleet.instances, self.caches.disagreements())
        yield from policy_gauges(self.policies.in_force())
        yield from refusal_gauges(self.rejections.refusing())
        yield computed(names.SPANS_DROPPED, self.tracing.dropped)
        yield computed(names.LOG_LINES_LOST, lost_lines())
        yield computed(names.PANICS, self.fleet.panics)
        if self.sources.indexes:
            yield from index_gauges(self.sources.indexes.figures())
        if self.sources.peers is not None:
            yield from peer_gauges(self.sources.peers.figures())
        if self.sources.kv_events is not None:
            yield from kv_gauges(self.sources.kv_events.figures())

    def _swapped(self) -> None:
        self.router.follow(self.policies.observed)
        self.records.follow(self.policies.recorded)
        self.admission.room.policy_changed()

    def _restarted(self, instance: Instance) -> None:
        self.fleet.health.restarted(instance)
        self.router.forget(instance)

    def _why_unready(self) -> str:
        if not self.is_ready:
            return "draining" if self._ending.is_set() else "starting"
        return self.fleet.why_unready()

    def _health_routes(self) -> list[Route]:
        """Return `/healthz` and `/readyz` of both ports: liveness, and whether new requests are welcome."""

        async def healthz(_: Request) -> Response:
            return PlainTextResponse("ok\n")

        async def readyz(_: Request) -> Response:
            reason = self._why_unready()
            return PlainTextResponse(f"{reason}\n", 503) if reason else PlainTextResponse("ready\n")

        return [Route("/healthz", healthz, methods=["GET"]), Route("/readyz", readyz, methods=["GET"])]

    def _models(self) -> Iterable[str]:
        served = {name for instance in self.fleet.instances for name in instance.models or ()}
        return served | set(self.settings.models)

    def data_app(self) -> Intake:
        """Return the app of the data port; its lifespan starts and stops the application."""
        settings = self.settings
        proxy = ProxyContext(
            self.router,
            self.upstream,
            self.tokens,
            self.caches,
            Deadlines(
                settings.forward.first_byte_timeout, settings.forward.answer_timeout, settings.forward.idle_timeout
            ),
            settings.response_headers,
        )
        context = EndpointContext(
            proxy,
            self.telemetry.exchanges,
            self.admission,
            ReaderSettings(
                block_size=settings.block_size,
                tenant_header=settings.tenant_header.lower(),
                trust_session_headers=settings.trust_session_headers,
                aliases=settings.models,
            ),
            networks(settings.trusted_proxies),
            self._salt,
            self.under_way,
        )

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            await self.start()
            try:
                yield
            finally:
                await self.stop()

        app = data_app(
            context,
            Models(proxy, self.sources.scraper.models, settings.models, self.telemetry.exchanges),
            self._health_routes(),
            lifespan,
        )
        intake = Intake(app, _data_limits(settings), self.telemetry.exchanges.unreadable)
        saturation = Saturation(self.fleet, self.admission, lambda: intake.connections())
        self.metrics.register(lambda: overload_gauges(saturation.figures()))
        return intake

    def admin_app(self) -> Intake:
        """Return the app of the admin port."""
        app = admin_app(
            fleet=self.fleet,
            decisions=self.telemetry.decisions,
            metrics=self.metrics,
            caches=self.caches,
            routes=[
                *self._health_routes(),
                *live_routes(self.live),
                *drain_routes(self.fleet, self.drains),
                *policy_routes(self.routes, self.telemetry.decisions, self._ending),
                *savings_routes(self.telemetry.outcomes.savings),
                *(placement_routes(self.sources.peers) if self.sources.peers is not None else ()),
            ],
        )
        # The longest bodies on the admin port are batches between routers.
        limits = replace(_data_limits(self.settings), body_bytes=MAX_BATCH_BYTES, connections=ADMIN_CONNECTIONS)
        return Intake(AdminGuard(app, self.admin_token), limits)

    async def start(self) -> None:
        """Start to scrape and to watch the policy files."""
        await self.drains.start()
        await self.request_tokens.start()
        for part in (*self.records.writers, *self.sources.background):
            await part.start()
        if self.sources.indexes.is_restoring:
            # A restored index is valid only for the process it was learnt from.
            await self.sources.scraper.first_look(FIRST_LOOK_S)
            await self.sources.indexes.recall(self.fleet.instances)
        if self.sources.kv_events is not None:
            await self.sources.kv_events.caught_up(self.settings.kv_events.ready_within)
        await self.admission.overload.start()
        await self.live.feed.start()
        await self.at_hand.start()
        await self.policies.start()
        self.is_ready = True
        log.info("smetric.ready")
        notify(self._environ, "READY=1")

    def drain(self) -> None:
        """Accept no new requests; running ones continue."""
        self.is_ready = False
        self._ending.set()
        drain = self.settings.drain
        # Held requests are decided within half of the time, and have the other half for their answers.
        self.admission.room.end_by(asyncio.get_running_loop().time() + (drain.announce + drain.deadline) / 2)
        notify(self._environ, "STOPPING=1")

    async def stop(self) -> None:
        """End what `start` began; traces are sent or dropped within two seconds."""
        self.is_ready = False
        self._ending.set()
        await _end("Feed", self.live.feed.stop())
        await _end("AtHand", self.at_hand.stop())
        await _end("Policies", self.policies.stop())
        await _end("Drains", self.drains.stop())
        for part in (self.admission.overload, *self.sources.background, self.request_tokens):
            await _end(type(part).__name__, part.stop())
        await _end("Upstream", self.upstream.close())
        writers = [_end("Writer", writer.stop()) for writer in self.records.writers]
        await asyncio.gather(_end("Tracing", self.tracing.shutdown()), *writers)


def _data_limits(settings: Settings) -> HttpLimits:
    limits = settings.limits
    return HttpLimits(
        body_bytes=settings.forward.max_body,
        header_count=limits.max_headers,
        header_bytes=limits.max_header_bytes,
        idle_timeout_s=limits.idle_timeout,
        head_timeout_s=limits.head_timeout,
        body_timeout_s=limits.body_timeout,
        send_timeout_s=limits.send_timeout,
        connections=limits.max_connections,
        tenant_header=settings.tenant_header.lower().encode(),
    )


async def _end(part: str, ending: Awaitable[object]) -> None:
    """Await *ending*; an error is logged, so that the other parts still write their files and send their traces."""
    try:
        await ending
    except Exception:
        log.exception("smetric.stop.failed", part=part)


def create_app(settings: Settings) -> App:
    """Return the ASGI app of the data port, for another server; its lifespan starts and stops the router."""
    return Application(settings).data_app()

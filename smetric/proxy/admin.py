"""The admin port: metrics, health, and what operators ask; on its own listener, loopback by default."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from smetric.caches.watch import CacheWatch
from smetric.fleet.fleet import Fleet
from smetric.proxy.admin_route import AdminRoute, as_json, decision_of
from smetric.proxy.readiness import health_routes
from smetric.records.ring import alone
from smetric.telemetry.decisions import KEPT, DecisionLog, brief, full
from smetric.telemetry.metrics import Metrics

#: Decisions listed when no limit is given.
LIMIT = 50
_WHOLE = re.compile(r"[0-9]{1,9}\Z", re.ASCII)


def admin_app(
    *,
    fleet: Fleet,
    decisions: DecisionLog,
    metrics: Metrics,
    caches: CacheWatch,
    why_unready: Callable[[], str],
    routes: Sequence[Route] = (),
) -> Starlette:
    """The admin port's app; everything it shows is handed in, and *routes* of other parts too."""

    async def metrics_page(request: Request) -> Response:
        page, content_type = await metrics.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def list_decisions(request: Request) -> Response:
        text = request.query_params.get("limit", str(LIMIT))
        if not _WHOLE.match(text):
            raise HTTPException(400, f"limit={text[:64]!r}: a whole number is needed; {KEPT} are kept")
        return as_json({"decisions": [brief(record) for record in decisions.recent(int(text))]})

    async def one_decision(request: Request) -> Response:
        return as_json(full(decision_of(request, decisions)))

    async def recorded_decision(request: Request) -> Response:
        line = alone(decision_of(request, decisions))
        if line is None:
            raise HTTPException(500, "this decision cannot be written down; the log says why")
        return Response(line, media_type="application/json")

    async def instances(_: Request) -> Response:
        now = fleet.clock()
        rows = []
        for instance in fleet.instances:
            scrape = instance.scrape
            rows.append(
                {
                    "id": instance.id,
                    "url": instance.url,
                    "models": sorted(instance.models) if instance.models is not None else None,
                    "role": instance.role,
                    "pool": instance.pool,
                    "zone": instance.zone,
                    "healthy": instance.healthy,
                    "draining": instance.draining,
                    "state": instance.state.value,
                    "incarnation": instance.incarnation,
                    "requests": instance.requests(),
                    "own": instance.own,
                    "unprefilled": instance.unprefilled,
                    "running": scrape.running if scrape is not None else None,
                    "waiting": scrape.waiting if scrape is not None else None,
                    "kv_usage": scrape.kv_usage if scrape is not None else None,
                    "scrape_age_s": round(now - scrape.measured_at, 3) if scrape is not None else None,
                    "block_size": instance.cache.block_size,
                    "capacity_tokens": instance.cache.capacity_tokens,
                }
            )
        return as_json({"instances": rows})

    async def cache(_: Request) -> Response:
        return as_json(caches.report())

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        says_nothing = error.detail == HTTPStatus(error.status_code).phrase  # no route has it: Starlette's own words
        text = _unserved(request, error) if says_nothing else error.detail
        return as_json({"error": text}, error.status_code, error.headers)

    return Starlette(
        routes=[
            Route("/metrics", metrics_page),
            *health_routes(why_unready),
            AdminRoute("/admin/decisions", list_decisions, query=("limit",)),
            *routes,
            AdminRoute("/admin/decisions/{id}", one_decision),
            AdminRoute("/admin/decisions/{id}/record", recorded_decision),
            AdminRoute("/admin/instances", instances),
            AdminRoute("/admin/cache", cache),
        ],
        exception_handlers={HTTPException: refuse},
    )


def _unserved(request: Request, error: HTTPException) -> str:
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        return f"this path does not take {request.method[:16]}; it takes {allowed}"
    return "this path is not served here; /admin/ui shows the router, and docs/reference/http-api.md lists all paths"

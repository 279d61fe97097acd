"""Admin port: metrics, health and the questions of operators, on its own listener, loopback by default."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from smetric.fleet.fleet import Fleet
from smetric.fleet.record import DecisionRecord
from smetric.records.recorder import alone
from smetric.sources.shared import MAX_BATCH_BYTES
from smetric.telemetry.decisions import KEPT, DecisionLog, brief, full
from smetric.telemetry.hit_truth import CacheWatch
from smetric.telemetry.metrics import Metrics

Endpoint = Callable[[Request], Awaitable[Response]]
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


class AdminRoute(Route):
    """Route that refuses unknown query parameters; an ignored one would look as if it had been obeyed.

    Args:
        path: as in Starlette.
        endpoint: the handler.
        query: names of allowed parameters, each given at most once.
        methods: GET and HEAD by default.
    """

    def __init__(
        self, path: str, endpoint: Endpoint, *, query: Collection[str] = (), methods: Collection[str] | None = None
    ) -> None:
        async def checked(request: Request) -> Response:
            seen: set[str] = set()
            for name, _ in request.query_params.multi_items():
                if name not in query:
                    known = f"there are {', '.join(query)}" if query else "there are none here"
                    raise HTTPException(400, f"{name[:64]}: no such parameter; {known}")
                if name in seen:
                    raise HTTPException(400, f"{name}: given twice; give it once")
                seen.add(name)
            return await endpoint(request)

        super().__init__(path, checked, methods=methods)


async def body_of(request: Request) -> bytes:
    """Return the body of *request*.

    Raises:
        HTTPException: 413, it is longer than a batch of placements, the largest body here; 400, the client left early.
    """
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BATCH_BYTES:
                raise HTTPException(413, f"a body has at most {MAX_BATCH_BYTES} bytes here")
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its request was complete") from None
    return bytes(body)


def decision_of(request: Request, decisions: DecisionLog) -> DecisionRecord:
    """Return the decision whose id is in the path of *request*.

    Raises:
        HTTPException: 404, it is not kept.
    """
    record = decisions.get(request.path_params["id"])
    if record is None:
        raise HTTPException(404, f"no such decision among the last {KEPT:,}; its trace may still have it")
    return record


def as_json(data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return *data* as indented JSON."""
    return Response(orjson.dumps(data, option=_INDENTED), status, headers, "application/json")


#: Decisions listed without a limit.
LIMIT = 50
_WHOLE = re.compile(r"[0-9]{1,9}\Z", re.ASCII)


def admin_app(
    *,
    fleet: Fleet,
    decisions: DecisionLog,
    metrics: Metrics,
    caches: CacheWatch,
    routes: Sequence[Route] = (),
) -> Starlette:
    """Return the app of the admin port, with the *routes* of other parts."""

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
            raise HTTPException(500, "this decision cannot be recorded; the log says why")
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
        is_default = error.detail == HTTPStatus(error.status_code).phrase  # from Starlette: no route matches
        text = _unserved(request, error) if is_default else error.detail
        return as_json({"error": text}, error.status_code, error.headers)

    return Starlette(
        routes=[
            Route("/metrics", metrics_page),
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

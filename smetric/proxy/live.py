"""The admin port's routes of the live page: its files, the feed, a decision in full, and what-if. All only read."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from smetric.errors import ConfigError
from smetric.live.account import account
from smetric.live.feed import Feed, TooManyViewers
from smetric.live.stack import LiveStack
from smetric.live.viewer import Viewer
from smetric.live.wish import PARAMETERS, Wish
from smetric.policy import PolicyError
from smetric.proxy.admin_route import AdminRoute, decision_of

#: Where the page is; it and what lies below is open, for it holds nothing but the page itself.
PAGE = "/admin/ui"
_FILES = Path(__file__).parents[1] / "ui"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_GUARDED = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_FRESH = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def live_routes(live: LiveStack) -> list[Route]:
    """The page, `/admin/state`, `/admin/decisions/stream`, and below a decision `/account` and `/what-if`."""
    feed, others = live.feed, live.others
    pages = {path.name: (path.read_bytes(), _KINDS[path.suffix]) for path in _FILES.iterdir() if path.suffix in _KINDS}
    tags = {name: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for name, (body, _) in pages.items()}

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in pages:
            raise HTTPException(404, "the page has no such file")
        body, kind = pages[name]
        headers = {**_GUARDED, "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers={**headers, "content-type": kind})

    async def to_page(request: Request) -> Response:
        target = "../ui" if request.url.path.endswith("/ui/") else "admin/ui"  # relative: a proxy may add a prefix
        return RedirectResponse(target, headers=_GUARDED)

    async def state(_: Request) -> Response:
        return _json({**feed.state(), "history": feed.figures.history()})

    async def stream(request: Request) -> Response:
        query = request.query_params
        if (history := query.get("history", "1")) not in ("0", "1"):
            raise HTTPException(400, f"history={history[:64]!r}: 0 or 1")
        if request.method == "HEAD":  # its client waits for no body, and the next request for this one's end
            return Response(headers=_FRESH, media_type="text/event-stream")
        try:
            viewer = feed.join(Wish.of(query), history=history == "1")
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except TooManyViewers as error:
            raise HTTPException(503, f"{error}; close a page") from None
        headers = {**_FRESH, "x-accel-buffering": "no"}
        return StreamingResponse(_watched(feed, viewer), media_type="text/event-stream", headers=headers)

    async def one(request: Request) -> Response:
        return _json(account(decision_of(request, live.decisions)))

    async def what_if(request: Request) -> Response:
        record = decision_of(request, live.decisions)
        name = request.query_params.get("policy")
        if name not in (names := others.names()):
            status, what = (400, "policy: which one?") if name is None else (404, "no such policy;")
            raise HTTPException(status, f"{what} there are {', '.join(names)}")
        try:
            return _json(await others.judge(record, name))
        except (ConfigError, PolicyError) as error:
            raise HTTPException(409, f"policy {name} cannot be used: {error}") from None

    return [
        Route(PAGE, page),
        *(Route(path, to_page) for path in ("/", "/admin", f"{PAGE}/")),
        Route(f"{PAGE}/{{name}}", page),
        AdminRoute("/admin/state", state),
        AdminRoute("/admin/decisions/stream", stream, query=("history", *PARAMETERS)),
        AdminRoute("/admin/decisions/{id}/account", one),
        AdminRoute("/admin/decisions/{id}/what-if", what_if, query=("policy",)),
    ]


async def _watched(feed: Feed, viewer: Viewer) -> AsyncIterator[bytes]:
    try:
        async for message in viewer.messages():
            yield message
    finally:
        feed.leave(viewer)


def _json(data: object) -> Response:
    return Response(orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE), 200, _FRESH, "application/json")

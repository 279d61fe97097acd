"""What the admin port's routes share: their query parameters and no others, bounded bodies, answers in JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from smetric.sources.placement import MAX_BATCH_BYTES
from smetric.telemetry.decisions import KEPT, DecisionLog
from smetric.telemetry.record import DecisionRecord

Endpoint = Callable[[Request], Awaitable[Response]]
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE


class AdminRoute(Route):
    """Asks *endpoint* only what it understands: a parameter that is passed over looks as if it had been obeyed.

    Args:
        path: as Starlette's.
        endpoint: what answers.
        query: names of the parameters that may be given, each once.
        methods: GET and HEAD when not given.
    """

    def __init__(
        self, path: str, endpoint: Endpoint, *, query: Collection[str] = (), methods: Collection[str] | None = None
    ) -> None:
        async def understood(request: Request) -> Response:
            seen: set[str] = set()
            for name, _ in request.query_params.multi_items():
                if name not in query:
                    known = f"there are {', '.join(query)}" if query else "there are none here"
                    raise HTTPException(400, f"{name[:64]}: no such parameter; {known}")
                if name in seen:
                    raise HTTPException(400, f"{name}: given twice; give it once")
                seen.add(name)
            return await endpoint(request)

        super().__init__(path, understood, methods=methods)


async def body_of(request: Request) -> bytes:
    """The body of *request*; nothing on the admin port is longer than what routers tell each other.

    Raises:
        HTTPException: 413, it is longer all the same; 400, the client left before it was whole.
    """
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_BATCH_BYTES:
                raise HTTPException(413, f"a body has at most {MAX_BATCH_BYTES} bytes here")
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its request was whole") from None
    return bytes(body)


def decision_of(request: Request, decisions: DecisionLog) -> DecisionRecord:
    """The decision whose id is in the path of *request*.

    Raises:
        HTTPException: 404, it is not kept.
    """
    record = decisions.get(request.path_params["id"])
    if record is None:
        raise HTTPException(404, f"no such decision among the last {KEPT:,}; its trace may still have it")
    return record


def as_json(data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """*data*, laid out for people too."""
    return Response(orjson.dumps(data, option=_INDENTED), status, headers, "application/json")

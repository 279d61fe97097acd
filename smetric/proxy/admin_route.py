"""A route of the admin port: it knows its query parameters, refuses all others, and answers in JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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


def as_json(data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """*data*, laid out for people too."""
    return Response(orjson.dumps(data, option=_INDENTED), status, headers, "application/json")

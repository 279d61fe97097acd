"""The admin port's route that tells what decisions cost or saved; what is counted is `smetric.telemetry.savings`'s."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from smetric.telemetry.savings import Savings


def savings_routes(savings: Savings) -> list[Route]:
    """`GET /admin/savings`: tokens and seconds saved or lost, by day, policy and rule."""

    async def told(_: Request) -> Response:
        body = orjson.dumps({"savings": savings.report()}, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        return Response(body, media_type="application/json")

    return [Route("/admin/savings", told)]

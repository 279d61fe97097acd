"""The admin port's route that tells what decisions cost or saved; what is counted is `smetric.telemetry.savings`'s."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from smetric.proxy.admin_route import AdminRoute, as_json
from smetric.telemetry.savings import Savings


def savings_routes(savings: Savings) -> list[AdminRoute]:
    """`GET /admin/savings`: tokens and seconds saved or lost, by day, policy and rule."""

    async def told(_: Request) -> Response:
        return as_json({"savings": savings.report()})

    return [AdminRoute("/admin/savings", told)]

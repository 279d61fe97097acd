"""The admin port's routes by which operators drain instances; what draining is, is `smetric.fleet.drains`'s."""

from __future__ import annotations

from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from smetric.fleet.drains import Drains
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.proxy.admin_route import AdminRoute, as_json


def drain_routes(fleet: Fleet, drains: Drains) -> list[AdminRoute]:
    """`POST /admin/instances/{id}/drain` and `…/undrain`; both answer with how the instance stands then."""

    def route(verb: str, act: Callable[[Instance], str]) -> AdminRoute:
        async def change(request: Request) -> Response:
            instance = fleet.get(request.path_params["id"])
            if instance is None:
                raise HTTPException(404, "no instance has this id; GET /admin/instances lists them")
            not_kept = act(instance)
            others = sum(1 for one in fleet.instances if one is not instance and not one.draining)
            answer = {
                "id": instance.id,
                "state": instance.state.value,
                "draining": instance.draining,
                "requests": instance.own,
                "others": others,
                "kept": not not_kept,
                "not_kept_because": not_kept,
            }
            return as_json(answer)

        return AdminRoute(f"/admin/instances/{{id:path}}/{verb}", change, methods=["POST"])

    return [route("drain", drains.drain), route("undrain", drains.undrain)]

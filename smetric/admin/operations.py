"""Admin routes of drains, savings, and the placements that routers share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from smetric.admin.app import AdminRoute, as_json, body_of
from smetric.fleet.drains import Drains
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.sources.shared import OWN, PATH, OwnBatch, UnreadableBatch
from smetric.telemetry.outcomes import Savings

if TYPE_CHECKING:
    from smetric.sources.shared.peers import Peers


def drain_routes(fleet: Fleet, drains: Drains) -> list[AdminRoute]:
    """Return `POST /admin/instances/{id}/drain` and `…/undrain`; both answer with the new state of the instance."""

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


def savings_routes(savings: Savings) -> list[AdminRoute]:
    """Return `GET /admin/savings`: tokens and seconds saved or lost, by day, policy and rule."""

    async def report(_: Request) -> Response:
        return as_json({"savings": savings.report()})

    return [AdminRoute("/admin/savings", report)]


#: Longest time a batch may take to arrive, seconds.
ARRIVAL_S = 5.0


def placement_routes(peers: Peers) -> list[AdminRoute]:
    """Return the routes between routers: `POST` takes a batch (421 if it is its own), `GET` returns an index image."""

    async def take(request: Request) -> Response:
        _admit(request)
        try:
            async with asyncio.timeout(ARRIVAL_S):
                body = await body_of(request)
        except TimeoutError:
            raise HTTPException(408, f"the batch did not arrive within {ARRIVAL_S:g} s") from None
        try:
            await peers.receive(body)
        except UnreadableBatch as error:
            raise HTTPException(400, f"the batch cannot be read: {error}") from None
        except OwnBatch:
            return Response(status_code=OWN)
        return Response(status_code=204)

    async def give(request: Request) -> Response:
        _admit(request)
        return Response(await peers.image(), media_type="application/octet-stream")

    def _admit(request: Request) -> None:
        if not peers.admits(request.headers.get("authorization", "")):
            raise HTTPException(403, "placements are for peers; set the same peers.token everywhere")

    return [AdminRoute(PATH, take, methods=["POST"]), AdminRoute(PATH, give, methods=["GET"])]

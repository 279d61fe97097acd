"""The admin port's routes by which sidecars share placements; what is shared is in `smetric.sources.peers`."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from smetric.proxy.admin_route import AdminRoute, body_of
from smetric.sources.peer import OWN, PATH, OwnBatch
from smetric.sources.peers import Peers
from smetric.sources.placement import UnreadableBatch

#: Longest time a batch may take to arrive, seconds.
ARRIVAL_S = 5.0


def placement_routes(peers: Peers) -> list[AdminRoute]:
    """`POST` takes a batch (204; 421 if this router sent it itself), `GET` gives an image of the index."""

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

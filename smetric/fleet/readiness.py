"""Liveness and readiness of both ports."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from smetric.fleet.fleet import Fleet


def unready(fleet: Fleet, *, is_ready: bool, is_ending: bool) -> str:
    """Why new requests had better go to another router; empty where they need not.

    Only what is certain counts. Instances that are ill, refuse connections or are ejected are tried all the same when
    no others are left (panic), for it may be our view that is wrong, or all of them may be back in a moment; and where
    it is not, other routers see the same, and a gateway without any would have nothing better to say than our 503 with
    Retry-After. Those that are drained or end are never tried.

    Args:
        fleet: the instances.
        is_ready: it has started and does not end yet.
        is_ending: it ends.
    """
    if not is_ready:
        return "draining" if is_ending else "starting"
    fleet.health.settle()
    if not fleet.instances:
        return "no instance is configured"
    return "all instances are drained or stopping" if all(one.draining for one in fleet.instances) else ""


def health_routes(why_not: Callable[[], str]) -> list[Route]:
    """The routes.

    Args:
        why_not: as `unready` says.
    """

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason = why_not()
        return PlainTextResponse(f"{reason}\n", 503) if reason else PlainTextResponse("ready\n")

    return [Route("/healthz", healthz, methods=["GET"]), Route("/readyz", readyz, methods=["GET"])]

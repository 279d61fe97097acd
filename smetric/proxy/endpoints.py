"""Endpoints of the data port."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.routing import Router as PathRouter

from smetric import names
from smetric.config.settings import PATHS
from smetric.config.values import Network
from smetric.errors import HttpError, NoCandidate
from smetric.fleet.exchange import Exchanges
from smetric.fleet.instance import Instance
from smetric.fleet.readiness import health_routes
from smetric.http.answer import AnswerBroken, UpstreamFailed
from smetric.http.headers import VIA, App, Headers, Message, Receive, Scope, Send, request_headers
from smetric.http.transaction import ClientGone
from smetric.proxy.admission import Admission, Permit
from smetric.proxy.client import Client
from smetric.proxy.context import ProxyContext
from smetric.proxy.error_response import send_error
from smetric.proxy.forward import Forwarding
from smetric.proxy.tenant_salt import TenantSalt
from smetric.request.body import patch_model
from smetric.request.reader import Reading, parse
from smetric.request.request import Api, InferenceRequest
from smetric.telemetry.metrics import OTHER

# Counts and logs the answers of an endpoint that concerns no instance in particular, such as the list of models.
#
# No instance answers them, and they have no trace.


class Counted:
    """An endpoint that concerns no instance in particular: its answers are counted and logged.

    Args:
        app: what answers.
        route: the path template.
        exchanges: count and log.
    """

    def __init__(self, app: App, route: str, exchanges: Exchanges) -> None:
        self._app = app
        self._route = route
        self._exchanges = exchanges

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = self._exchanges.begin(scope, self._route, trusted=False, is_routed=False)
        status, bytes_out = 500, 0

        async def seen(message: Message) -> None:
            nonlocal status, bytes_out
            if message["type"] == "http.response.start":
                status = message["status"]
            elif scope["method"] != "HEAD":
                bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            exchange.end(status, bytes_out=bytes_out, error_type=str(status) if status >= 500 else "")


# `GET /v1/models`: the model lists of all instances, merged by id; cards pass with every field as it came.

#: Bounds on asking one instance: seconds, with the wait for its turn, and bytes; and how many are asked at a time,
#: whoever wants to know: each takes a connection, which requests may want.
DEADLINE_S = 2.0
MAX_BYTES = 1024 * 1024
MOST_AT_ONCE = 64


#: A model's fields, by name; what they say is not read.
_Card = dict[str, Any]


class _List(msgspec.Struct):
    data: list[dict[str, msgspec.Raw]]


_read = msgspec.json.Decoder(_List).decode

#: What of a client's request goes along: who it is, and the routers passed.
_ASKED_WITH = frozenset({b"authorization", VIA})


class Models:
    """The endpoint.

    Args:
        plane: whom to ask, and how.
        aliases: names the router answers for, to the model behind each.
    """

    def __init__(self, plane: ProxyContext, aliases: Mapping[str, str]) -> None:
        self._plane = plane
        self._aliases = aliases
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with every card that any instance names; an alias gets the card of the model behind it."""
        try:
            cards = await self._cards(request_headers(scope["headers"], self._plane.id))
        except HttpError as error:
            await send_error(send, scope["path"], error)
            return
        body = msgspec.json.encode({"object": "list", "data": cards})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _cards(self, headers: Headers) -> list[_Card]:
        """One card for each name; *headers* are those that would go to an instance with the client's request.

        Raises:
            NoCandidate: nobody answers.
        """
        all_instances = self._plane.router.fleet.instances
        instances = [i for i in all_instances if i.healthy and not i.draining] or all_instances
        asked_with = [field for field in headers if field[0] in _ASKED_WITH]
        lists = await asyncio.gather(*(self._ask(instance, asked_with) for instance in instances))
        if all(cards is None for cards in lists):
            raise NoCandidate("no instance answers with its models")
        merged: dict[str, _Card] = {}
        for cards in lists:
            for name, card in cards or ():
                merged.setdefault(name, card)
        for alias, model in self._aliases.items():
            if model in merged and alias not in merged:
                merged[alias] = {**merged[model], "id": alias, "parent": model}
        return list(merged.values())

    async def _ask(self, instance: Instance, headers: Headers) -> list[tuple[str, _Card]] | None:
        """The cards of one instance by their ids, or None when it does not answer with any in time."""
        try:
            async with asyncio.timeout(DEADLINE_S), self._turns:
                answer = await self._plane.upstream.send(instance, "GET", b"/v1/models", headers, None)
                try:
                    body = bytearray()
                    while piece := await answer.read():
                        body += piece
                        if len(body) > MAX_BYTES:
                            return None
                    answer.finish()
                finally:
                    answer.close()
            if answer.status != 200:
                return None
            named = [(msgspec.json.decode(card["id"]), card) for card in _read(body.decode()).data]
            return [(id, card) for id, card in named if isinstance(id, str)]
        except (TimeoutError, UpstreamFailed, AnswerBroken, ValueError, KeyError, RecursionError):
            return None  # the last three: it is no such list


# The data port's endpoints: what each path is, and the plain ASGI callables that serve it.
#
# Starlette routes; nothing of it is on the way of a byte (its Request and StreamingResponse cost more than all of
# this).

#: Inference paths and their APIs.
INFERENCE: dict[str, Api] = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/messages": Api.MESSAGES,
    "/v1/responses": Api.RESPONSES,
}
#: The other paths that are passed to a candidate. What loads adapters or changes an engine is left out on purpose.
PASSED: tuple[str, ...] = tuple(path for path in PATHS if path not in INFERENCE)
COUNT_TOKENS = "/v1/messages/count_tokens"
STORED_RESPONSE = "/v1/responses/{id}"
CANCEL_RESPONSE = "/v1/responses/{id}/cancel"

#: The status logged for a client that did not stay to the end of its answer.
CLIENT_CLOSED = 499
#: Seconds that a client which is cut off may take to be told so.
LAST_WORDS_S = 1.0
CUT_OFF = HttpError(
    503,
    "the router stops, and this request outlived the time it gives; send it again",
    "shutting_down",
    retry_after_s=1.0,
)


class UnderWay:
    """The requests that are being served, so that what outlives the drain deadline can be cut off."""

    def __init__(self) -> None:
        #: Each serves one.
        self.tasks: set[asyncio.Task[Any]] = set()
        #: How many were cut off.
        self.cut = 0

    def cut_off(self) -> int:
        """End all of them, each client being told in its API's own shape; returns how many there are."""
        for task in self.tasks:
            task.cancel()
        return len(self.tasks)


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """What endpoints need besides the plane.

    Args:
        plane: routes and sends.
        exchanges: one per request.
        admission: who is let in.
        reading: how requests are read.
        trusted: peers whose trace is continued, and whose word on tenants is taken.
        salt: keeps tenants apart; None: `cache_salt` passes as it comes.
        under_way: the requests that are being served.
    """

    plane: ProxyContext
    exchanges: Exchanges
    admission: Admission
    reading: Reading
    trusted: Sequence[Network]
    salt: TenantSalt | None
    under_way: UnderWay


class Inference:
    """An endpoint that reads a body, routes it and forwards it.

    Args:
        door: shared parts.
        route: the path template, for metrics and spans.
        api: wire format of the body.
        leased: whether the request counts as load and is decided by the policy.
    """

    def __init__(self, door: EndpointContext, route: str, api: Api, *, leased: bool = True) -> None:
        self._door = door
        self._route = route
        self._api = api
        self._leased = leased
        self._is_trusted = lru_cache(4096)(self._look_up_peer)

    def _look_up_peer(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if address.version == 6 and address.ipv4_mapped is not None:  # where one socket listens for both
            address = address.ipv4_mapped
        return any(address.version == network.version and address in network for network in self._door.trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. *receive* is the intake's `Client`, and *send* its own."""
        client, door = cast(Client, receive), self._door
        peer = scope.get("client")
        is_trusted = peer is not None and self._is_trusted(peer[0])
        exchange = door.exchanges.begin(scope, self._route, trusted=is_trusted)
        door.under_way.tasks.add(client.task)
        forwarding: Forwarding | None = None
        permit: Permit | None = None
        try:
            permit = door.admission.admit(scope["headers"], leased=self._leased)
            body = await client.body(permit)
            if door.salt is not None and self._leased:
                body = door.salt.salted(self._api, scope["headers"], body, trusted=is_trusted)
            request = self._read(scope, body)
            if (model := door.reading.aliases.get(request.model)) is not None:
                request.alias, request.model = request.model, model
                body = patch_model(body, model)
            forwarding = Forwarding(door.plane, scope, client, exchange, request, body or None, permit, self._leased)
            del body  # it is let go as soon as an answer begins
            await forwarding.run()
        except HttpError as error:
            exchange.end(error.status, error_type=error.kind)  # whether or not the client stays to hear of it
            await send_error(send, scope["path"], error)
        except ClientGone:
            exchange.end(CLIENT_CLOSED, error_type=names.CLIENT_GONE)
        except asyncio.CancelledError:
            expired = client.watchdog.expired
            bytes_out = forwarding.bytes_out if forwarding is not None else 0
            if expired == "body":
                exchange.end(408, error_type="request_timeout")  # the intake says so
            elif expired is not None:
                exchange.end(CLIENT_CLOSED, bytes_out=bytes_out, error_type=names.CLIENT_STALLED)
            elif client.gone:
                exchange.end(CLIENT_CLOSED, bytes_out=bytes_out, error_type=names.CLIENT_GONE)
            else:
                exchange.end(client.status or CUT_OFF.status, bytes_out=bytes_out, error_type=names.SHUTDOWN)
                await self._cut_off(scope["path"], client, forwarding)
            raise
        finally:
            if permit is not None:
                permit.end()
            door.under_way.tasks.discard(client.task)
            exchange.end(client.status or 500, error_type="internal_error")  # only if nothing above has ended it

    async def _cut_off(self, path: str, client: Client, forwarding: Forwarding | None) -> None:
        """The router stops before this request has ended: say so, and end without the mark of a good end."""
        self._door.under_way.cut += 1
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                if not client.status:
                    client.is_last = True
                    await send_error(client.send, path, CUT_OFF)
                elif forwarding is not None:
                    await forwarding.tell(CUT_OFF)
        except TimeoutError:
            pass  # it does not read; the connection is closed over its head

    def _read(self, scope: Scope, body: bytes) -> InferenceRequest:
        request = parse(self._api, body, scope["headers"], self._door.plane.tokens, self._door.reading)
        params = scope.get("path_params")
        if params and "id" in params:
            request.pinned_to = params["id"]
        return request


def data_app(
    door: EndpointContext,
    models: App,
    why_unready: Callable[[], str],
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]],
) -> App:
    """The data port's app: `/v1/…` and health, nothing else.

    Args:
        door: shared parts.
        models: the endpoint of `GET /v1/models`, an ASGI callable.
        why_unready: why new requests are not welcome; empty if they are.
        lifespan: starts and stops what runs beside requests.
    """
    routes: list[Route] = [
        *(Route(path, Inference(door, path, api), methods=["POST"]) for path, api in INFERENCE.items()),
        Route("/v1/models", Counted(models, "/v1/models", door.exchanges), methods=["GET"]),
        Route(COUNT_TOKENS, Inference(door, COUNT_TOKENS, Api.MESSAGES, leased=False), methods=["POST"]),
        *(Route(path, Inference(door, path, Api.OTHER), methods=["POST"]) for path in PASSED),
        Route(STORED_RESPONSE, Inference(door, STORED_RESPONSE, Api.OTHER, leased=False), methods=["GET", "DELETE"]),
        Route(CANCEL_RESPONSE, Inference(door, CANCEL_RESPONSE, Api.OTHER, leased=False), methods=["POST"]),
        *health_routes(why_unready),
    ]
    # A redirect would take its host from the client.
    router = PathRouter(routes, lifespan=lifespan, redirect_slashes=False)
    posted = {route.path: route.endpoint for route in routes if route.methods == {"POST"} and "{" not in route.path}
    return _Routed(router, posted, door.exchanges)


class _Routed:
    """Starlette's router, and answers in the API's own shape where it finds no endpoint.

    Starlette's application would wrap every request, and every message of its answer, in two middlewares for that.

    Args:
        router: knows all paths.
        posted: the endpoints of fixed paths, to which nearly all requests are posted: found without asking the router.
        exchanges: count and log a request that has no endpoint.
    """

    def __init__(self, router: PathRouter, posted: Mapping[str, App], exchanges: Exchanges) -> None:
        self._router = router
        self._posted = posted
        self._exchanges = exchanges

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = self._posted.get(scope["path"]) if scope.get("method") == "POST" else None
        return endpoint(scope, receive, send) if endpoint is not None else self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # the router then raises what it cannot serve
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            known = {404: "this path is not served here", 405: "this path does not take this method"}
            told = HttpError(error.status_code, known.get(error.status_code, error.detail), "invalid_request_error")
            fields = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
            exchange = self._exchanges.begin(scope, OTHER, trusted=False, is_routed=False)
            exchange.end(told.status, error_type=told.kind)
            await send_error(send, scope["path"], told, fields)

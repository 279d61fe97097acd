"""Endpoints of the data port: the paths and the plain ASGI callables that serve them.

Starlette routes. Its Request and StreamingResponse are not used: they take more time than all of the code here.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

import msgspec
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.routing import Router as PathRouter

from smetric import names
from smetric.config.credential import Credential
from smetric.config.settings import PATHS
from smetric.config.values import Network
from smetric.errors import UNREADABLE, HttpError, NoCandidate, RequestError, unknown_model
from smetric.fleet.exchange import Exchanges
from smetric.fleet.instance import Instance
from smetric.http.answer import AnswerBroken, UpstreamFailed
from smetric.http.headers import VIA, App, Headers, Receive, Scope, Send, first, request_headers
from smetric.http.limits import TOO_SLOW
from smetric.http.transaction import ClientGone
from smetric.proxy.admission import Admission, Permit
from smetric.proxy.context import ProxyContext
from smetric.proxy.error_response import send_error
from smetric.proxy.forward import Forwarding
from smetric.proxy.intake import Client
from smetric.request.memo import screen
from smetric.request.reader import ReaderSettings, members, parse, patch_member, patch_model
from smetric.request.request import Api, InferenceRequest
from smetric.sources.models import MAX_BYTES, Card, ModelLists, read_cards
from smetric.telemetry.metrics import OTHER

#: Inference paths and their APIs.
INFERENCE: dict[str, Api] = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/messages": Api.MESSAGES,
    "/v1/responses": Api.RESPONSES,
}
#: Other paths that are passed to a candidate and charged. Paths that change an engine are left out on purpose.
PASSED: tuple[str, ...] = tuple(path for path in PATHS if path not in INFERENCE)
#: Those of them whose bodies may hold fields that no client may set, so that they are always read.
GENERATING = frozenset({"/v1/chat/completions/batch", "/v1/systemone", "/generative_scoring", "/inference/v1/generate"})
#: Paths that cause no load, and their APIs.
COUNTING: dict[str, Api] = {
    "/v1/messages/count_tokens": Api.MESSAGES,
    "/tokenize": Api.OTHER,
    "/detokenize": Api.OTHER,
}
MODELS = "/v1/models"
#: Path that instances are asked about for the preflight of a path that the router answers itself.
PREFLIGHT = b"/v1/chat/completions"
STORED_RESPONSE = "/v1/responses/{id}"
CANCEL_RESPONSE = "/v1/responses/{id}/cancel"

#: Status that is logged for a client that disconnects before the end of its answer.
CLIENT_CLOSED = 499
#: Longest time to send an error to a client that is cut off, seconds.
LAST_WORDS_S = 1.0
CUT_OFF = HttpError(
    503,
    "the router stops, and this request takes longer than the drain deadline; send it again",
    "shutting_down",
    retry_after_s=1.0,
)

#: Longest name of a tenant, bytes.
MAX_TENANT_BYTES = 256

#: Longest request for the models of one instance, seconds with the wait for its turn.
MODELS_TIMEOUT_S = 1.0
#: Answer of an instance that refuses the client's credentials.
REFUSED: Mapping[str, Card] = MappingProxyType({})
#: Bound on such requests at a time, for all clients: each takes a connection that inference may need.
MAX_MODELS_REQUESTS = 64
#: Client's header fields that go with them.
_ASKED_WITH = frozenset({b"authorization", b"x-api-key", VIA})

#: Fields by which a server lets web pages read its answer.
_READABLE = frozenset({b"access-control-allow-origin", b"access-control-allow-credentials", b"vary"})

_read_string = msgspec.json.Decoder(str | None).decode


class TenantSalt:
    """Salts requests by the tenant that the gateway names.

    Args:
        header: header of the gateway with the name of the tenant, in lower case.
        secret: key of the salts, so that clients cannot compute them.
    """

    def __init__(self, header: str, secret: Credential) -> None:
        self._header = header.encode()
        self._shown = header
        self._secret = secret

    def salted(self, api: Api, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, trusted: bool) -> bytes:
        """Return *body* with a new `cache_salt`: the HMAC-SHA256 of the tenant and of the client's own salt, if any.

        Raises:
            RequestError: no trusted proxy names the tenant, or the client's salt is no string.
        """
        named = [value for name, value in headers if name == self._header] if trusted else []
        if len(named) != 1 or not 0 < len(named[0]) <= MAX_TENANT_BYTES:
            raise RequestError(
                f"a trusted proxy must name the tenant, once, in `{self._shown}`", status=403, kind="permission_error"
            )
        if api is Api.OTHER and (first(headers, b"content-type") or b"").lower().startswith(b"multipart/"):
            return body  # a file to transcribe has no prefix to share
        found = members(screen(body).body)
        try:
            sent = _read_string(found.get("cache_salt", b"null"))
        except msgspec.DecodeError:
            raise RequestError("`cache_salt` must be a string", param="cache_salt") from None
        tenant = named[0]
        signed = b"%d:%b%b" % (len(tenant), tenant, b"" if sent is None else b"+" + sent.encode())
        digest = hmac.digest(self._secret.text.encode(), signed, "sha256")
        return patch_member(body, "cache_salt", base64.urlsafe_b64encode(digest)[:43].decode())


class UnderWay:
    """Requests that are being served, so that those that outlive the drain deadline can be cut off."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()
        #: Number of requests that were cut off.
        self.cut = 0

    def cut_off(self) -> int:
        """End all requests, each with an error in its API's own shape; return their number."""
        for task in self.tasks:
            task.cancel()
        return len(self.tasks)


@dataclass(frozen=True, slots=True)
class EndpointContext:
    """Shared dependencies of the inference endpoints.

    Args:
        proxy: router, upstream client, timeouts, retry budget.
        exchanges: makes an exchange for each request.
        admission: admission control.
        reading: how requests are read.
        trusted: networks of peers whose trace is continued and whose tenant names count.
        salt: keeps tenants apart; None: `cache_salt` passes as it is.
        under_way: requests that are being served.
    """

    proxy: ProxyContext
    exchanges: Exchanges
    admission: Admission
    reading: ReaderSettings
    trusted: Sequence[Network]
    salt: TenantSalt | None
    under_way: UnderWay


class Inference:
    """Endpoint that reads a body, routes the request and forwards it.

    Args:
        context: shared dependencies.
        route: the path template, for metrics and spans.
        api: wire format of the body.
        leased: whether requests count as load and are decided by the policy.
    """

    def __init__(self, context: EndpointContext, route: str, api: Api, *, leased: bool = True) -> None:
        self._context = context
        self._route = route
        self._api = api
        self._leased = leased
        self._is_trusted = lru_cache(4096)(self._look_up_peer)

    def _look_up_peer(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if address.version == 6 and address.ipv4_mapped is not None:  # one socket may listen for both
            address = address.ipv4_mapped
        return any(address.version == network.version and address in network for network in self._context.trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. *receive* is the `Client` that the intake made, and *send* its method."""
        client, context = cast(Client, receive), self._context
        peer = scope.get("client")
        is_trusted = peer is not None and self._is_trusted(peer[0])
        exchange = context.exchanges.begin(scope, self._route, trusted=is_trusted)
        context.under_way.tasks.add(client.task)
        forwarding: Forwarding | None = None
        permit: Permit | None = None
        try:
            reading = None if client.complete else client.watchdog
            permit = context.admission.admit(scope["headers"], leased=self._leased, reading=reading)
            body = await client.body(permit)
            if context.salt is not None and self._leased:
                body = context.salt.salted(self._api, scope["headers"], body, trusted=is_trusted)
            request = self._read(scope, body)
            if (model := context.reading.aliases.get(request.model)) is not None:
                request.alias, request.model = request.model, model
                body = patch_model(body, model, request.model_span)
            forwarding = Forwarding(context.proxy, scope, client, exchange, request, body or None, permit, self._leased)
            del body  # it is let go as soon as an answer begins
            await forwarding.run()
        except HttpError as error:
            exchange.end(error.status, error_type=error.kind)  # also if the client does not stay for the answer
            await send_error(send, scope["path"], error)
        except ClientGone:
            exchange.end(CLIENT_CLOSED, error_type=names.CLIENT_GONE)
        except asyncio.CancelledError:
            expired = client.watchdog.expired
            bytes_out, usage = (forwarding.bytes_out, forwarding.usage) if forwarding is not None else (0, None)
            if expired in ("body", TOO_SLOW):
                exchange.end(408, error_type="request_timeout")  # the intake answers
            elif expired is not None:
                exchange.end(CLIENT_CLOSED, bytes_out=bytes_out, usage=usage, error_type=names.CLIENT_STALLED)
            elif client.gone:
                exchange.end(CLIENT_CLOSED, bytes_out=bytes_out, usage=usage, error_type=names.CLIENT_GONE)
            else:
                status = client.status or CUT_OFF.status
                exchange.end(status, bytes_out=bytes_out, usage=usage, error_type=names.SHUTDOWN)
                await self._cut_off(scope["path"], client, forwarding)
            raise
        finally:
            if permit is not None:
                permit.end()
            context.under_way.tasks.discard(client.task)
            if not exchange.status:  # nothing above has ended it
                exchange.end(client.status or 500, error_type="internal_error")

    async def _cut_off(self, path: str, client: Client, forwarding: Forwarding | None) -> None:
        """Send the error of a router that stops. The answer then lacks its end marker."""
        self._context.under_way.cut += 1
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                if not client.status:
                    client.is_last = True
                    await send_error(client.send, path, CUT_OFF)
                elif forwarding is not None:
                    await forwarding.append_error(CUT_OFF)
        except TimeoutError:
            pass  # the client does not read; its connection is closed anyway

    def _read(self, scope: Scope, body: bytes) -> InferenceRequest:
        request = parse(self._api, body, scope["headers"], self._context.proxy.tokens, self._context.reading)
        params = scope.get("path_params")
        if params and "id" in params:
            request.pinned_to = params["id"]
        if not request.model and not request.pinned_to:
            self._require_model(request)
        return request

    def _require_model(self, request: InferenceRequest) -> None:
        """Refuse a request that names no model where that leaves open which instances can serve it."""
        fleet = self._context.proxy.router.fleet
        if request.unread:
            if self._route in GENERATING or not fleet.serves_alike():
                raise RequestError(request.unread)
        elif not fleet.has_common_model():
            raise RequestError(
                "`model` is missing, and the instances here serve different models; name one that GET /v1/models lists",
                param="model",
            )


class Preflight(Inference):
    """Endpoint of `OPTIONS`, which browsers send before a request.

    Any instance answers: which pages may send is a setting of the engines. It holds for all their paths, so that the
    path of chat stands for the paths that the router answers itself.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self._route.startswith(MODELS):
            scope["raw_path"] = PREFLIGHT
        await super().__call__(scope, receive, send)

    def _read(self, scope: Scope, body: bytes) -> InferenceRequest:
        return parse(self._api, body, (), self._context.proxy.tokens, self._context.reading)


class Models:
    """Endpoints `GET /v1/models` and `GET /v1/models/{id}`: the models that instances serve.

    They are answered from the lists that the router keeps. Instances that show theirs only to clients with a key are
    asked with the client's.

    Args:
        context: instances and the client that asks them.
        lists: what is known of their models.
        aliases: aliases of models, and the model behind each.
        exchanges: count and log the answers.
    """

    def __init__(
        self, context: ProxyContext, lists: ModelLists, aliases: Mapping[str, str], exchanges: Exchanges
    ) -> None:
        self._context = context
        self._lists = lists
        self._aliases = aliases
        self._exchanges = exchanges
        self._turns = asyncio.Semaphore(MAX_MODELS_REQUESTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with all cards, every field as it came, or with that of one model."""
        exchange = self._exchanges.begin(scope, "/v1/models", trusted=False, is_routed=False)
        status, bytes_out = 500, 0
        try:
            cards = await self._cards(request_headers(scope["headers"], self._context.id))
            name = scope.get("path_params", {}).get("id")
            if name is not None and name not in cards:
                raise unknown_model(name)
            body = msgspec.json.encode(
                {"object": "list", "data": list(cards.values())} if name is None else cards[name]
            )
            status, bytes_out = 200, len(body) if scope["method"] != "HEAD" else 0
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            if (origin := first(scope["headers"], b"origin")) is not None:
                headers += await self._readable_by(origin)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})
        except HttpError as error:
            status = error.status
            await send_error(send, scope["path"], error)
        finally:
            exchange.end(status, bytes_out=bytes_out, error_type=str(status) if status >= 500 else "")

    async def _readable_by(self, origin: bytes) -> Headers:
        """Return the fields by which an instance lets pages of *origin* read its answers; none if it is silent."""
        asked = [(b"origin", origin), (b"access-control-request-method", b"GET")]
        instances = self._context.router.fleet.instances
        instance = next((one for one in instances if one.healthy), instances[0])
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S), self._turns:
                answer = await self._context.upstream.send(instance, "OPTIONS", PREFLIGHT, asked, None)
                answer.close()
        except (TimeoutError, UpstreamFailed):
            return []
        return [(name.lower(), value) for name, value in answer.headers if name.lower() in _READABLE]

    async def _cards(self, headers: Headers) -> dict[str, Card]:
        """Return one card for each name; *headers* are those that would go to an instance with the client's request.

        An alias gets the card of the model behind it.

        Raises:
            NoCandidate: no list is known.
            HttpError: 401, all instances that answer refuse the client's credentials.
        """
        await self._lists.renew()
        all_instances = self._context.router.fleet.instances
        instances = [i for i in all_instances if i.healthy and not i.draining] or all_instances
        known = [self._lists.cards(instance) for instance in instances if not self._lists.needs_key(instance)]
        asked_with = [field for field in headers if field[0] in _ASKED_WITH]
        asked = await asyncio.gather(*(self._ask(i, asked_with) for i in instances if self._lists.needs_key(i)))
        lists = [cards for cards in (*known, *asked) if cards is not None and cards is not REFUSED]
        if not lists:
            if any(cards is REFUSED for cards in asked):
                raise HttpError(401, "the instances refuse this API key; send one they take", "authentication_error")
            raise NoCandidate("no instance answers with its models")
        merged: dict[str, Card] = {}
        for cards in lists:
            for name, card in cards.items():
                merged.setdefault(name, card)
        for alias, model in self._aliases.items():
            if model in merged and alias not in merged:
                merged[alias] = {**merged[model], "id": alias, "parent": model}
        return merged

    async def _ask(self, instance: Instance, headers: Headers) -> Mapping[str, Card] | None:
        """Return the models of an instance; None if it does not answer in time with a list, or `REFUSED`."""
        try:
            async with asyncio.timeout(MODELS_TIMEOUT_S), self._turns:
                answer = await self._context.upstream.send(instance, "GET", b"/v1/models", headers, None)
                try:
                    body = bytearray()
                    while piece := await answer.read():
                        body += piece
                        if len(body) > MAX_BYTES:
                            return None
                    answer.finish()
                finally:
                    answer.close()
            if answer.status in (401, 403):
                return REFUSED
            return read_cards(bytes(body)) if answer.status == 200 else None
        except (TimeoutError, UpstreamFailed, AnswerBroken, ValueError, *UNREADABLE):
            return None  # the last ones: the body is no such list


def data_app(
    context: EndpointContext,
    models: Models,
    health: Sequence[Route],
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]],
) -> App:
    """Return the app of the data port: engines' inference paths and health, nothing else.

    Args:
        context: shared dependencies.
        models: the endpoint of `GET /v1/models`.
        health: routes of liveness and readiness.
        lifespan: starts and stops what runs beside requests.
    """
    routes: list[Route] = [
        *(Route(path, Inference(context, path, api), methods=["POST"]) for path, api in INFERENCE.items()),
        Route(MODELS, models, methods=["GET"]),
        Route(f"{MODELS}/{{id:path}}", models, methods=["GET"]),
        *(Route(path, Inference(context, path, api, leased=False), methods=["POST"]) for path, api in COUNTING.items()),
        *(Route(path, Inference(context, path, Api.OTHER), methods=["POST"]) for path in PASSED),
        Route(STORED_RESPONSE, Inference(context, STORED_RESPONSE, Api.OTHER, leased=False), methods=["GET", "DELETE"]),
        Route(CANCEL_RESPONSE, Inference(context, CANCEL_RESPONSE, Api.OTHER, leased=False), methods=["POST"]),
    ]
    preflights = (
        Route(path, Preflight(context, path, Api.OTHER, leased=False), methods=["OPTIONS"])
        for path in dict.fromkeys(route.path for route in routes)
    )
    routes += [*preflights, *health]
    # A redirect would take its host from the client.
    router = PathRouter(routes, lifespan=lifespan, redirect_slashes=False)
    posted = {route.path: route.endpoint for route in routes if route.methods == {"POST"} and "{" not in route.path}
    return _Routed(router, posted, context.exchanges)


class _Routed:
    """Starlette's router, with errors in the API's own shape for paths without an endpoint.

    Starlette's application would wrap every request, and every message of its answer, in two middlewares for that.

    Args:
        router: routes all paths.
        posted: endpoints of fixed paths that take POST, which most requests use: found without the router.
        exchanges: count and log requests without an endpoint.
    """

    def __init__(self, router: PathRouter, posted: Mapping[str, App], exchanges: Exchanges) -> None:
        self._router = router
        self._posted = posted
        self._exchanges = exchanges

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = self._posted.get(scope["path"]) if scope.get("method") == "POST" else None
        return endpoint(scope, receive, send) if endpoint is not None else self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise what it cannot serve
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            texts = {404: "this path is not served here", 405: "this path does not take this method"}
            problem = HttpError(error.status_code, texts.get(error.status_code, error.detail), "invalid_request_error")
            fields = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
            exchange = self._exchanges.begin(scope, OTHER, trusted=False, is_routed=False)
            exchange.end(problem.status, error_type=problem.kind)
            await send_error(send, scope["path"], problem, fields)

"""HTTP interface of an emulated instance: an ASGI app with vLLM's routes, headers and errors.

The bodies of each API are in `completions`, `messages` and `responses`; `fleet` listens.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from smetric.lab.emulator import metrics, prompt
from smetric.lab.emulator.call import (
    INVALID,
    EmulatedCall,
    EngineError,
    EngineLimits,
    Fields,
    InvalidBodyError,
    UnreadableBodyError,
    check_model,
    new_id,
)
from smetric.lab.emulator.completions import ChatAnswer, CompletionAnswer, parse_chat, parse_completion
from smetric.lab.emulator.instance import EmulatedAnswer, EmulatedGeneration, EmulatedInstance
from smetric.lab.emulator.messages import MessageAnswer, count_tokens, parse_message
from smetric.lab.emulator.responses import ResponseAnswer, no_such_response, parse_response

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

#: Maximum size of a request body, bytes.
MAX_BODY = 64 << 20
JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class EmulatedApi:
    """API that generates: parser of its requests, writer of its answers, and prefix of its ids."""

    parse: Callable[[Fields, EngineLimits], EmulatedCall]
    answer: Callable[[EmulatedGeneration], EmulatedAnswer]
    id_prefix: str


GENERATORS = {
    "/v1/chat/completions": EmulatedApi(parse_chat, ChatAnswer, "chatcmpl-"),
    "/v1/completions": EmulatedApi(parse_completion, CompletionAnswer, "cmpl-"),
    "/v1/messages": EmulatedApi(parse_message, MessageAnswer, "chatcmpl-"),
    "/v1/responses": EmulatedApi(parse_response, ResponseAnswer, "resp_"),
}


@dataclass(slots=True)
class EmulatedExchange:
    """Request, and the means to answer it."""

    path: str
    headers: dict[bytes, bytes]
    request_id: str
    receive: Receive
    send: Send

    async def body(self) -> bytes:
        """Return the whole request body.

        Raises:
            EngineError: it is larger than `MAX_BODY` (413).
            ConnectionResetError: the client disconnected.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError("the client disconnected while it sent its request")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY:
                raise EngineError(413, f"The body is larger than {MAX_BODY} bytes.", "Request Entity Too Large")
            if not message.get("more_body", False):
                return b"".join(parts)

    async def fields(self) -> Fields:
        """Return the request body as a JSON object."""
        body = await self.body()
        media_type = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if body and media_type != b"application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise EngineError(400, message, INVALID)
        return Fields.of_body(body)

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers, with those of uvicorn and vLLM."""
        common = [(b"server", b"uvicorn"), (b"vary", b"Origin"), (b"x-request-id", self.request_id.encode("latin-1"))]
        await self.send({"type": "http.response.start", "status": status, "headers": [*common, *headers]})

    async def chunk(self, body: bytes, *, more: bool = True) -> None:
        """Send a part of the body; without *more* it is the last one."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def reply(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send a whole answer."""
        await self.start(status, [(b"content-length", b"%d" % len(body)), *headers])
        await self.chunk(body, more=False)


class EmulatedServer:
    """ASGI app of one instance."""

    def __init__(self, instance: EmulatedInstance) -> None:
        self._instance = instance
        self._routes: dict[str, dict[str, Callable[[EmulatedExchange], Awaitable[None]]]] = {
            "/health": {"GET": self._empty},
            "/ping": {"GET": self._empty, "POST": self._empty},
            "/version": {"GET": self._json(lambda: {"version": "0.32.0"})},
            "/metrics": {"GET": self._metrics},
            "/load": {"GET": self._json(lambda: {"server_load": instance.open_requests})},
            "/v1/models": {"GET": self._json(lambda: models(instance))},
            "/v1/messages/count_tokens": {"POST": self._query(count_tokens)},
            "/tokenize": {"POST": self._query(tokenize)},
            "/detokenize": {"POST": self._query(detokenize)},
            **{path: {"POST": self._generate} for path in GENERATORS},
        }

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan of the server."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"scope type {scope['type']!r} is not supported: expected http")
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        exchange = EmulatedExchange(scope["path"], headers, given or uuid.uuid4().hex, receive, send)
        routes = self._routes.get(exchange.path)
        if routes is None and exchange.path.startswith("/v1/responses/") and scope["method"] == "GET":
            routes = {"GET": self._stored_response}
        if routes is None:
            await exchange.reply(404, b'{"detail":"Not Found"}', JSON)
            return
        handler = routes.get(scope["method"])
        if handler is None:
            allowed = (b"allow", ", ".join(sorted(routes)).encode())
            await exchange.reply(405, b'{"detail":"Method Not Allowed"}', allowed, JSON)
            return
        try:
            await handler(exchange)
        except EngineError as error:
            body = error.body(anthropic=exchange.path.startswith("/v1/messages"))
            await exchange.reply(error.status, body, JSON)
        except (UnreadableBodyError, RecursionError):
            await exchange.reply(400, b'{"detail":"There was an error parsing the body"}', JSON)
        except ConnectionResetError:
            return  # the client is gone

    async def _generate(self, exchange: EmulatedExchange) -> None:
        instance, api = self._instance, GENERATORS[exchange.path]
        fields = await exchange.fields()
        call = api.parse(fields, instance.limits)
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1") or fields.values.get("request_id")
        call.id = f"{api.id_prefix}{given}" if isinstance(given, str) and given else new_id(api.id_prefix)
        generation = instance.generate(call)
        disconnect = asyncio.create_task(self._abort_on_disconnect(exchange, generation))
        instance.open_requests += 1
        try:
            answer = api.answer(generation)
            if call.stream:
                await self._stream(exchange, generation, answer)
            else:
                while not generation.ended:
                    await generation.changed()
                await exchange.reply(200, orjson.dumps(answer.body()), JSON, *self._load_report(exchange))
        finally:
            instance.open_requests -= 1
            disconnect.cancel()
            instance.abort(generation)

    async def _stream(self, exchange: EmulatedExchange, generation: EmulatedGeneration, answer: EmulatedAnswer) -> None:
        await exchange.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        if not answer.eager:
            await generation.changed()
            generation.wake()  # the loop below sends these tokens
        for event in answer.opening():
            await exchange.chunk(event)
        ended: set[int] = set()
        while len(ended) < len(generation.choices):
            await generation.changed()
            for choice in generation.choices:
                if choice.index not in ended and choice.fresh:
                    if choice.sequence.ended:
                        ended.add(choice.index)
                    for event in answer.news(choice):
                        await exchange.chunk(event)
        for event in answer.closing():
            await exchange.chunk(event)
        await exchange.chunk(b"", more=False)

    async def _abort_on_disconnect(self, exchange: EmulatedExchange, generation: EmulatedGeneration) -> None:
        while (await exchange.receive())["type"] != "http.disconnect":
            continue
        self._instance.abort(generation)

    def _load_report(self, exchange: EmulatedExchange) -> Headers:
        form = exchange.headers.get(b"endpoint-load-metrics-format", b"").upper()
        if form not in (b"TEXT", b"JSON"):
            return []
        engine = self._instance.engine
        values = {
            "num_requests_waiting": float(len(engine.waiting)),
            "kv_cache_usage_perc": engine.cache.used / engine.cache.capacity,
        }
        if form == b"TEXT":
            report = ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
        else:
            report = orjson.dumps({"named_metrics": values}).decode()
        return [(b"endpoint-load-metrics", form + b" " + report.encode())]

    async def _empty(self, exchange: EmulatedExchange) -> None:
        await exchange.reply(200, b"")

    async def _metrics(self, exchange: EmulatedExchange) -> None:
        page = self._instance.metrics.page()
        await exchange.reply(200, page, (b"content-type", metrics.CONTENT_TYPE.encode()))

    def _json(self, value: Callable[[], dict[str, Any]]) -> Callable[[EmulatedExchange], Awaitable[None]]:
        async def handle(exchange: EmulatedExchange) -> None:
            await exchange.reply(200, orjson.dumps(value()), JSON)

        return handle

    def _query(
        self, query: Callable[[Fields, EngineLimits], dict[str, Any]]
    ) -> Callable[[EmulatedExchange], Awaitable[None]]:
        async def handle(exchange: EmulatedExchange) -> None:
            answer = query(await exchange.fields(), self._instance.limits)
            await exchange.reply(200, orjson.dumps(answer), JSON)

        return handle

    async def _stored_response(self, exchange: EmulatedExchange) -> None:
        raise no_such_response(exchange.path.removeprefix("/v1/responses/"))


def models(instance: EmulatedInstance) -> dict[str, Any]:
    """Return the list of models: the name and every alias."""
    created = int(instance.started_at)
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": instance.settings.model,
                "parent": None,
                "max_model_len": instance.limits.max_model_len,
                "permission": [
                    {
                        "id": new_id("modelperm-"),
                        "object": "model_permission",
                        "created": created,
                        "allow_create_engine": False,
                        "allow_sampling": True,
                        "allow_logprobs": True,
                        "allow_search_indices": False,
                        "allow_view": True,
                        "allow_fine_tuning": False,
                        "organization": "*",
                        "group": None,
                        "is_blocking": False,
                    }
                ],
            }
            for name in instance.limits.names
        ],
    }


def tokenize(fields: Fields, limits: EngineLimits) -> dict[str, Any]:
    """Return the token ids of a `prompt`, or of `messages` under the chat template.

    Raises:
        EngineError: both are missing, or the model is not served.
    """
    check_model(fields, limits)
    if fields.values.get("messages") is not None:
        reply = fields.boolean("add_generation_prompt", default=True)
        is_open = fields.boolean("continue_final_message")
        tokens = prompt.render(fields.objects("messages"), fields.objects("tools"), reply, is_open)
    else:
        fields.required("prompt")
        tokens = prompt.encode(fields.string("prompt") or "")
    return {
        "count": prompt.count(tokens),
        "max_model_len": limits.max_model_len,
        "tokens": prompt.to_ids(tokens),
        "token_strs": prompt.strings(tokens) if fields.boolean("return_token_strs") else None,
    }


def detokenize(fields: Fields, limits: EngineLimits) -> dict[str, Any]:
    """Return the text of `tokens`.

    Raises:
        EngineError: `tokens` are not ids, or the model is not served.
    """
    check_model(fields, limits)
    return {"prompt": prompt.decode(token_ids(fields.required("tokens"), "body.tokens"))}


def token_ids(value: object, at: str) -> bytes:
    """Return the packed tokens of a list of ids from a request.

    Raises:
        InvalidBodyError: *value* is not a list of ids.
    """
    if not isinstance(value, list):
        raise InvalidBodyError("list_type", at, "Input should be a valid list", value)
    for index, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < prompt.VOCABULARY:
            raise InvalidBodyError("int_type", f"{at}.{index}", "Input should be a valid token id", item)
    return prompt.from_ids(value)


async def lifespan(receive: Receive, send: Send) -> None:
    """Confirm startup and shutdown of the ASGI server."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return

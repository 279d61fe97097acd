"""HTTP face of an emulated instance."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from smetric.lab.emulator import call, chat, metrics
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
    no_such_response,
)
from smetric.lab.emulator.chat import ChatAnswer, parse_chat
from smetric.lab.emulator.completions import CompletionAnswer, parse_completion
from smetric.lab.emulator.instance import EmulatedAnswer, EmulatedGeneration, EmulatedInstance
from smetric.lab.emulator.messages import MessageAnswer, count_tokens, parse_message
from smetric.lab.emulator.responses import ResponseAnswer, parse_response

# What an emulated instance answers without generating: its models, and tokens of a text.


def models(instance: EmulatedInstance) -> dict[str, Any]:
    """The list of models: the name and every alias."""
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
    """Token ids of a `prompt`, or of `messages` under the chat template.

    Raises:
        EngineError: neither is given, or the model is another one.
    """
    check_model(fields, limits)
    if fields.values.get("messages") is not None:
        reply = fields.boolean("add_generation_prompt", default=True)
        is_open = fields.boolean("continue_final_message")
        tokens = chat.render(fields.objects("messages"), fields.objects("tools"), reply, is_open)
    else:
        fields.required("prompt")
        tokens = call.encode(fields.string("prompt") or "")
    return {
        "count": call.count(tokens),
        "max_model_len": limits.max_model_len,
        "tokens": call.to_ids(tokens),
        "token_strs": call.strings(tokens) if fields.boolean("return_token_strs") else None,
    }


def detokenize(fields: Fields, limits: EngineLimits) -> dict[str, Any]:
    """The text of `tokens`.

    Raises:
        EngineError: they are no ids, or the model is another one.
    """
    check_model(fields, limits)
    return {"prompt": call.decode(token_ids(fields.required("tokens"), "body.tokens"))}


def token_ids(value: object, at: str) -> bytes:
    """Packed tokens of a list of ids that came from outside.

    Raises:
        InvalidBodyError: it is no list of ids.
    """
    if not isinstance(value, list):
        raise InvalidBodyError("list_type", at, "Input should be a valid list", value)
    for index, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < call.VOCABULARY:
            raise InvalidBodyError("int_type", f"{at}.{index}", "Input should be a valid token id", item)
    return call.from_ids(value)


# The HTTP face of an emulated instance: a plain ASGI app with vLLM's routes, headers and errors.
#
# Not here: the bodies of each API (`chat`, `completions`, `messages`, `responses`) and the listening (`fleet`).

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

#: Bytes of a request body at most.
MAX_BODY = 64 << 20

JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class EmulatedApi:
    """One API that generates: how its requests are read, its answers written, and its ids begin."""

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
    """One request and the means to answer it."""

    path: str
    headers: dict[bytes, bytes]
    request_id: str
    receive: Receive
    send: Send

    async def body(self) -> bytes:
        """The whole request body.

        Raises:
            EngineError: it is larger than `MAX_BODY` (413).
            ConnectionResetError: the client went away before it had sent it.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError("the client went away while it sent its request")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MAX_BODY:
                raise EngineError(413, f"The body is larger than {MAX_BODY} bytes.", "Request Entity Too Large")
            if not message.get("more_body", False):
                return b"".join(parts)

    async def fields(self) -> Fields:
        """The request body as the JSON object it must be."""
        body = await self.body()
        media_type = self.headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if body and media_type != b"application/json":
            message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise EngineError(400, message, INVALID)
        return Fields.of_body(body)

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers every answer of uvicorn and vLLM has."""
        common = [(b"server", b"uvicorn"), (b"vary", b"Origin"), (b"x-request-id", self.request_id.encode("latin-1"))]
        await self.send({"type": "http.response.start", "status": status, "headers": [*common, *headers]})

    async def chunk(self, body: bytes) -> None:
        """Send a part of the body."""
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        """Send the last part of the body."""
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply(self, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        """Send a whole answer."""
        await self.start(status, [(b"content-length", b"%d" % len(body)), *headers])
        await self.end(body)


class EmulatedServer:
    """The ASGI app of one instance."""

    def __init__(self, instance: EmulatedInstance) -> None:
        self._instance = instance
        self._routes: dict[str, dict[str, Callable[[EmulatedExchange], Awaitable[None]]]] = {
            "/health": {"GET": self._nothing},
            "/ping": {"GET": self._nothing, "POST": self._nothing},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            "/load": {"GET": self._load},
            "/v1/models": {"GET": self._models},
            "/v1/messages/count_tokens": {"POST": self._query(count_tokens)},
            "/tokenize": {"POST": self._query(tokenize)},
            "/detokenize": {"POST": self._query(detokenize)},
            **{path: {"POST": self._generate} for path in GENERATORS},
        }

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection's request, or the lifespan of the server."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"scope type {scope['type']!r} is not served: only http is")
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
            # Nobody is left to answer.
            return

    async def _generate(self, exchange: EmulatedExchange) -> None:
        instance, api = self._instance, GENERATORS[exchange.path]
        fields = await exchange.fields()
        call = api.parse(fields, instance.limits)
        named = fields.values.get("request_id")
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1") or named
        call.id = f"{api.id_prefix}{given}" if isinstance(given, str) and given else new_id(api.id_prefix)
        generation = instance.generate(call)
        gone = asyncio.create_task(self._until_gone(exchange, generation))
        instance.open_requests += 1
        try:
            answer = api.answer(generation)
            if call.stream:
                await self._stream(exchange, generation, answer)
            else:
                while not generation.ended:
                    await generation.changed()
                body = orjson.dumps(answer.body())
                await exchange.reply(200, body, JSON, *self._load_report(exchange))
        finally:
            instance.open_requests -= 1
            gone.cancel()
            instance.abort(generation)

    async def _stream(self, exchange: EmulatedExchange, generation: EmulatedGeneration, answer: EmulatedAnswer) -> None:
        await exchange.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        if not answer.eager:
            await generation.changed()
            generation.wake()  # to be told below
        for event in answer.opening():
            await exchange.chunk(event)
        told: set[int] = set()
        while len(told) < len(generation.choices):
            await generation.changed()
            for choice in generation.choices:
                if choice.index not in told and choice.fresh:
                    if choice.sequence.ended:
                        told.add(choice.index)
                    for event in answer.news(choice):
                        await exchange.chunk(event)
        for event in answer.closing():
            await exchange.chunk(event)
        await exchange.end()

    async def _until_gone(self, exchange: EmulatedExchange, generation: EmulatedGeneration) -> None:
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
            told = ", ".join(f"named_metrics.{name}={value}" for name, value in values.items())
        else:
            told = orjson.dumps({"named_metrics": values}).decode()
        return [(b"endpoint-load-metrics", form + b" " + told.encode())]

    async def _nothing(self, exchange: EmulatedExchange) -> None:
        await exchange.reply(200, b"")

    async def _version(self, exchange: EmulatedExchange) -> None:
        await exchange.reply(200, b'{"version":"0.32.0"}', JSON)

    async def _metrics(self, exchange: EmulatedExchange) -> None:
        page = self._instance.metrics.page()
        await exchange.reply(200, page, (b"content-type", metrics.CONTENT_TYPE.encode()))

    async def _load(self, exchange: EmulatedExchange) -> None:
        await exchange.reply(200, b'{"server_load":%d}' % self._instance.open_requests, JSON)

    async def _models(self, exchange: EmulatedExchange) -> None:
        await exchange.reply(200, orjson.dumps(models(self._instance)), JSON)

    def _query(
        self, query: Callable[[Fields, EngineLimits], dict[str, Any]]
    ) -> Callable[[EmulatedExchange], Awaitable[None]]:
        async def handle(exchange: EmulatedExchange) -> None:
            answer = query(await exchange.fields(), self._instance.limits)
            await exchange.reply(200, orjson.dumps(answer), JSON)

        return handle

    async def _stored_response(self, exchange: EmulatedExchange) -> None:
        raise no_such_response(exchange.path.removeprefix("/v1/responses/"))


async def lifespan(receive: Receive, send: Send) -> None:
    """Agree to whatever the server begins and ends."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return

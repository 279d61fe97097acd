"""HTTP interface of an emulated instance: an ASGI app with vLLM's routes, headers and errors.

The bodies of each API are in `completions`, `messages`, `responses` and `embeddings`; `fleet` listens.

docs/reference/cli.md says what it answers, and what it cannot do.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

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
    bad_request,
    check_model,
    new_id,
)
from smetric.lab.emulator.completions import ChatAnswer, CompletionAnswer, parse_chat, parse_completion
from smetric.lab.emulator.embeddings import (
    EmbeddingAnswer,
    TranscriptionAnswer,
    form_of,
    parse_embedding,
    parse_transcription,
)
from smetric.lab.emulator.instance import EmulatedAnswer, EmulatedGeneration, EmulatedInstance
from smetric.lab.emulator.messages import MessageAnswer, count_tokens, parse_message
from smetric.lab.emulator.responses import ResponseAnswer, ResponseStore, StoredResponse

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


#: Paths whose requests are forms.
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")


def generators(responses: ResponseStore) -> dict[str, EmulatedApi]:
    """Return the APIs that generate, by path."""
    return {
        "/v1/chat/completions": EmulatedApi(parse_chat, ChatAnswer, "chatcmpl-"),
        "/v1/completions": EmulatedApi(parse_completion, CompletionAnswer, "cmpl-"),
        "/v1/messages": EmulatedApi(parse_message, MessageAnswer, "chatcmpl-"),
        "/v1/responses": EmulatedApi(responses.parse, ResponseAnswer, "resp_"),
        "/v1/embeddings": EmulatedApi(parse_embedding, EmbeddingAnswer, "embd-"),
        **dict.fromkeys(FORMS, EmulatedApi(parse_transcription, TranscriptionAnswer, "trsc-")),
    }


@dataclass(slots=True)
class EmulatedExchange:
    """Request, and the means to answer it."""

    path: str
    headers: dict[bytes, bytes]
    request_id: str
    receive: Receive
    send: Send
    query: dict[str, list[str]] = field(default_factory=dict)

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
        """Return the request body, a JSON object or a form."""
        body = await self.body()
        if self.path in FORMS:
            return form_of(self.headers.get(b"content-type", b""), body)
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
        self._responses = ResponseStore()
        #: Streams that are generated in the background.
        self._recordings: set[asyncio.Task[None]] = set()
        self._generators = generators(self._responses)
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
            **{path: {"POST": self._generate} for path in self._generators},
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
        query = parse_qs(scope["query_string"].decode("latin-1"))
        exchange = EmulatedExchange(scope["path"], headers, given or uuid.uuid4().hex, receive, send, query)
        routes = self._routes.get(exchange.path)
        if routes is None and exchange.path.startswith("/v1/responses/"):
            is_cancel = exchange.path.endswith("/cancel")
            routes = {"POST": self._cancel_response} if is_cancel else {"GET": self._stored_response}
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
        instance, api = self._instance, self._generators[exchange.path]
        fields = await exchange.fields()
        call = api.parse(fields, instance.limits)
        given = exchange.headers.get(b"x-request-id", b"").decode("latin-1") or fields.values.get("request_id")
        call.id = f"{api.id_prefix}{given}" if isinstance(given, str) and given else new_id(api.id_prefix)
        generation = instance.generate(call)
        answer = api.answer(generation)
        stored = self._responses.keep(answer) if call.store and isinstance(answer, ResponseAnswer) else None
        if call.background and stored is not None:
            await self._answer_first(exchange, stored)
            return
        disconnect = asyncio.create_task(self._abort_on_disconnect(exchange, generation))
        instance.open_requests += 1
        try:
            if call.stream:
                await self._send_events(exchange, self._events(generation, answer))
            else:
                while not generation.ended:
                    await generation.changed()
                await exchange.reply(200, orjson.dumps(answer.body()), JSON, *self._load_report(exchange))
        finally:
            instance.open_requests -= 1
            disconnect.cancel()
            instance.abort(generation)

    async def _answer_first(self, exchange: EmulatedExchange, stored: StoredResponse) -> None:
        """Answer a request in the background; it is generated whether the client stays or not."""
        answer = stored.answer
        if not answer.generation.call.stream:
            await exchange.reply(200, orjson.dumps(answer.body()), JSON)
            return
        recording = asyncio.create_task(stored.record(self._events(answer.generation, answer)))
        self._recordings.add(recording)
        recording.add_done_callback(self._recordings.discard)
        await self._send_events(exchange, stored.replay(0))

    async def _send_events(self, exchange: EmulatedExchange, events: AsyncIterator[bytes]) -> None:
        await exchange.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        async for event in events:
            await exchange.chunk(event)
        await exchange.chunk(b"", more=False)

    async def _events(self, generation: EmulatedGeneration, answer: EmulatedAnswer) -> AsyncIterator[bytes]:
        """Yield the events of a stream as they come."""
        if not answer.eager:
            await generation.changed()
            generation.wake()  # the loop below sends these tokens
        for event in answer.opening():
            yield event
        ended: set[int] = set()
        while len(ended) < len(generation.choices):
            await generation.changed()
            for choice in generation.choices:
                if choice.index not in ended and choice.fresh:
                    if choice.sequence.ended:
                        ended.add(choice.index)
                    for event in answer.news(choice):
                        yield event
        for event in answer.closing():
            yield event

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
        """Answer a stored response as it is now, or its events behind `starting_after`."""
        stored = self._responses.get(exchange.path.removeprefix("/v1/responses/"))
        if exchange.query.get("stream", [""])[0].lower() == "true":
            after = exchange.query.get("starting_after", ["-1"])[0]
            if not stored.events or not after.lstrip("-").isdigit():
                raise bad_request("This response has no events to stream, or starting_after is not a number.", "stream")
            await self._send_events(exchange, stored.replay(int(after) + 1))
            return
        await exchange.reply(200, orjson.dumps(stored.answer.body()), JSON)

    async def _cancel_response(self, exchange: EmulatedExchange) -> None:
        stored = self._responses.get(exchange.path.removeprefix("/v1/responses/").removesuffix("/cancel"))
        if not stored.answer.generation.call.background:
            raise EngineError(400, "Cannot cancel a synchronous response.", "invalid_request_error", "response_id")
        self._instance.abort(stored.answer.generation)
        await exchange.reply(200, orjson.dumps(stored.answer.body()), JSON)


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

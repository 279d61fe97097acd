"""`GET /v1/models`: the model lists of all instances, merged by id; cards pass with every field as it came."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from smetric.errors import HttpError, NoCandidate
from smetric.fleet.instance import Instance
from smetric.proxy.asgi import Receive, Scope, Send
from smetric.proxy.error_response import send_error
from smetric.proxy.headers import VIA, Headers, request_headers
from smetric.proxy.plane import Plane
from smetric.proxy.wire import AnswerBroken, UpstreamFailed

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

    def __init__(self, plane: Plane, aliases: Mapping[str, str]) -> None:
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

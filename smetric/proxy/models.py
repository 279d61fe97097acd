"""`GET /v1/models`: the model lists of all instances, merged by id; cards pass with every field they came with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import orjson

from smetric.errors import NoCandidate
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.proxy.asgi import Receive, Scope, Send
from smetric.proxy.error_response import send_error
from smetric.proxy.headers import first
from smetric.proxy.upstream import Upstream
from smetric.proxy.wire import AnswerBroken, UpstreamFailed

#: Bounds on asking one instance: seconds, bytes.
DEADLINE_S = 2.0
MAX_BYTES = 1024 * 1024


class Models:
    """The endpoint.

    Args:
        fleet: whom to ask.
        upstream: how.
        aliases: names the router answers for, to the model behind each.
    """

    def __init__(self, fleet: Fleet, upstream: Upstream, aliases: Mapping[str, str]) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._aliases = aliases

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with every card that any instance names; an alias gets the card of the model behind it."""
        key = first(scope["headers"], b"authorization")
        instances = [i for i in self._fleet.instances if i.healthy and not i.draining] or self._fleet.instances
        lists = await asyncio.gather(*(self._ask(instance, key) for instance in instances))
        if all(cards is None for cards in lists):
            await send_error(send, scope["path"], NoCandidate("no instance answers with its models"))
            return
        merged: dict[str, Any] = {}
        for cards in lists:
            for card in cards or ():
                merged.setdefault(card["id"], card)
        for alias, model in self._aliases.items():
            if model in merged and alias not in merged:
                merged[alias] = {**merged[model], "id": alias, "parent": model}
        body = orjson.dumps({"object": "list", "data": list(merged.values())})
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _ask(self, instance: Instance, key: bytes | None) -> list[dict[str, Any]] | None:
        """The cards of one instance, or None when it does not answer with any in time."""
        headers = [(b"authorization", key)] if key is not None else []
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await self._upstream.send(instance, "GET", b"/v1/models", headers, None)
                try:
                    pieces: list[bytes] = []
                    while piece := await answer.read():
                        pieces.append(piece)
                        if sum(map(len, pieces)) > MAX_BYTES:
                            return None
                finally:
                    answer.close()
            data = orjson.loads(b"".join(pieces))["data"]
            return [card for card in data if isinstance(card["id"], str)] if answer.status == 200 else None
        except (TimeoutError, UpstreamFailed, AnswerBroken, orjson.JSONDecodeError, KeyError, TypeError):
            return None

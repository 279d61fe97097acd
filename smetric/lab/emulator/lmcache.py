"""Emulated LMCache."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import orjson

from smetric.lab.emulator import call
from smetric.lab.emulator.call import EngineError, InvalidBodyError, UnreadableBodyError
from smetric.lab.emulator.instance import EmulatedInstance
from smetric.lab.emulator.server import JSON, EmulatedExchange, Receive, Send, lifespan, token_ids
from smetric.lab.store import block_keys, root_key

#: Tokens of a chunk, LMCache's default.
CHUNK_SIZE = 256
#: Most tokens the coordinator takes in one request.
MAX_TOKENS = 1_000_000
#: Most ranks it is asked of.
MAX_RANKS = 1024
#: How the coordinator codes rank 0 of 1.
KV_RANK = 16777472
#: Where both keep what instances hold.
TIER, LOCATION = "l1", "LocalCPUBackend"


class EmulatedLmcache:
    """The ASGI app of both services.

    Args:
        instances: the engines, and the ids LMCache has for them.
    """

    def __init__(self, instances: Sequence[tuple[str, EmulatedInstance]]) -> None:
        self._instances = instances
        self._routes: dict[tuple[str, str], Callable[[EmulatedExchange], Awaitable[dict[str, Any]]]] = {
            ("GET", "/healthz"): self._healthz,
            ("GET", "/instances"): self._list,
            ("GET", "/controller/workers"): self._workers,
            ("POST", "/directory/lookup"): self._directory,
            ("POST", "/lookup"): self._layout,
        }

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan of the server."""
        if scope["type"] == "lifespan":
            await lifespan(receive, send)
            return
        exchange = EmulatedExchange(scope["path"], dict(scope["headers"]), uuid.uuid4().hex, receive, send)
        handler = self._routes.get((scope["method"], exchange.path))
        if handler is None:
            await exchange.reply(404, b'{"detail":"Not Found"}', JSON)
            return
        try:
            status, answer = 200, await handler(exchange)
        except InvalidBodyError as error:
            status, answer = 422, {"detail": [{"type": "value_error", "loc": error.param, "msg": error.message}]}
        except EngineError as error:
            status, answer = error.status, {"detail": error.message}
        except UnreadableBodyError:
            status, answer = 400, {"detail": "There was an error parsing the body"}
        except ConnectionResetError:
            # Nobody is left to answer.
            return
        await exchange.reply(status, orjson.dumps(answer), JSON)

    async def _healthz(self, exchange: EmulatedExchange) -> dict[str, Any]:
        return {"status": "healthy"}

    async def _list(self, exchange: EmulatedExchange) -> dict[str, Any]:
        return {
            "instances": [
                {"instance_id": id, "ip": "127.0.0.1", "registration_time": instance.started_at, "metadata": {}}
                for id, instance in self._instances
            ]
        }

    async def _workers(self, exchange: EmulatedExchange) -> dict[str, Any]:
        # Workers without heartbeats, as they are unless configured: the last one is the registration.
        workers = [
            {
                "instance_id": id,
                "worker_id": 0,
                "ip": "127.0.0.1",
                "port": 0,
                "peer_init_url": None,
                "registration_time": instance.started_at,
                "last_heartbeat_time": instance.started_at,
                "key_count": instance.engine.cache.cached,
            }
            for id, instance in self._instances
        ]
        return {"workers": workers, "total_count": len(workers)}

    async def _directory(self, exchange: EmulatedExchange) -> dict[str, Any]:
        fields = await exchange.fields()
        tokens = token_ids(fields.required("token_ids"), "body.token_ids")
        model = fields.string("model_name")
        if not tokens or model is None:
            raise InvalidBodyError("value_error", "body", "supply 'token_ids' and 'model_name'", None)
        count = call.count(tokens)
        if count > MAX_TOKENS:
            message = f"too many token_ids in a single request (limit={MAX_TOKENS}, got={count})"
            raise EngineError(400, message, "Bad Request")
        # Nobody holds what is keyed for another number of ranks.
        ranks = fields.integer("world_size") or 1
        if ranks > MAX_RANKS:
            raise EngineError(
                400, f"too many ranks in a single request (limit={MAX_RANKS}, got={ranks})", "Bad Request"
            )
        salt = fields.string("cache_salt") or ""
        held = self._held(tokens, salt, model) if ranks == 1 else []
        return {
            "chunks": count // CHUNK_SIZE,
            "results": [
                {
                    "key": {
                        "chunk_hash_hex": chunk,
                        "model_name": model,
                        "kv_rank": KV_RANK + rank,
                        "object_group_id": 0,
                        "cache_salt": salt,
                    },
                    "placements": [
                        {
                            "instance_id": id,
                            "incarnation": int(instance.started_at),
                            "tier": TIER,
                            "backend": "dram",
                            "size_bytes": 1,
                            "shared": False,
                        }
                        for id, instance, chunks in held
                        if number < chunks
                    ],
                    "token_ids": [],
                    "access_count": 0,
                }
                for number, chunk in enumerate(_chunk_names(tokens))
                for rank in range(ranks)
            ],
        }

    async def _layout(self, exchange: EmulatedExchange) -> dict[str, Any]:
        tokens = token_ids((await exchange.fields()).required("tokens"), "body.tokens")
        held = self._held(tokens, "", None)
        layout: dict[str, tuple[str, int]] = {}
        for number in range(max((chunks for _, _, chunks in held), default=0)):
            owner = next(id for id, _, chunks in held if number < chunks)
            layout[owner] = (LOCATION, (number + 1) * CHUNK_SIZE)
        return {"event_id": f"Lookup{uuid.uuid4()}", "layout_info": layout}

    def _held(self, tokens: bytes, salt: str, model: str | None) -> list[tuple[str, EmulatedInstance, int]]:
        """How many leading chunks of packed *tokens* each instance that serves *model* holds; None: any model."""
        held = []
        for id, instance in self._instances:
            if model is None or model in instance.limits.names:
                keys = block_keys(tokens, instance.settings.engine.block_size, root_key(salt))
                held.append((id, instance, instance.engine.hit_length(keys) // CHUNK_SIZE))
        return held


def _chunk_names(tokens: bytes) -> list[str]:
    return [f"{key:064x}" for key in block_keys(tokens, CHUNK_SIZE)]

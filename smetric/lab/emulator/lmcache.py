"""Emulated LMCache: the lookups of its coordinator and its controller."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import orjson

from smetric.lab.emulator.call import INVALID, EngineError, InvalidBodyError, UnreadableBodyError
from smetric.lab.emulator.instance import EmulatedInstance
from smetric.lab.emulator.prompt import count
from smetric.lab.emulator.server import JSON, EmulatedExchange, Receive, Send, lifespan, token_ids
from smetric.lab.store import block_keys, root_key

#: Tokens of a chunk by default.
CHUNK_SIZE = 256
#: Maximum tokens and ranks of a request to the coordinator.
MAX_TOKENS, MAX_RANKS = 1_000_000, 1024
#: The coordinator's code of rank 0 of 1.
KV_RANK = 16777472
#: The tier of all blocks, as the coordinator and the controller name it.
TIER, LOCATION = "l1", "LocalCPUBackend"


class EmulatedLmcache:
    """ASGI app of both services.

    Args:
        instances: LMCache's id of each engine, and the engine.
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
            return  # the client is gone
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
        # By default workers send no heartbeat after their registration.
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
        length = count(tokens)
        if length > MAX_TOKENS:
            message = f"too many token_ids in a single request (limit={MAX_TOKENS}, got={length})"
            raise EngineError(400, message, INVALID)
        # Blocks are keyed by the number of ranks, which is 1 here.
        ranks = fields.integer("world_size") or 1
        if ranks > MAX_RANKS:
            message = f"too many ranks in a single request (limit={MAX_RANKS}, got={ranks})"
            raise EngineError(400, message, INVALID)
        salt = fields.string("cache_salt") or ""
        held = self._held(tokens, salt, model) if ranks == 1 else []
        return {
            "chunks": length // CHUNK_SIZE,
            "results": [
                {
                    "key": {
                        "chunk_hash_hex": f"{key:064x}",
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
                for number, key in enumerate(block_keys(tokens, CHUNK_SIZE))
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
        """Return the number of cached leading chunks on each instance that serves *model*; None means any model."""
        held = []
        for id, instance in self._instances:
            if model is None or model in instance.limits.names:
                keys = block_keys(tokens, instance.settings.engine.block_size, root_key(salt))
                held.append((id, instance, instance.engine.hit_length(keys) // CHUNK_SIZE))
        return held

"""Plays LMCache at the engines: tells the real services, in its recorded messages, what each engine has stored.

A server (multi-process mode) speaks HTTP with the coordinator, a worker (within the engine) ZeroMQ with the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from tests.e2e.real_lmcache import CHUNK, SEED, RealService, command
from tests.e2e.real_vllm import MODEL

HERE = Path(__file__).parent
MESSAGES = json.loads((HERE.parent / "data/lmcache/zmq_messages.json").read_text())
BEAT_S = 0.5

Key = TypeVar("Key")


class Keys(Protocol[Key]):
    """What chunks are called."""

    async def of(self, tokens: Sequence[int]) -> list[Key]:
        """The keys of the whole chunks of a prompt."""


class Player(Protocol[Key]):
    """LMCache at one engine."""

    id: str
    held: set[Key]

    async def start(self) -> None:
        """Register."""

    async def store(self, keys: Sequence[Key]) -> None:
        """Hold these chunks from now on, and say so."""

    async def die(self) -> None:
        """Be gone without a word; nothing is stored any more."""


def prefix(player: Player[Key], keys: Sequence[Key]) -> int:
    """Tokens of a prompt that *player* holds: its chunks up to the first that is missing."""
    missing = (at for at, key in enumerate(keys) if key not in player.held)
    return next(missing, len(keys)) * CHUNK


# ── multi-process mode ───────────────────────────────────────────────────────


class CoordinatorKeys:
    """Asks the coordinator itself: its answers name every chunk that was asked for, held or not."""

    def __init__(self, service: RealService, client: aiohttp.ClientSession) -> None:
        self._service = service
        self._client = client

    async def of(self, tokens: Sequence[int]) -> list[str]:
        body = {"token_ids": list(tokens), "model_name": MODEL}
        async with self._client.post(f"{self._service.url}/directory/lookup", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return [result["key"]["chunk_hash_hex"] for result in (await answer.json())["results"]]


class ServerPlayer:
    """A server. As a real one it registers again when it is forgotten, but does not tell again what it holds."""

    def __init__(self, id: str, service: RealService, client: aiohttp.ClientSession) -> None:
        self.id = id
        self.held: set[str] = set()
        self._service = service
        self._client = client
        self._incarnation, self._sent = int(time.time()), 0
        self._beats: asyncio.Task[None] | None = None
        self._is_alive = True

    async def start(self) -> None:
        await self._register()
        self._beats = asyncio.create_task(self._beat())

    async def _register(self) -> None:
        body = {"instance_id": self.id, "ip": "127.0.0.1", "http_port": 8080}
        async with self._client.post(f"{self._service.url}/instances", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            # The service is being restarted, or hangs: the next beat will find it.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._client.put(f"{self._service.url}/instances/{self.id}/heartbeat") as answer:
                    status = answer.status
                if status == 404:
                    await self._register()

    async def store(self, keys: Sequence[str]) -> None:
        new = [key for key in keys if key not in self.held]
        if not new or not self._is_alive:
            return
        self._sent += 1
        named = {"model_name": MODEL, "kv_rank": 16777472, "object_group_id": 0, "cache_salt": ""}
        batch = {
            "instance_id": self.id,
            "incarnation": self._incarnation,
            "seq": self._sent,
            "event_type": "store",
            "tier": "l1",
            "backend": "dram",
            "shared": False,
            "entries": [{"key": {"chunk_hash_hex": key, **named}, "size_bytes": 1 << 20} for key in new],
            "ts": time.time(),
        }
        async with self._client.post(f"{self._service.url}/events", json={"batches": [batch]}) as answer:
            assert (await answer.json())["applied"] == 1
        self.held.update(new)

    async def die(self) -> None:
        self._is_alive = False
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)


# ── within the engine ────────────────────────────────────────────────────────


class ControllerKeys:
    """Asks LMCache's own code, in a process of its environment."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def of(self, tokens: Sequence[int]) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._turn:
            self._process.stdin.write(json.dumps(list(tokens)).encode() + b"\n")
            await self._process.stdin.drain()
            keys: list[int] = json.loads(await self._process.stdout.readline())
            return keys


@asynccontextmanager
async def controller_keys() -> AsyncIterator[ControllerKeys]:
    process = await asyncio.create_subprocess_exec(
        command("python"),
        str(HERE / "lmcache_keys.py"),
        env=os.environ | SEED,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield ControllerKeys(process)
    finally:
        process.kill()
        await process.wait()


class WorkerPlayer:
    """A worker. With *heartbeats*, which are not the default, it hears of a controller that lost all, and tells it."""

    def __init__(self, id: str, service: RealService, context: zmq.asyncio.Context, *, heartbeats: bool) -> None:
        self.id = id
        self.held: set[int] = set()
        self._service = service
        self._context = context
        self._heartbeats = heartbeats
        self._pushed = 0
        self._push: zmq.asyncio.Socket | None = None
        self._beats: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._push = self._context.socket(zmq.PUSH)
        self._push.connect(f"tcp://127.0.0.1:{self._service.pull}")
        await self._request(self._service.reply, "RegisterMsg")
        if self._heartbeats:
            self._beats = asyncio.create_task(self._beat())

    def _message(self, kind: str, **fields: Any) -> bytes:
        recorded = MESSAGES[kind]["fields"]
        assert fields.keys() <= recorded.keys()
        return msgspec.msgpack.encode(recorded | {"instance_id": self.id} | fields)

    async def _request(self, port: int, kind: str, **fields: Any) -> dict[str, Any]:
        with self._context.socket(zmq.REQ) as socket:
            socket.linger = 0
            socket.connect(f"tcp://127.0.0.1:{port}")
            await socket.send(self._message(kind, **fields))
            async with asyncio.timeout(10):
                answer: dict[str, Any] = msgspec.msgpack.decode(await socket.recv())
        return answer

    async def _say(self, kind: str, **fields: Any) -> None:
        assert self._push is not None
        await self._push.send(self._message(kind, **fields))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            # The controller is being restarted: the next beat will find it.
            with contextlib.suppress(TimeoutError):
                answer = await self._request(self._service.heartbeat, "HeartbeatMsg")
                if any(command["command_type"] == "full_sync" for command in answer["commands"]):
                    await self._tell_all()

    async def _tell_all(self) -> None:
        sync, keys = f"{self.id}-{time.time_ns()}", sorted(self.held)
        fields = {"sync_id": sync, "total_keys": len(keys), "batch_count": 1}
        await self._request(self._service.reply, "FullSyncStartMsg", **fields)
        await self._say("FullSyncBatchMsg", sync_id=sync, batch_id=0, keys=keys)
        await self._say("FullSyncEndMsg", sync_id=sync, actual_total_keys=len(keys))

    async def store(self, keys: Sequence[int]) -> None:
        new = [key for key in keys if key not in self.held]
        if not new:
            return
        admitted = [{"op_type": "admit", "key": key, "seq_num": self._pushed + at} for at, key in enumerate(new)]
        self._pushed += len(new)
        await self._say("BatchedKVOperationMsg", operations=admitted)
        self.held.update(new)

    async def die(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        if self._push is not None:
            self._push.close(linger=0)

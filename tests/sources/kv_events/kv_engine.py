"""An engine as far as its KV events go: publishes on real sockets, names blocks its own way, can lose messages."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

CAPTURES = Path(__file__).parents[2] / "data" / "kv_events"
BLOCK = 4


def captured(name: str) -> list[list[Any]]:
    """The payloads of a capture, as the engine made them."""
    return [_bytes_back(json.loads(line)["payload"]) for line in (CAPTURES / name).read_text().splitlines()]


def _bytes_back(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"bytes_hex"}:
            return bytes.fromhex(value["bytes_hex"])
        return {key: _bytes_back(each) for key, each in value.items()}
    return [_bytes_back(each) for each in value] if isinstance(value, list) else value


def names_of(tokens: Sequence[int], seed: str = "", extra: Sequence[Any] = ()) -> list[int]:
    """The engine's names of a prompt's full blocks."""
    names = []
    chain = repr((seed, list(extra)))
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hashlib.sha256((chain + repr(list(tokens[start : start + BLOCK]))).encode()).hexdigest()
        names.append(int(chain[-16:], 16))
    return names


def stored(
    tokens: Sequence[int], *, skip: int = 0, seed: str = "", salt: str = "", lora: str = "", **fields: Any
) -> dict[str, Any]:
    """The event for all full blocks of a prompt but the first *skip*."""
    each: list[Any] = [lora] if lora else []
    first = [*each, salt] if salt else each
    names = names_of(tokens, seed, first)
    extra = [first or None, *[each or None for _ in names[1:]]]
    return {
        "type": "BlockStored",
        "block_hashes": names[skip:],
        "parent_block_hash": names[skip - 1] if skip else None,
        "token_ids": list(tokens[skip * BLOCK : len(names) * BLOCK]),
        "block_size": BLOCK,
        "lora_id": 1 if lora else None,
        "medium": "GPU",
        "lora_name": lora or None,
        "extra_keys": extra[skip:],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | fields


def removed(*names: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


class KvEngine:
    """Publishes from the moment it is made; `restart` is a new process at the same addresses.

    Args:
        topic: of its messages.
        replay: whether it has a replay socket.
        buffer: messages it keeps for that.
        connect: the address to connect to, where the router binds.
    """

    def __init__(self, *, topic: str = "", replay: bool = True, buffer: int = 10_000, connect: str = "") -> None:
        self._context = zmq.asyncio.Context()
        self._topic = topic.encode()
        self._events: zmq.asyncio.Socket = self._context.socket(zmq.XPUB)
        self._events.setsockopt(zmq.LINGER, 0)
        if connect:
            self._events.connect(connect)
            self.endpoint = connect
        else:
            self._events.bind("tcp://127.0.0.1:*")
            self.endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = ""
        #: First numbers the replay socket was asked for.
        self.asked: list[int] = []
        self._asked: asyncio.Task[None] | None = None
        if replay:
            self._router: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.bind("tcp://127.0.0.1:*")
            self.replay = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._asked = asyncio.create_task(self._answer())
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._clock = itertools.count(1_000_000)
        self._next = 0

    async def joined(self) -> None:
        """Wait for a subscriber."""
        async with asyncio.timeout(5):
            await self._events.recv()

    async def publish(self, *events: Any, rank: int = 0, lost: bool = False) -> int:
        """Publish one message and return its number. Only the replay socket has a lost one."""
        return await self.send(msgspec.msgpack.encode([float(next(self._clock)), list(events), rank]), lost=lost)

    async def send(self, payload: bytes, *, lost: bool = False) -> int:
        seq = self._next
        self._next += 1
        self._buffer.append((seq, payload))
        if not lost and not self._events.closed:
            await self._events.send_multipart([self._topic, seq.to_bytes(8, "big"), payload])
        return seq

    async def send_frames(self, *frames: bytes) -> None:
        await self._events.send_multipart(frames)

    def disconnect(self) -> None:
        """Break all connections to the events until `connect_again`."""
        self._events.close(linger=0)

    def connect_again(self) -> None:
        self._events = self._context.socket(zmq.XPUB)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.bind(self.endpoint)

    def restart(self) -> None:
        self._next = 0
        self._buffer.clear()

    async def _answer(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for seq, payload in list(self._buffer):
                if seq >= self.asked[-1]:
                    await self._router.send_multipart([client, b"", self._topic, seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", b"", b"\xff" * 8, b""])

    async def close(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)
        self._context.destroy(linger=0)


def free_address() -> str:
    """Return a free address on loopback."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind("tcp://127.0.0.1:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

"""Traffic with a hot spot: an instance gets so many requests of its sessions that the next one moves elsewhere.

Engines are the emulated ones, so all texts are filler. Where the requests go is the router's to say.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from smetric.lab.emulator import instance as reply
from smetric.lab.emulator.fleet import EmulatedFleet
from smetric.lab.emulator.instance import EmulatedSettings
from smetric.lab.engine import EngineConfig

MODEL = "emulated"
INSTANCES = 4
#: Number of sessions; each instance becomes the home of a quarter of them.
SESSIONS = 48
#: Long answers on every instance, and further ones on the hot instance until it exceeds twice the mean: with 2
#: everywhere it gets 3, 4, 5, 6, 7, and 7 > 2 × 3.25.
BUSY, MORE = 2, 5
#: Number of requests: first turns, one that stays, long answers, one that moves.
REQUESTS = SESSIONS + 1 + BUSY * INSTANCES + MORE + 1
_LONG, _SHORT = 300, 8


def engines() -> EmulatedFleet:
    """Run four emulated engines with room for all sessions within the block."""
    config = EngineConfig(block_size=16, blocks=8192, max_model_len=32768)
    return EmulatedFleet(INSTANCES, EmulatedSettings(model=MODEL, engine=config))


@dataclass(frozen=True)
class Answer:
    """Answer: decision id, instance and rule from the headers, and the text."""

    decision: str
    instance: str
    rule: str
    text: str


@dataclass
class Session:
    """Conversation: a system prompt that all conversations share, and a task of its own."""

    number: int
    home: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    async def ask(self, client: aiohttp.ClientSession, router: str, tokens: int) -> Answer:
        """Send the next turn; the answer is streamed and has *tokens* tokens."""
        if not self.messages:
            self.messages.append({"role": "system", "content": reply.text(0, 300)})
        self.messages.append({"role": "user", "content": reply.text(1 + self.number, 60 if self.home else 800)})
        body: dict[str, Any] = {"model": MODEL, "messages": self.messages, "max_tokens": tokens, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"x-session-id": f"session-{self.number}"}
        async with client.post(f"{router}/v1/chat/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            said = [_text(line) async for line in response.content]
        answer = Answer(
            response.headers["x-smetric-decision-id"],
            response.headers["x-smetric-instance"],
            response.headers["x-smetric-rule"],
            "".join(said),
        )
        self.messages.append({"role": "assistant", "content": answer.text})
        self.home = self.home or answer.instance
        return answer


@dataclass(frozen=True)
class HotSpot:
    """Result: a later turn that returned to its cache, and one that moved away from a hot instance."""

    stayed: Answer
    moved: Answer
    hot: str


async def play(router: str) -> HotSpot:
    """Send the traffic through the router at URL *router*; takes a few seconds.

    Raises:
        aiohttp.ClientError: a request was not answered.
        RuntimeError: the router finds no engines, or did not spread first turns as `smetric` does.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
        await _known(client, router)
        at_home: dict[str, list[Session]] = {}
        for number in range(SESSIONS):
            session = Session(number)
            answer = await session.ask(client, router, _SHORT)
            at_home.setdefault(answer.instance, []).append(session)
        if len(at_home) != INSTANCES or min(map(len, at_home.values())) < BUSY + MORE + 2:
            raise RuntimeError(f"first turns were not spread: { ({id: len(at) for id, at in at_home.items()}) }")
        hot = min(at_home)
        stayed = await at_home[hot].pop().ask(client, router, _SHORT)
        async with asyncio.TaskGroup() as busy:
            for home in [*sorted(at_home) * BUSY, *[hot] * MORE]:
                busy.create_task(at_home[home].pop().ask(client, router, _LONG))
                await asyncio.sleep(0.05)
            moved = await at_home[hot].pop().ask(client, router, _SHORT)
    return HotSpot(stayed, moved, hot)


async def _known(client: aiohttp.ClientSession, router: str) -> None:
    """Wait until the router knows its engines' models; traces name only known models."""
    for _ in range(100):
        async with client.get(f"{router}/v1/models") as response:
            if response.status == 200 and (await response.json())["data"]:
                return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"the router at {router} lists no models")


def _text(line: bytes) -> str:
    if not line.startswith(b"data: {"):
        return ""
    return "".join(choice["delta"].get("content") or "" for choice in orjson.loads(line[6:])["choices"])

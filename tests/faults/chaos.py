"""Random faults from a seed: in engines, collectors, look-ups, the policy file and the router's process.

One engine at a time fails, so every request can be served; a lost request is the router's fault.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.fakes import DONE, METRICS, Call, FakeEngine, RawClient, Response, chunk, delta, hang, head, healthy, request
from tests.faults.harness import chat

POLICIES = ("policy one\n\nroute rr_argmin(requests)\n", "policy two\n\nroute rr_argmin(unprefilled)\n")
BAD_POLICIES = ("policy three\n\nroute nobody(\n", "", "policy p\n\nroute rr_arg", "\0" * 100)
#: Deadlines of the router that the faults below run into, seconds; so long that a busy machine runs into none.
FIRST_BYTE_S, IDLE_S = 4.0, 2.0

#: What an engine may do, and how a request that met it last may end for its client. A status alone is an answer in one
#: piece; `whole` a stream to its end; `told` a stream that ends with an error event and without its end mark.
MOODS = {
    "well": {"whole"},
    "slow": {"whole"},
    "gone": {"whole"},
    "close": set(),
    "reset": set(),
    "broken": set(),
    # A full queue ejects no instance. It may exhaust the retry budget; then its own answer is passed on.
    "busy": {"503"},
    "garbage": {"502"},
    "mute": {"504"},
    "cut": {"told"},
    "torn": {"told"},
    "stalled": {"told"},
}
EVENTS = head(200, (b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked"))


@dataclass
class Chaos:
    """Engines with moods, and what requests met there.

    Args:
        engines: those behind the router; started.
        policy: the policy's file.
        seed: of everything random.
    """

    engines: Sequence[FakeEngine]
    policy: Path
    seed: int
    #: Of each request by its id: the moods it met, in order.
    met: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    #: How often which fault was there, and how requests ended.
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    #: Requests that ended as no rule allows.
    lost: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._ids = itertools.count()
        self._moods = dict.fromkeys(self.engines, "well")
        self.is_over = False
        #: Held while the policy's file may be bad: no router starts then.
        self.rewriting = asyncio.Lock()
        for engine in self.engines:
            engine.script = self._script(engine)

    # ── engines ──────────────────────────────────────────────────────────────

    def _script(self, engine: FakeEngine) -> Callable[[Call], Awaitable[None]]:
        async def script(call: Call) -> None:
            mood = self._moods[engine]
            name = re.search(rb'"user":"(\d+)"', call.body)
            if name:
                self.met[name[1].decode()].append(mood)
            await self._act(mood, call)
            engine.calls.remove(call)

        return script

    async def _act(self, mood: str, call: Call) -> None:
        match mood:
            case "slow":
                await asyncio.sleep(0.1)
                await healthy(call)
            case "close":
                call.close()
            case "reset":
                call.reset()
            case "broken":
                await call.answer(500, b'{"error":{}}')
            case "busy":
                await call.answer(503, b'{"error":{}}', (b"retry-after", b"1"))
            case "garbage":
                await call.send(b"no HTTP\r\n\r\n")
                call.close()
            case "mute":
                await hang(call)
            case "cut" | "torn" | "stalled":
                await call.send(EVENTS + chunk(delta("a")))
                await asyncio.sleep(0.01)
                if mood == "stalled":
                    await hang(call)
                call.close() if mood == "cut" else call.reset()
            case _:
                await healthy(call)

    async def _be_ill(self) -> None:
        """One engine is in a mood for a while."""
        engine, mood = self._rng.choice(self.engines), self._rng.choice([mood for mood in MOODS if mood != "well"])
        self.faults[mood] += 1
        self._moods[engine] = mood
        if mood == "gone":
            await engine.stop()
        await asyncio.sleep(self._rng.uniform(0.05, 0.3))
        if mood == "gone":
            await engine.start(urlsplit(engine.url).port or 0)
        self._moods[engine] = "well"

    # ── beside requests ──────────────────────────────────────────────────────

    async def _be_unseen(self) -> None:
        """An engine's metrics or health cannot be read for a while."""
        engine, page = self._rng.choice(self.engines), self._rng.choice(("metrics", "health"))
        what = self._rng.choice(("hang", "500", "garbage"))
        self.faults[f"{page} {what}"] += 1
        good = getattr(engine, page)
        bad = {
            "hang": hang,
            "500": lambda call: call.answer(500, b""),
            "garbage": lambda call: call.answer(200, METRICS.replace(b" ", b" NaN") if page == "metrics" else b"\xff"),
        }[what]
        setattr(engine, page, bad)
        await asyncio.sleep(self._rng.uniform(0.1, 0.5))
        setattr(engine, page, good)

    async def _rewrite(self) -> None:
        """The policy's file is another one, or none at all."""
        bad = self._rng.random() < 0.5
        self.faults["bad policy" if bad else "policy"] += 1
        async with self.rewriting:
            await asyncio.to_thread(self.policy.write_text, self._rng.choice(BAD_POLICIES if bad else POLICIES))
            await asyncio.sleep(self._rng.uniform(0.0, 0.2))
            await asyncio.to_thread(self.policy.write_text, self._rng.choice(POLICIES))

    async def rage(self) -> None:
        """Faults of all kinds, one engine ill at a time, until it is over."""

        async def again(one: Callable[[], Awaitable[None]], pause_s: float) -> None:
            while not self.is_over:
                await one()
                await asyncio.sleep(self._rng.uniform(0.5, 1.5) * pause_s)

        async with asyncio.TaskGroup() as group:
            group.create_task(again(self._be_ill, 0.5))
            group.create_task(again(self._be_unseen, 0.3))
            group.create_task(again(self._rewrite, 0.5))

    # ── clients ──────────────────────────────────────────────────────────────

    async def ask(self, url: str) -> None:
        """Send requests until it is over, some of which the client leaves."""
        while not self.is_over:
            name = str(next(self._ids))
            raw = request("POST", "/v1/chat/completions", chat(stream=True, user=name))
            answer: Response | None = None
            try:
                async with await RawClient.connect(url) as client:
                    await client.send(raw)
                    if self._rng.random() < 0.05:
                        self.ends["left"] += 1
                        continue
                    answer = await client.response()
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                end = type(error).__name__
            else:
                end = kind_of(answer)
            met = self.met.pop(name, [])
            self.ends[end] += 1
            if end not in (MOODS[met[-1]] if met else set()):
                self.lost.append(f"request {name} met {met} and ended as {end}")


def kind_of(answer: Response) -> str:
    """How a request ended, in the words of `MOODS`."""
    if answer.status != 200:
        return str(answer.status) if answer.complete else f"{answer.status} broken off"
    if answer.complete and answer.body.endswith(DONE):
        return "whole"
    is_told = answer.body.rpartition(b"data: ")[2].startswith(b'{"error":') and DONE not in answer.body
    return "told" if is_told and not answer.complete else "cut without a word"

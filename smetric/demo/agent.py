"""One agent: sends a session's requests one after the other, as agents do, and notes what it saw of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from smetric.demo.dialect import Dialect, Reply
from smetric.demo.session import Session


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; tokens are the engine's own count, times are on the monotonic clock.

    Args:
        session: whose request it was.
        turn: its place in the session, 0 for the first.
        status: HTTP status; 0 when there was none.
        is_whole: it was answered with 200 and its stream reached its end.
        decision: id of the routing decision.
        instance: who answered.
        sent_s: when it was sent.
        first_byte_s: when the first event came; the end for an answer without one.
        ended_s: when the answer ended.
        prompt_tokens: length of the prompt.
        cached_tokens: how much of it the engine had in its cache.
    """

    session: str
    turn: int
    status: int
    is_whole: bool
    decision: str
    instance: str
    sent_s: float
    first_byte_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """Seconds to the first event."""
        return self.first_byte_s - self.sent_s


async def play(
    session: Session,
    dialect: Dialect,
    client: aiohttp.ClientSession,
    router: str,
    *,
    delay_s: float,
    speed: float,
    answered: Callable[[Answer], None],
) -> None:
    """Send the requests of *session*, each with the replies so far. A session ends at an answer that is not whole.

    Args:
        session: what is sent.
        dialect: in which API.
        client: opens the connections.
        router: base URL.
        delay_s: seconds until it begins.
        speed: the recorded gaps are divided by this.
        answered: told of every answer.
    """
    replies: list[str] = []
    await asyncio.sleep(delay_s)
    for number, turn in enumerate(session.turns):
        await asyncio.sleep(turn.gap_s / speed)
        reply = Reply()
        answer = await _ask(session, number, dialect.body(session, replies), dialect, client, router, reply)
        answered(answer)
        if not answer.is_whole:
            return
        replies.append("".join(reply.text))


async def _ask(
    session: Session,
    turn: int,
    body: bytes,
    dialect: Dialect,
    client: aiohttp.ClientSession,
    router: str,
    reply: Reply,
) -> Answer:
    status, decision, instance = 0, "", ""
    sent_s = time.monotonic()
    first_byte_s: float | None = None
    try:
        async with client.post(router + dialect.path, data=body, headers=dialect.headers) as response:
            status = response.status
            decision = response.headers.get("x-smetric-decision-id", "")
            instance = response.headers.get("x-smetric-instance", "")
            async for line in response.content:
                if status == 200 and line.startswith(b"data: "):
                    first_byte_s = first_byte_s or time.monotonic()
                    dialect.read(line[6:].strip(), reply)
    except aiohttp.ClientError:
        # A broken connection is an answer that is not whole; the report counts it.
        reply.is_complete = False
    ended_s = time.monotonic()
    return Answer(
        session=session.id,
        turn=turn,
        status=status,
        is_whole=status == 200 and reply.is_complete,
        decision=decision,
        instance=instance,
        sent_s=sent_s,
        first_byte_s=first_byte_s or ended_s,
        ended_s=ended_s,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
    )

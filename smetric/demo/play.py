"""Plays the sessions through a router by one policy, on engines that hold nothing yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from smetric.app import Application
from smetric.demo import stage
from smetric.demo.agent import Answer, play
from smetric.demo.dialect import Chat, Messages
from smetric.demo.figures import Figures
from smetric.demo.session import Session
from smetric.emulator.fleet import EmulatedFleet
from smetric.proxy.server import address_of, listen, serve
from smetric.telemetry.record import DecisionRecord

#: The sessions begin evenly spread over so many seconds.
BEGIN_WITHIN_S = 6.0
#: What still runs when the agents are done, seconds.
_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Play:
    """What came of one policy.

    Args:
        policy: as it was given: a shipped name or a file.
        answers: every answer, in the order they ended.
        records: the routing decisions of those answers, by id, as far as the router keeps them.
        figures: their sums.
        took_s: how long it took.
    """

    policy: str
    answers: Sequence[Answer]
    records: dict[str, DecisionRecord]
    figures: Figures
    took_s: float


async def perform(
    engines: EmulatedFleet,
    policy: str,
    sessions: Sequence[Session],
    *,
    speed: float,
    progress: Callable[[int, int], None],
    by_lmcache: bool = False,
) -> Play:
    """Play *sessions*, all at the same time, through a new router over *engines*, which are restarted before.

    Args:
        engines: they listen already.
        policy: a shipped name or a file.
        sessions: what is played.
        speed: gaps are divided by this, as the engines' own times should be.
        progress: told of every answer: how many there are, and requests in all.
        by_lmcache: LMCache's lookup tells what the engines hold, and not the router's own prefix index.

    Raises:
        ConfigError, PolicyError: the policy cannot be used.
    """
    engines.reset()
    lmcache_url = engines.lmcache_url if by_lmcache else ""
    application = Application(stage.settings(engines.urls, policy, lmcache_url=lmcache_url))
    total = sum(len(session.turns) for session in sessions)
    answers: list[Answer] = []

    def answered(answer: Answer) -> None:
        answers.append(answer)
        progress(len(answers), total)

    sock = listen("127.0.0.1", 0)
    stop = asyncio.Event()
    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(application.data_app(), sock, stop=stop.wait, drain_s=_DRAIN_S))
        await _act(sessions, address_of(sock), speed, answered)
        took_s = time.monotonic() - started
        stop.set()
    kept = application.telemetry.decisions
    records = {record.id: record for answer in answers if (record := kept.get(answer.decision)) is not None}
    return Play(policy, answers, records, Figures.of(answers, stage.INSTANCES), took_s)


async def _act(sessions: Sequence[Session], router: str, speed: float, answered: Callable[[Answer], None]) -> None:
    """All agents at once; every other one speaks the other API."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as client, asyncio.TaskGroup() as group:
        for number, session in enumerate(sessions):
            delay_s = BEGIN_WITHIN_S / speed * number / len(sessions)
            dialect = Chat() if number % 2 else Messages()
            begun = play(session, dialect, client, router, delay_s=delay_s, speed=speed, answered=answered)
            group.create_task(begun, name=session.id)

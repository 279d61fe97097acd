"""Asks the other sidecars what is where: at the start, and after something that one of them told was missed.

What they tell as it happens is in `peers.py`, how one of them is asked in `peer.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp
import structlog

from smetric.fleet.fleet import Fleet
from smetric.sources.index_image import IndexImage
from smetric.sources.peer import Peer
from smetric.sources.prefix_indexes import PrefixIndexes

#: Peers that are asked for all they know at the same time.
ASKED_AT_A_TIME = 4
#: Seconds between two times of asking all peers.
EVERY_S = 5.0

log = structlog.get_logger("smetric.peers")


class CatchUp:
    """One asking after the other, however often something is missed meanwhile.

    Args:
        indexes: where what they say is taken in.
        fleet: the instances.
        peers: those there are when they are asked.
    """

    def __init__(self, indexes: PrefixIndexes, fleet: Fleet, peers: Sequence[Peer]) -> None:
        self._indexes = indexes
        self._fleet = fleet
        self._peers = peers
        self._began_at = float("-inf")
        self._session: aiohttp.ClientSession | None = None
        self._asking: asyncio.Task[None] | None = None
        #: Something was missed since they were begun to be asked: who has answered by then may not have told of it.
        self._is_due = False

    async def start(self, session: aiohttp.ClientSession, within_s: float) -> None:
        """Ask over *session* from now on, and wait for the first answers for at most *within_s*."""
        self._session = session
        self.begin()
        assert self._asking is not None
        await asyncio.wait([self._asking], timeout=within_s)

    async def stop(self) -> None:
        """Ask no longer."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def begin(self) -> None:
        """Ask them; once more where they are being asked."""
        self._is_due = True
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._run(), name="catch-up")

    async def _run(self) -> None:
        await asyncio.sleep(max(0.0, self._began_at + EVERY_S - time.monotonic()))
        self._is_due, self._began_at = False, time.monotonic()
        try:
            await self._ask_all()
        except Exception:
            # Nobody waits for it, so what it raises is told here.
            log.exception("smetric.peer.failed", task="catch-up")
        if self._is_due:
            self._asking = None
            self.begin()

    async def _ask_all(self) -> None:
        """A few at a time: each tells mostly the same, up to all that is kept here."""
        turn, session = asyncio.Semaphore(ASKED_AT_A_TIME), self._session
        assert session is not None

        async def in_turn(peer: Peer) -> None:
            async with turn:
                if (image := await peer.ask(session, self._indexes.image_bytes)) is not None:
                    await self._restore(image)

        # Those that are known to answer first, and not everybody the same ones.
        peers = sorted(self._peers, key=lambda peer: (not peer.is_up, random.random()))
        await asyncio.gather(*(in_turn(peer) for peer in peers))

    async def _restore(self, image: IndexImage) -> None:
        """Take *image* in, one instance after the other, so that others may run in between."""
        for one in image.instances:
            instance, index = self._fleet.get(one.id), self._indexes.of(one.tokens)
            if instance is not None and index is not None:
                index.restore([one])
                index.take_in(instance)
                await asyncio.sleep(0)

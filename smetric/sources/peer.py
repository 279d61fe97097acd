"""One other sidecar: the batches that wait for it, and what it knows when it is asked.

What is in a batch, when, and what becomes of what it knows is in `peers.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque

import aiohttp
import structlog

from smetric.sources import index_image
from smetric.sources.answer_body import read_within
from smetric.sources.index_image import IndexImage, UnreadableImage
from smetric.telemetry.log_limit import CHANGES_TOLD, LogLimit

#: Where peers receive batches (POST) and give an image of their index (GET).
PATH = "/admin/placements"
#: Seconds a peer that is there may take to say what it knows: a gigabyte, over a busy network.
IMAGE_S = 30.0
#: Batches that wait for one peer; the oldest is dropped for a newer one.
MAX_QUEUED = 32
#: Answers of a router that wants nothing of this one: of another release, with another token, or without peers.
REFUSALS = frozenset(f"status {status}" for status in (400, 401, 403, 404, 405))
#: Answer of a router to a batch of its own.
OWN = 421

log = structlog.get_logger("smetric.peers")


class OwnBatch(Exception):
    """A batch that came to the router that sent it."""


class Peer:
    """How one peer stands, and what waits for it.

    Args:
        url: of its admin port.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        #: It took the last batch.
        self.is_up = False
        #: It answers, and wants nothing of this router: neither does it tell what it places.
        self.refuses = False
        #: Nothing waits for it.
        self.idle = asyncio.Event()
        #: Why it did not take the last batch, and why it did not say what it knows; empty where it did.
        self._reason = self._no_image = ""
        self._queue: deque[tuple[bytes, int]] = deque()
        self._filled = asyncio.Event()
        #: A balancer before two of them, one of which is down, changes all the time.
        self._change_limit = LogLimit(lines=CHANGES_TOLD)

    def put(self, batch: bytes, count: int) -> int:
        """Have *batch*, of *count* placements, wait for it; returns how many placements are dropped for it."""
        dropped = self._queue.popleft()[1] if len(self._queue) >= MAX_QUEUED else 0
        self._queue.append((batch, count))
        self.idle.clear()
        self._filled.set()
        return dropped

    async def next_batch(self) -> tuple[bytes, int]:
        """The batch that has waited longest, and the number of its placements; called when the one before is done."""
        if not self._queue:
            self._filled.clear()
            self.idle.set()
            await self._filled.wait()
        return self._queue.popleft()

    async def send(self, session: aiohttp.ClientSession, batch: bytes) -> bool:
        """Whether it takes *batch*.

        Raises:
            OwnBatch: this router is what answers there.
        """
        reason = await self._post(session, batch)
        changed = bool(reason) is self.is_up or reason != self._reason
        if changed and (kept_back := self._change_limit.passes(self.url)) is not None:
            log.warning("smetric.peer.changed", peer=self.url, is_up=not reason, reason=reason, kept_back=kept_back)
        self.is_up, self._reason, self.refuses = not reason, reason, reason in REFUSALS
        return self.is_up

    async def _post(self, session: aiohttp.ClientSession, batch: bytes) -> str:
        """Why it did not take *batch*; empty if it did."""
        try:
            async with session.post(self.url + PATH, data=batch, allow_redirects=False) as response:
                if response.status == OWN:
                    raise OwnBatch
                return "" if response.status == 204 else f"status {response.status}"
        except TimeoutError:
            return "timeout"
        except (aiohttp.ClientError, OSError):
            return "connect_error"

    async def ask(self, session: aiohttp.ClientSession, most: int) -> IndexImage | None:
        """What it knows, in at most *most* bytes; None where it does not say."""
        image, timeout = None, aiohttp.ClientTimeout(total=IMAGE_S, connect=session.timeout.total)
        try:
            async with session.get(self.url + PATH, allow_redirects=False, timeout=timeout) as response:
                if response.status != 200:
                    raise UnreadableImage(f"status {response.status}")
                if (data := await read_within(response, most)) is None:
                    raise UnreadableImage("it is larger than prefix_index.max_bytes")
            image = await asyncio.to_thread(index_image.decode, data)
            reason, write = "", log.info
        except UnreadableImage as error:
            reason, write = str(error), log.warning
        except TimeoutError:
            reason, write = "timeout", log.warning
        except (aiohttp.ClientError, OSError):
            # It is down, or has not started yet: then it will hear of us, and we of it, by batches.
            reason, write = "connect_error", log.info
        if reason and reason != self._no_image:
            write("smetric.peer.no_image", peer=self.url, reason=reason)
        self._no_image = reason
        return image

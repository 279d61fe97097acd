"""Tells the other sidecars in front of the same instances what was sent where, and hears it from them.

Only a router's own placements are sent, so nothing goes round in circles. Nothing here holds up a request: what cannot
be sent in time is dropped and counted, and who missed something knows it (`senders.py`) and asks for it
(`catch_up.py`). How one of them is spoken to is in `peer.py`, the form of what is sent in `placement.py` and
`index_image.py`; the routes that receive it are in `smetric.proxy.placements`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import Sequence

import structlog

from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.sources import index_image, placement
from smetric.sources.addresses import resolve
from smetric.sources.catch_up import CatchUp
from smetric.sources.index_image import pack, unpack
from smetric.sources.peer import OwnBatch, Peer
from smetric.sources.placement import Placement
from smetric.sources.plain_session import PlainSession
from smetric.sources.prefix_indexes import PrefixIndexes
from smetric.sources.senders import Senders
from smetric.telemetry import names
from smetric.telemetry.gauges import PeerFigures
from smetric.telemetry.log_limit import LogLimit

#: A batch is closed when it has this many bytes of hashes, before its time.
BATCH_BYTES = 1024 * 1024
#: Seconds after which an empty batch is sent, so that both sides know the other is there and nothing is missing.
HEARTBEAT_S = 2.0
#: Heartbeats that may fail to come before a peer's placements count as missing.
MISSING_HEARTBEATS = 3
#: Longest wait for a peer to take a batch, and at the start for what all of them know, seconds; what comes later is
#: taken in later.
TIMEOUT_S = 2.0
START_S = 2.1
#: Seconds for the last batch at the end.
LAST_S = 1.0
#: Seconds to wait after a failure; doubled each time up to the second.
PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
#: Blocks taken in before others may run.
STRETCH = 4096

log = structlog.get_logger("smetric.peers")


class Peers:
    """A background part of the application.

    Args:
        indexes: whose placements are shared.
        fleet: the instances, whose ids are the same for all sidecars.
        urls: admin ports of the peers; this router's own may be among them.
        token: what all of them know; empty for none.
        interval_s: seconds for which placements are gathered.
        heartbeat_s: seconds after which an empty batch is sent.
    """

    def __init__(
        self,
        indexes: PrefixIndexes,
        fleet: Fleet,
        urls: Sequence[str],
        *,
        token: str = "",
        interval_s: float = 0.2,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._indexes = indexes
        self._fleet = fleet
        self._peers = [Peer(url) for url in dict.fromkeys(urls)]
        self._catch_up = CatchUp(indexes, fleet, self._peers)
        self._token = token
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._sender = secrets.token_hex(8)
        self._number = 0
        self._pending: list[Placement] = []
        self._pending_bytes = 0
        self._flushed_at = 0.0
        self._senders = Senders(silence_s=MISSING_HEARTBEATS * heartbeat_s)
        self._session: PlainSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._log_limit = LogLimit()
        #: When a process started that a peer sent something, and that was newer than the one known here.
        self._processes: dict[Instance, float] = {}
        #: Placements sent (each to one peer), not sent, received, and received of no instance or process known here.
        self.sent = self.dropped = self.received = self.refused = 0
        for index in indexes:
            index.on_placed = self._placed

    def figures(self) -> PeerFigures:
        """For the metrics page."""
        placements = {
            names.PLACEMENT_SENT: self.sent,
            names.PLACEMENT_DROPPED: self.dropped,
            names.PLACEMENT_RECEIVED: self.received,
            names.PLACEMENT_REFUSED: self.refused,
        }
        return PeerFigures({peer.url: peer.is_up for peer in self._peers}, placements)

    def admits(self, authorization: str) -> bool:
        """Whether a request with this Authorization header comes from a peer."""
        return not self._token or hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    async def start(self) -> None:
        """Ask the peers what is where, wait for it for at most `START_S`, and begin to send."""
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        self._session = PlainSession(resolve, timeout_s=TIMEOUT_S, headers=headers)
        await self._catch_up.start(self._session.http, START_S)
        self._tasks = [asyncio.create_task(self._send(peer), name=f"peer {peer.url}") for peer in self._peers]
        self._tasks.append(asyncio.create_task(self._flush_for_ever(), name="placements"))
        self._tasks.append(asyncio.create_task(self._watch_senders(), name="senders"))
        for task in self._tasks:
            task.add_done_callback(_ended)

    async def stop(self) -> None:
        """Send what is left and say goodbye, for at most `LAST_S`, and close the connections."""
        self._flush(is_last=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await asyncio.gather(*(peer.idle.wait() for peer in self._peers if peer.is_up))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._catch_up.stop()
        if self._session is not None:
            await self._session.close()

    async def image(self) -> bytes:
        """The whole index, for a peer that has just started."""
        return await asyncio.to_thread(index_image.encode, await self._indexes.image())

    async def receive(self, data: bytes) -> None:
        """Take in a batch from a peer.

        Raises:
            UnreadableBatch: *data* is none.
            OwnBatch: this router sent it itself.
        """
        batch = placement.decode(data)
        if batch.sender == self._sender:
            raise OwnBatch
        if self._senders.heard(batch.sender, batch.number, is_last=batch.is_last):
            self._missed()
            self._catch_up.begin()
        left, is_stranger = STRETCH, False
        for one in batch.placements:
            instance, index = self._fleet.get(one.instance), self._indexes.of(one.tokens)
            if instance is None or index is None or not instance.is_incarnation(one.started_at):
                self.refused += 1
                if instance is None or index is None:
                    self._tell_refused(one.instance, "instance" if instance is None else "blocks")
                    is_stranger |= instance is None
                elif one.started_at is not None and one.started_at > (instance.started_at or 0.0):
                    self._processes[instance] = one.started_at
                continue
            self.received += 1
            blocks = unpack(one.packed)
            index.placed(instance, blocks)
            left -= len(blocks)
            if left <= 0:
                left = STRETCH
                await asyncio.sleep(0)
        if is_stranger:
            # It may be one of those here, under another id.
            self._missed()

    def _tell_refused(self, instance: str, problem: str) -> None:
        if (kept_back := self._log_limit.passes(problem)) is not None:
            log.warning("smetric.peer.refused", instance=instance, problem=problem, kept_back=kept_back)

    def _missed(self) -> None:
        """Something was placed that never arrives here."""
        self._indexes.missed(self._fleet.instances)

    def _placed(self, instance: Instance, blocks: Sequence[int], tokens: int) -> None:
        packed = pack(blocks)
        self._pending.append(Placement(instance.id, instance.started_at, packed, tokens))
        self._pending_bytes += len(packed) + 64
        if self._pending_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self, *, is_last: bool = False) -> None:
        """Close the batch and put it in every peer's queue."""
        body = placement.encode(self._sender, self._number, self._pending, is_last=is_last)
        for peer in self._peers:
            self.dropped += peer.put(body, len(self._pending))
        self._number += 1
        self._pending, self._pending_bytes = [], 0
        self._flushed_at = time.monotonic()

    async def _flush_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self._pending or time.monotonic() - self._flushed_at >= self._heartbeat_s:
                self._flush()

    async def _watch_senders(self) -> None:
        """While a sender is silent, or a peer refuses or tells nothing, what it places is missed: it may be asked."""
        unheard = 0
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for sender in self._senders.fallen_silent():
                log.warning("smetric.peer.silent", sender=sender, silence_s=MISSING_HEARTBEATS * self._heartbeat_s)
            # Who takes what is told and is not heard does not have this router among its peers, or does not reach it.
            taking, heard = sum(peer.is_up for peer in self._peers), self._senders.heard_now()
            unheard = unheard + 1 if taking > heard else 0
            if unheard == MISSING_HEARTBEATS:
                log.warning("smetric.peer.unheard", taking=taking, heard=heard)
            is_cut_off = self._senders.is_any_silent() or unheard >= MISSING_HEARTBEATS
            if is_cut_off or any(peer.refuses for peer in self._peers):
                self._missed()
            self._compare_processes()

    def _compare_processes(self) -> None:
        """A peer may see a restart first: what it sent to the new process before it was known here is missed."""
        known = [each for each, started_at in self._processes.items() if each.is_incarnation(started_at)]
        for instance in known:
            del self._processes[instance]
        if known:
            self._indexes.missed(known)
            self._catch_up.begin()

    async def _send(self, peer: Peer) -> None:
        """Send *peer* its batches in order; one that fails is not sent again."""
        assert self._session is not None
        pause_s = PAUSE_S
        while True:
            body, count = await peer.next_batch()
            try:
                is_taken = await peer.send(self._session.http, body)
            except OwnBatch:
                # One list may be given to all; but what took batches before is a balancer, and hides others.
                (log.warning if peer.is_up else log.info)("smetric.peer.own", peer=peer.url)
                self._peers.remove(peer)
                return
            if is_taken:
                self.sent += count
                pause_s = PAUSE_S
            else:
                self.dropped += count
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _ended(task: asyncio.Task[None]) -> None:
    """Nobody waits for these tasks, so what they raise is told here."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("smetric.peer.failed", task=task.get_name(), exc_info=error)

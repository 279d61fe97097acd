"""Placements shared between routers in front of the same instances.

Each router sends its own placements to its peers in numbered batches, so nothing circulates. Nothing here delays a
request: what cannot be sent in time is dropped and counted. A router that notices a loss asks its peers for an image of
their whole index. The HTTP routes that receive batches are in `smetric.admin.operations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
import structlog
from cachetools import TTLCache

from smetric import names
from smetric.errors import UNREADABLE
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.http.addresses import resolve
from smetric.log_limit import CHANGE_LINES, LogLimit
from smetric.sources.client import PlainSession, read_within
from smetric.sources.prefix_index.index import PrefixIndexes
from smetric.sources.prefix_index.persistence import (
    VERSION,
    IndexImage,
    UnreadableImage,
    decode_image,
    encode_image,
    pack,
    unpack,
)
from smetric.sources.shared import OWN, PATH, OwnBatch, UnreadableBatch

#: A batch with this many bytes of hashes is closed early.
BATCH_BYTES = 1024 * 1024
#: Batches queued for one peer; the oldest is dropped for a newer one.
MAX_QUEUED = 32
#: Seconds after which an empty batch is sent, so that both sides know that nothing is missing.
HEARTBEAT_S = 2.0
#: Missing heartbeats after which a peer's placements count as lost.
MISSING_HEARTBEATS = 3
#: Timeout for a peer to accept a batch, seconds.
TIMEOUT_S = 2.0
#: Longest wait at the start for the peers' images, seconds; later images are taken in later.
START_S = 2.1
#: Timeout of a peer's image, seconds: a gigabyte over a busy network.
IMAGE_S = 30.0
#: Seconds for the last batch at shutdown.
LAST_S = 1.0
#: Seconds to wait after a failure; doubled each time up to the second.
PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
#: Blocks taken in before other tasks run.
STRETCH = 4096
#: Peers asked for their image at the same time, and seconds between two rounds.
ASKED_AT_A_TIME = 4
EVERY_S = 5.0
#: Senders remembered; each restart of a router is a new one.
MAX_SENDERS = 1024
#: Seconds of silence after which a sender counts as gone: it places nothing any more.
GONE_S = 600.0
#: Responses of a router of another release, with another token, or without peers.
REFUSALS = frozenset(f"status {status}" for status in (400, 401, 403, 404, 405))
#: Name of a sender or an instance, which may be kept and logged.
_Name = Annotated[str, msgspec.Meta(max_length=256)]

log = structlog.get_logger("smetric.peers")


class Placement(msgspec.Struct, array_like=True, gc=False):
    """A prompt that an instance prefilled, or a reply that it gave.

    Args:
        instance: its id.
        started_at: start of its process, seconds since the epoch; None if unknown.
        packed: block hashes in prompt order, 8 bytes each in little endian.
        tokens: token ids per block; 0 for blocks of text.
    """

    instance: _Name
    started_at: float | None
    packed: bytes
    tokens: int = 0


class Batch(msgspec.Struct, array_like=True):
    """Placements of one router, in their order.

    Args:
        version: of the form and of the hashes.
        sender: random name of the sending process.
        number: sequence number within the sender, starting at 0.
        placements: the sender's own only.
        is_last: whether the sender ends and places nothing any more.
    """

    version: int
    sender: _Name
    number: int
    placements: list[Placement]
    is_last: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Batch)


def encode_batch(sender: str, number: int, placements: list[Placement], *, is_last: bool = False) -> bytes:
    """Return a batch as bytes."""
    return _ENCODER.encode(Batch(VERSION, sender, number, placements, is_last))


def decode_batch(data: bytes) -> Batch:
    """Return the batch that `encode_batch` encoded as *data*.

    Raises:
        UnreadableBatch: it has another version, or is inconsistent.
    """
    try:
        batch = _DECODER.decode(data)
    except UNREADABLE:
        raise UnreadableBatch("it is no batch of placements") from None
    if batch.version != VERSION:
        raise UnreadableBatch(f"it is of version {batch.version}, this router speaks {VERSION}; run the same release")
    if any(len(placement.packed) % 8 for placement in batch.placements):
        raise UnreadableBatch("a placement has a truncated hash")
    if any(len(set(unpack(placement.packed))) < len(placement.packed) // 8 for placement in batch.placements):
        raise UnreadableBatch("a placement has one block in two places")
    return batch


class Peer:
    """Another router: its queue of batches, and requests to it.

    Args:
        url: of its admin port.

    Attributes:
        is_up: whether it accepted the last batch.
        refuses: whether it answers but wants nothing of this router; then it does not send its placements either.
        idle: set while its queue is empty and nothing is being sent.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_up = False
        self.refuses = False
        self.idle = asyncio.Event()
        #: Why it did not accept the last batch, and why it returned no image; empty if it did.
        self._reason = self._no_image = ""
        self._queue: deque[tuple[bytes, int]] = deque()
        self._filled = asyncio.Event()
        #: A load balancer in front of two routers, one of which is down, changes all the time.
        self._change_limit = LogLimit(lines=CHANGE_LINES)

    def put(self, batch: bytes, count: int) -> int:
        """Queue *batch*, of *count* placements; return how many placements are dropped for it."""
        dropped = self._queue.popleft()[1] if len(self._queue) >= MAX_QUEUED else 0
        self._queue.append((batch, count))
        self.idle.clear()
        self._filled.set()
        return dropped

    async def next_batch(self) -> tuple[bytes, int]:
        """Return the oldest batch and the number of its placements. Call it when the batch before is done."""
        if not self._queue:
            self._filled.clear()
            self.idle.set()
            await self._filled.wait()
        return self._queue.popleft()

    async def send(self, session: aiohttp.ClientSession, batch: bytes) -> bool:
        """Send *batch*; return whether the peer accepted it.

        Raises:
            OwnBatch: the peer is this router.
        """
        reason = await self._post(session, batch)
        changed = bool(reason) is self.is_up or reason != self._reason
        if changed and (kept_back := self._change_limit.passes(self.url)) is not None:
            log.warning("smetric.peer.changed", peer=self.url, is_up=not reason, reason=reason, kept_back=kept_back)
        self.is_up, self._reason, self.refuses = not reason, reason, reason in REFUSALS
        return self.is_up

    async def _post(self, session: aiohttp.ClientSession, batch: bytes) -> str:
        """Send *batch*; return why the peer did not accept it, or an empty text."""
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
        """Return the image of its index, at most *most* bytes; None if it does not give one."""
        image, timeout = None, aiohttp.ClientTimeout(total=IMAGE_S, connect=session.timeout.total)
        try:
            async with session.get(self.url + PATH, allow_redirects=False, timeout=timeout) as response:
                if response.status != 200:
                    raise UnreadableImage(f"status {response.status}")
                if (data := await read_within(response, most)) is None:
                    raise UnreadableImage("it is larger than prefix_index.max_bytes")
            image = await asyncio.to_thread(decode_image, data)
            reason, write = "", log.info
        except UnreadableImage as error:
            reason, write = str(error), log.warning
        except TimeoutError:
            reason, write = "timeout", log.warning
        except (aiohttp.ClientError, OSError):
            # It is down or has not started yet; in that case both learn of each other by batches.
            reason, write = "connect_error", log.info
        if reason and reason != self._no_image:
            write("smetric.peer.no_image", peer=self.url, reason=reason)
        self._no_image = reason
        return image


@dataclass(slots=True)
class _Sender:
    next_number: int
    heard_at: float
    is_silent: bool = False


class Senders:
    """Routers that send batches here, and whether any of their batches is missing.

    A sender numbers its batches from 0, sends at least one every heartbeat, and marks its last one.

    Args:
        silence_s: seconds without a batch after which batches count as missing.
        clock: monotonic seconds.
    """

    def __init__(self, *, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._senders: TTLCache[str, _Sender] = TTLCache(MAX_SENDERS, GONE_S, timer=clock)

    def heard(self, sender: str, number: int, *, is_last: bool) -> bool:
        """Note batch *number* of *sender*; return whether one before it is missing."""
        known = self._senders.pop(sender, None)
        expected = known.next_number if known is not None else 0
        if not is_last:
            self._senders[sender] = _Sender(max(expected, number + 1), self._clock())
        return number > expected

    def fallen_silent(self) -> list[str]:
        """Return the senders whose silence was not returned before."""
        fallen = []
        for name, sender in self._senders.items():
            if self._is_silent(sender) and not sender.is_silent:
                sender.is_silent = True
                fallen.append(name)
        return fallen

    def heard_now(self) -> int:
        """Return how many senders are neither silent nor gone."""
        return sum(not self._is_silent(sender) for sender in self._senders.values())

    def is_any_silent(self) -> bool:
        """Return whether a sender that may still place something is silent."""
        return any(self._is_silent(sender) for sender in self._senders.values())

    def _is_silent(self, sender: _Sender) -> bool:
        return self._clock() - sender.heard_at >= self._silence_s


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """Figures of the exchange with other routers.

    Args:
        up: whether each peer accepts batches, by URL.
        placements: number of placements by result, one of `names.PLACEMENT_RESULTS`.
    """

    up: Mapping[str, bool]
    placements: Mapping[str, int]


class Peers:
    """Exchange of placements with all peers; background work of the application.

    Args:
        indexes: the indexes whose placements are shared.
        fleet: the instances, whose ids are the same for all routers.
        urls: admin ports of the peers; this router's own may be among them.
        token: shared secret; empty for none.
        interval_s: seconds for which placements are gathered.
        heartbeat_s: seconds after which an empty batch is sent.

    Attributes:
        sent: placements accepted, counted for each peer.
        dropped: placements not sent, counted for each peer.
        received: placements taken in.
        refused: placements received for an instance, process or kind of blocks that is unknown here.
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
        #: The present round of asking all peers for their images, and when it began.
        self._round: asyncio.Task[None] | None = None
        self._round_at = float("-inf")
        #: Something was lost since then: images received before may lack it.
        self._is_round_due = False
        self._log_limit = LogLimit()
        #: Start of an instance's process that a peer named and that is newer than the one known here.
        self._processes: dict[Instance, float] = {}
        self.sent = self.dropped = self.received = self.refused = 0
        for index in indexes:
            index.on_placed = self._placed

    def figures(self) -> PeerFigures:
        """Return the figures for the metrics page."""
        placements = {
            names.PLACEMENT_SENT: self.sent,
            names.PLACEMENT_DROPPED: self.dropped,
            names.PLACEMENT_RECEIVED: self.received,
            names.PLACEMENT_REFUSED: self.refused,
        }
        return PeerFigures({peer.url: peer.is_up for peer in self._peers}, placements)

    def admits(self, authorization: str) -> bool:
        """Return whether a request with this Authorization header comes from a peer."""
        return not self._token or hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    async def start(self) -> None:
        """Ask the peers for their images, wait for them for at most `START_S`, and begin to send."""
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        self._session = PlainSession(resolve, timeout_s=TIMEOUT_S, headers=headers)
        self._catch_up()
        assert self._round is not None
        await asyncio.wait([self._round], timeout=START_S)
        self._tasks = [asyncio.create_task(self._send(peer), name=f"peer {peer.url}") for peer in self._peers]
        self._tasks.append(asyncio.create_task(self._flush_periodically(), name="placements"))
        self._tasks.append(asyncio.create_task(self._watch_senders(), name="senders"))
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    async def stop(self) -> None:
        """Send the last batch, for at most `LAST_S`, and close the connections."""
        self._flush(is_last=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                await asyncio.gather(*(peer.idle.wait() for peer in self._peers if peer.is_up))
        tasks = [*self._tasks, *([self._round] if self._round is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def image(self) -> bytes:
        """Return an image of the whole index, for a peer."""
        return await asyncio.to_thread(encode_image, await self._indexes.image())

    async def receive(self, data: bytes) -> None:
        """Take in a batch from a peer.

        Raises:
            UnreadableBatch: *data* is not a batch.
            OwnBatch: this router sent it itself.
        """
        batch = decode_batch(data)
        if batch.sender == self._sender:
            raise OwnBatch
        if self._senders.heard(batch.sender, batch.number, is_last=batch.is_last):
            self._missed()
            self._catch_up()
        left, is_unknown = STRETCH, False
        for one in batch.placements:
            instance, index = self._fleet.get(one.instance), self._indexes.of(one.tokens)
            if instance is None or index is None:
                self.refused += 1
                self._log_refused(one.instance, "instance" if instance is None else "blocks")
                is_unknown |= instance is None
            elif not instance.is_incarnation(one.started_at):
                self.refused += 1
                if one.started_at is not None and one.started_at > (instance.started_at or 0.0):
                    self._processes[instance] = one.started_at
            else:
                self.received += 1
                blocks = unpack(one.packed)
                index.placed(instance, blocks)
                left -= len(blocks)
                if left <= 0:
                    left = STRETCH
                    await asyncio.sleep(0)
        if is_unknown:
            # It may be an instance of this router under another id.
            self._missed()

    def _log_refused(self, instance: str, problem: str) -> None:
        if (kept_back := self._log_limit.passes(problem)) is not None:
            log.warning("smetric.peer.refused", instance=instance, problem=problem, kept_back=kept_back)

    def _missed(self) -> None:
        """Note that placements were lost."""
        self._indexes.missed(self._fleet.instances)

    def _placed(self, instance: Instance, blocks: Sequence[int], tokens: int) -> None:
        packed = pack(blocks)
        self._pending.append(Placement(instance.id, instance.started_at, packed, tokens))
        self._pending_bytes += len(packed) + 64
        if self._pending_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self, *, is_last: bool = False) -> None:
        """Close the batch and queue it for every peer."""
        body = encode_batch(self._sender, self._number, self._pending, is_last=is_last)
        for peer in self._peers:
            self.dropped += peer.put(body, len(self._pending))
        self._number += 1
        self._pending, self._pending_bytes = [], 0
        self._flushed_at = time.monotonic()

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self._pending or time.monotonic() - self._flushed_at >= self._heartbeat_s:
                self._flush()

    async def _watch_senders(self) -> None:
        """Count placements as lost while a sender is silent, or a peer refuses batches or sends none."""
        unheard = 0
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for sender in self._senders.fallen_silent():
                log.warning("smetric.peer.silent", sender=sender, silence_s=MISSING_HEARTBEATS * self._heartbeat_s)
            # A peer that accepts batches and sends none does not list this router, or cannot reach it.
            taking, heard = sum(peer.is_up for peer in self._peers), self._senders.heard_now()
            unheard = unheard + 1 if taking > heard else 0
            if unheard == MISSING_HEARTBEATS:
                log.warning("smetric.peer.unheard", taking=taking, heard=heard)
            is_cut_off = self._senders.is_any_silent() or unheard >= MISSING_HEARTBEATS
            if is_cut_off or any(peer.refuses for peer in self._peers):
                self._missed()
            self._compare_processes()

    def _compare_processes(self) -> None:
        """Catch up on instances whose restart a peer saw first: its placements were refused until now."""
        known = [each for each, started_at in self._processes.items() if each.is_incarnation(started_at)]
        for instance in known:
            del self._processes[instance]
        if known:
            self._indexes.missed(known)
            self._catch_up()

    def _catch_up(self) -> None:
        """Ask all peers for their images, after the present round if there is one."""
        self._is_round_due = True
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._ask_all(), name="catch-up")

    async def _ask_all(self) -> None:
        """Ask a few peers at a time: their images mostly repeat each other."""
        await asyncio.sleep(max(0.0, self._round_at + EVERY_S - time.monotonic()))
        self._is_round_due, self._round_at = False, time.monotonic()
        turn = asyncio.Semaphore(ASKED_AT_A_TIME)
        # Peers that are up come first, in random order so that not all routers ask the same ones.
        peers = sorted(self._peers, key=lambda peer: (not peer.is_up, random.random()))
        try:
            await asyncio.gather(*(self._ask(peer, turn) for peer in peers))
        except Exception:
            log.exception("smetric.peer.failed", task="catch-up")
        if self._is_round_due:
            # A new task, so that `start` waits for the first round only.
            self._round = None
            self._catch_up()

    async def _ask(self, peer: Peer, turn: asyncio.Semaphore) -> None:
        """Take in the image of *peer*, instance by instance so that other tasks run in between."""
        assert self._session is not None
        async with turn:
            image = await peer.ask(self._session.http, self._indexes.image_bytes)
            for one in image.instances if image is not None else ():
                instance, index = self._fleet.get(one.id), self._indexes.of(one.tokens)
                if instance is not None and index is not None:
                    index.restore([one])
                    index.take_in(instance)
                    await asyncio.sleep(0)

    async def _send(self, peer: Peer) -> None:
        """Send *peer* its batches in order; a batch that fails is not sent again."""
        assert self._session is not None
        pause_s = PAUSE_S
        while True:
            body, count = await peer.next_batch()
            try:
                is_taken = await peer.send(self._session.http, body)
            except OwnBatch:
                # All routers may share one list. A URL that accepted batches before is a balancer and hides others.
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


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log the exception of a task that nothing awaits."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("smetric.peer.failed", task=task.get_name(), exc_info=error)

"""Placements shared between routers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import random
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import aiohttp
import msgspec
import structlog

from smetric import names
from smetric.errors import UNREADABLE
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.http.addresses import resolve
from smetric.log_limit import CHANGES_TOLD, LogLimit
from smetric.sources.client import PlainSession, read_within
from smetric.sources.prefix_index import image
from smetric.sources.prefix_index import image as index_image
from smetric.sources.prefix_index.image import VERSION, IndexImage, UnreadableImage, pack, unpack
from smetric.sources.prefix_index.index import PrefixIndexes

# What sidecars tell each other: which instance was sent which blocks, in numbered batches.
#
# When batches are sent and what follows from a missing one is in `peers.py`.

#: Most bytes of a batch that is taken.
MAX_BATCH_BYTES = 4 * 1024 * 1024
#: A name of a sender or an instance, which may be kept and logged.
_Name = Annotated[str, msgspec.Meta(max_length=256)]


class UnreadableBatch(Exception):
    """Bytes that are no batch of this version; the message says why, without any of them."""


class Placement(msgspec.Struct, array_like=True, gc=False):
    """A prompt that an instance prefilled, or the end of one that it answered.

    Args:
        instance: its id.
        started_at: when its process started, seconds since the epoch; None where it does not say.
        packed: block hashes in prompt order, 8 bytes each in little endian.
        tokens: token ids in a block; 0 where blocks are of text.
    """

    instance: _Name
    started_at: float | None
    packed: bytes
    tokens: int = 0


class Batch(msgspec.Struct, array_like=True):
    """Placements in the order they were made.

    Args:
        version: of the form and of the hashes.
        sender: drawn at random by each process.
        number: 0 for a sender's first batch, then one more each time.
        placements: its own only, never what others told it.
        is_last: the sender ends, and places nothing any more.
    """

    version: int
    sender: _Name
    number: int
    placements: list[Placement]
    is_last: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Batch)


def encode(sender: str, number: int, placements: list[Placement], *, is_last: bool = False) -> bytes:
    """A batch as bytes."""
    return _ENCODER.encode(Batch(VERSION, sender, number, placements, is_last))


def decode(data: bytes) -> Batch:
    """The batch that `encode` made *data* of.

    Raises:
        UnreadableBatch: it is of another version, or says what cannot be.
    """
    try:
        batch = _DECODER.decode(data)
    except UNREADABLE:
        raise UnreadableBatch("it is no batch of placements") from None
    if batch.version != VERSION:
        raise UnreadableBatch(f"it is of version {batch.version}, this router speaks {VERSION}; run the same release")
    if any(len(placement.packed) % 8 for placement in batch.placements):
        raise UnreadableBatch("a placement has a hash that is cut off")
    if any(len(set(unpack(placement.packed))) < len(placement.packed) // 8 for placement in batch.placements):
        raise UnreadableBatch("a placement has one block in two places")
    return batch


# One other sidecar: the batches that wait for it, and what it knows when it is asked.
#
# What is in a batch, when, and what becomes of what it knows is in `peers.py`.

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


# Which sidecars tell placements, and whether any of it is missing: by the numbers of what comes, and by silence.
#
# What they tell is in `placement.py`; what follows when something is missing is in `peers.py`.

#: Senders remembered; each restart of a sidecar is a new one.
MAX_SENDERS = 1024
#: Seconds of silence after which a sender is gone, and places nothing any more.
GONE_S = 600.0


@dataclass(slots=True)
class _Sender:
    next_number: int
    heard_at: float
    is_silent: bool = False


class Senders:
    """Those that were heard, the one heard longest ago first.

    A sender counts its batches from 0, sends one at least every heartbeat, and says which is its last.

    Args:
        silence_s: seconds without a batch after which those that should have come count as missing.
        clock: monotonic seconds.
    """

    def __init__(self, *, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    def heard(self, sender: str, number: int, *, is_last: bool) -> bool:
        """Batch *number* of *sender* is here; returns whether one before it is missing."""
        known = self._senders.pop(sender, None)
        expected = known.next_number if known is not None else 0
        if not is_last:
            self._senders[sender] = _Sender(max(expected, number + 1), self._clock())
            if len(self._senders) > MAX_SENDERS:
                self._senders.popitem(last=False)
        return number > expected

    def fallen_silent(self) -> list[str]:
        """Senders whose silence was not noticed before."""
        fallen = []
        for name, sender in self._silent():
            if not sender.is_silent:
                sender.is_silent = True
                fallen.append(name)
        return fallen

    def heard_now(self) -> int:
        """How many are heard, and have not ended."""
        silent = len(self._silent())
        return len(self._senders) - silent

    def is_any_silent(self) -> bool:
        """Whether somebody who may still place something is not heard."""
        return bool(self._silent())

    def _silent(self) -> list[tuple[str, _Sender]]:
        """Those not heard for `silence_s`; who is not heard for `GONE_S` is forgotten."""
        now = self._clock()
        silent = []
        for name, sender in list(self._senders.items()):
            if now - sender.heard_at < self._silence_s:
                break
            if now - sender.heard_at >= GONE_S:
                del self._senders[name]
            else:
                silent.append((name, sender))
        return silent


# Asks the other sidecars what is where: at the start, and after something that one of them told was missed.
#
# What they tell as it happens is in `peers.py`, how one of them is asked in `peer.py`.

#: Peers that are asked for all they know at the same time.
ASKED_AT_A_TIME = 4
#: Seconds between two times of asking all peers.
EVERY_S = 5.0


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


# Tells the other sidecars in front of the same instances what was sent where, and hears it from them.
#
# Only a router's own placements are sent, so nothing goes round in circles. Nothing here holds up a request: what
# cannot be sent in time is dropped and counted, and who missed something knows it (`senders.py`) and asks for it
# (`catch_up.py`). How one of them is spoken to is in `peer.py`, the form of what is sent in `placement.py` and
# `index_image.py`; the routes that receive it are in `smetric.proxy.placements`.

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


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """Figures of the exchange with other routers.

    Args:
        up: whether each peer takes what it is sent, by URL.
        placements: number of placements by result, one of `names.PLACEMENT_RESULTS`.
    """

    up: Mapping[str, bool]
    placements: Mapping[str, int]


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
        return await asyncio.to_thread(image.encode, await self._indexes.image())

    async def receive(self, data: bytes) -> None:
        """Take in a batch from a peer.

        Raises:
            UnreadableBatch: *data* is none.
            OwnBatch: this router sent it itself.
        """
        batch = decode(data)
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
        body = encode(self._sender, self._number, self._pending, is_last=is_last)
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

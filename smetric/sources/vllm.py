"""Polls vLLM instances: load and restarts from `/metrics`, served names from `/v1/models`.

Each instance has its own loop, so one that hangs delays no other. What a page says is read in
`smetric.sources.vllm_page`; how a scrape is corrected and grows old is in `smetric.fleet`; whether instances answer at
all is asked by `smetric.sources.probe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
import structlog

from smetric.fleet.instance import CacheConfig, Instance, Scrape
from smetric.sources.addresses import Resolve, resolve
from smetric.sources.answer_body import is_plain, read_within
from smetric.sources.pace import next_turn
from smetric.sources.plain_session import PlainSession
from smetric.sources.vllm_page import Page, parse_page
from smetric.telemetry.log_limit import CHANGES_TOLD, LogLimit
from smetric.unreadable import UNREADABLE

#: Largest page and largest model list that are read, in bytes. Real pages are 50 to 75 KB for each engine.
MAX_PAGE_BYTES = 4 * 1024 * 1024
MAX_MODELS_BYTES = 1024 * 1024
#: Pages above this are parsed in a thread.
INLINE_PAGE_BYTES = 256 * 1024
#: Most names taken from one instance's model list.
MAX_MODELS = 4096
#: Seconds between two looks at an instance's model list.
MODELS_INTERVAL_S = 30.0

log = structlog.get_logger("smetric.sources.vllm")


class _Card(msgspec.Struct):
    id: str
    #: An adapter's base model.
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


_CARDS = msgspec.json.Decoder(_Cards)


@dataclass(slots=True)
class _Seen:
    """What is remembered of one instance between two scrapes."""

    result: str = "ok"
    counters: dict[str, float] = field(default_factory=dict)
    models_due: float = float("-inf")
    #: Why the models could not be read last time; empty if they could.
    models_problem: str = ""


class _Unreadable(Exception):
    """An answer that is no page; the message is the result it is counted as."""


class VllmSource:
    """A background part that writes scrapes, cache configuration and model names to the instances.

    Args:
        instances: those to poll.
        interval_s: seconds between two scrapes of one instance.
        timeout_s: seconds one request may take, connecting included.
        resolve: how names are looked up.
        on_restart: called after an instance was seen to have restarted and its incarnation was counted.
        on_scrape: called after each scrape with its result (ok, timeout, connect_error, http_error, bad_page) and the
            seconds it took.
        clock: monotonic seconds, the fleet's.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        *,
        interval_s: float = 1.0,
        timeout_s: float = 2.0,
        resolve: Resolve = resolve,
        on_restart: Callable[[Instance], None],
        on_scrape: Callable[[Instance, str, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seen = {instance: _Seen() for instance in instances}
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._on_restart = on_restart
        self._on_scrape = on_scrape
        self._clock = clock
        self._log_limit = LogLimit(clock)
        #: Several engines at one address restart with every page, and one at its limit is late with every other.
        self._change_limit = LogLimit(clock, lines=CHANGES_TOLD)
        self._session: PlainSession | None = None
        self._loops: list[asyncio.Task[None]] = []
        self._unseen = set(instances)
        self._all_seen = asyncio.Event()

    async def start(self) -> None:
        """Open the connections' pool and begin one loop for each instance."""
        self._session = PlainSession(self._resolve, timeout_s=self._timeout_s)
        self._loops = [
            asyncio.create_task(self._poll(instance, self._interval_s * number / len(self._seen)), name=instance.id)
            for number, instance in enumerate(self._seen)
        ]

    async def first_look(self, within_s: float) -> None:
        """Wait until every instance was scraped once, with whatever result, but not longer than *within_s* seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_seen.wait(), within_s)

    async def stop(self) -> None:
        """End the loops and close the connections."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _poll(self, instance: Instance, offset_s: float) -> None:
        """Scrape for ever, at a steady pace; the first one at once, so that a cold start knows its instances."""
        due = self._clock() + offset_s
        while True:
            try:
                await self.scrape(instance)
            except Exception:
                # A fault of ours (or of a callback) must not blind the router to this instance for good.
                if (kept_back := self._log_limit.passes(instance.id)) is not None:
                    log.exception("smetric.scrape.crashed", instance=instance.id, kept_back=kept_back)
            due = next_turn(due, self._interval_s, self._clock())
            await asyncio.sleep(due - self._clock())

    async def scrape(self, instance: Instance) -> str:
        """Read one instance's metrics, and its model list when that is due; returns the result as counted."""
        seen = self._seen[instance]
        sent_at, own = self._clock(), instance.own
        try:
            text = await self._get(instance, "/metrics", MAX_PAGE_BYTES)
            page = parse_page(text) if len(text) <= INLINE_PAGE_BYTES else await asyncio.to_thread(parse_page, text)
            result = self._take(instance, seen, page, sent_at, own)
        except _Unreadable as error:
            result = str(error)
        self._unseen.discard(instance)
        if not self._unseen:
            self._all_seen.set()
        if result != seen.result:
            seen.result = result
            self._tell("smetric.scrape.changed", instance, result=result)
        self._on_scrape(instance, result, self._clock() - sent_at)
        if (
            not instance.models_fixed
            and self._clock() >= seen.models_due
            and result not in ("connect_error", "timeout")
        ):
            await self._read_models(instance, seen)
        return result

    def _take(self, instance: Instance, seen: _Seen, page: Page, sent_at: float, own: int) -> str:
        """Write what *page* says; unknown values leave the last known ones to grow old."""
        has_computed_nothing = bool(page.counters) and not any(page.counters.values())
        if self._restarted(instance, seen, page):
            # What is under way may have been sent to the new process, and is then not taken for held there.
            instance.restarted(page.started_at, seen_empty=has_computed_nothing and not instance.own)
            instance.scrape = None
            seen.counters.clear()
            seen.models_due = float("-inf")
            self._tell("smetric.instance.restarted", instance, incarnation=instance.incarnation)
            self._on_restart(instance)
        elif not seen.counters and page.counters:
            instance.seen_empty = has_computed_nothing
        moved = not page.counters or page.counters != seen.counters
        seen.counters.update(page.counters)
        if page.started_at is not None:
            instance.started_at = page.started_at
        if page.prefix_tokens is not None:
            instance.prefix_tokens = page.prefix_tokens
        if page.cache:
            instance.cache = _cache_config(page.cache)
        if page.running is None or page.waiting is None:
            return "bad_page"
        last = instance.scrape
        values = (page.running, page.waiting, page.kv_usage)
        busy = page.running + page.waiting > 0
        frozen = busy and not moved and last is not None and values == (last.running, last.waiting, last.kv_usage)
        # A busy engine whose series stand still has not looked since: its values are as old as their last change.
        if not frozen:
            instance.scrape = Scrape(
                sent_at, page.running, page.waiting, page.kv_usage, own, page.loras, page.lora_room
            )
            instance.load_changed()
        return "bad_page" if page.refused else "ok"

    def _tell(self, event: str, instance: Instance, **fields: object) -> None:
        if (kept_back := self._change_limit.passes((event, instance.id))) is not None:
            log.warning(event, instance=instance.id, **fields, kept_back=kept_back)

    @staticmethod
    def _restarted(instance: Instance, seen: _Seen, page: Page) -> bool:
        told = page.started_at is not None and instance.started_at is not None
        if told and not instance.is_incarnation(page.started_at):
            return True
        return any(value < seen.counters.get(name, 0.0) for name, value in page.counters.items())

    async def _read_models(self, instance: Instance, seen: _Seen) -> None:
        """Take the names an instance serves; what cannot be read leaves those known before."""
        seen.models_due = self._clock() + MODELS_INTERVAL_S
        try:
            cards = _CARDS.decode(await self._get(instance, "/v1/models", MAX_MODELS_BYTES))
        except (_Unreadable, *UNREADABLE) as error:
            reason = str(error) if isinstance(error, _Unreadable) else "bad_page"
            if reason != seen.models_problem:
                log.warning("smetric.models.unreadable", instance=instance.id, result=reason)
            seen.models_problem = reason
            return
        seen.models_problem = ""
        instance.models = frozenset(card.id for card in cards.data[:MAX_MODELS])
        instance.adapters = frozenset(card.id for card in cards.data[:MAX_MODELS] if card.parent is not None)

    async def _get(self, instance: Instance, path: str, limit: int) -> bytes:
        """The body of a 200 answer of at most *limit* bytes.

        Raises:
            _Unreadable: there is none.
        """
        assert self._session is not None, "start() comes first"
        headers = {"Authorization": f"Bearer {instance.key.text}"} if instance.key is not None else {}
        try:
            async with self._session.http.get(instance.url + path, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    raise _Unreadable("http_error")
                if not is_plain(response):
                    raise _Unreadable("bad_page")
                if (body := await read_within(response, limit)) is None:
                    raise _Unreadable("bad_page")
        except TimeoutError:
            raise _Unreadable("timeout") from None
        except (aiohttp.ClientConnectionError, OSError):
            raise _Unreadable("connect_error") from None
        except aiohttp.ClientError:
            raise _Unreadable("bad_page") from None
        return bytes(body)


def _cache_config(labels: dict[str, str]) -> CacheConfig:
    """The cache configuration; what an engine writes as None, or absurdly, stays unknown."""
    return CacheConfig(
        block_size=_whole(labels.get("block_size"), 65536),
        num_blocks=_whole(labels.get("num_gpu_blocks"), 10**9),
        prefix_caching={"True": True, "False": False}.get(labels.get("enable_prefix_caching", "")),
        labels=labels,
    )


def _whole(text: str | None, highest: int) -> int | None:
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 10:
        return None
    return int(text) if 0 < int(text) <= highest else None

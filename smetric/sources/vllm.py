"""vLLM instances polled: load, restarts and served names by `Scraper`, health by `Prober`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from urllib.parse import SplitResult, urlsplit

import aiohttp
import structlog

from smetric.fleet.health import Health
from smetric.fleet.instance import CacheConfig, Instance, PrefixTokens, Scrape
from smetric.http.addresses import Addresses, Resolve, is_own_fault, port_of, resolve
from smetric.log_limit import CHANGE_LINES, LogLimit
from smetric.policy.vocabulary import LARGEST
from smetric.sources.client import PlainSession, is_plain, read_within
from smetric.sources.models import ModelLists, Unread

#: Largest page that is read, in bytes. Real pages have 50 to 75 KB for each engine.
MAX_PAGE_BYTES = 4 * 1024 * 1024
#: Pages above this size are parsed in a thread, which searches this many bytes before it lets others run.
INLINE_PAGE_BYTES = 256 * 1024
STRETCH_BYTES = 64 * 1024
#: Most series of wanted names on a page, except those of adapters in use. A page with more is refused.
MAX_SERIES = 2048
#: Longest first line of a probe's response, bytes.
MAX_LINE_BYTES = 8 * 1024
#: If a probe's timeout is noticed more than this late, in seconds, the process was suspended or busy.
LATE_S = 0.5

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"
_OLD_USAGE = "vllm:gpu_cache_usage_perc"
_CACHE = "vllm:cache_config_info"
_START = "process_start_time_seconds"
_LORA = "vllm:lora_requests_info"
_SLEEP = "vllm:engine_sleep_state"
_AWAKE = b'sleep_state="awake"'
#: Prompt tokens looked up in the engine's own cache and found there, under the new and the old name. Tokens not found
#: there are looked up in an external cache.
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
#: Counters that fall only if the process restarts.
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", *QUERIES, *HITS, EXTERNAL_HITS)
_WANTED = (_RUNNING, _WAITING, _USAGE, _OLD_USAGE, _CACHE, _START, _LORA, _SLEEP, *COUNTERS)
# The value must be followed by something: a page truncated within a number would give a wrong one.
_SERIES = re.compile(
    rb"\n(%b)(\{[^\n]{0,8192}\})?[ \t]+([^ \t\n]{1,64})(?=[ \t\r\n])" % b"|".join(name.encode() for name in _WANTED)
)
_LABEL = re.compile(rb'([a-z_]+)="([^"\\]{0,128})"')
_LORA_LABEL = re.compile(rb'(max_lora|running_lora_adapters|waiting_lora_adapters)="([^"\\]{0,8192})"')
_CACHE_LABELS = (
    "block_size",
    "num_gpu_blocks",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "kv_cache_size_tokens",
)

log = structlog.get_logger("smetric.sources.vllm")


@dataclass(slots=True)
class Page:
    """Values of a `/metrics` page. A value that is missing or invalid is None.

    Args:
        running: requests running, summed over engines.
        waiting: requests waiting, summed over engines.
        kv_usage: share of KV blocks in use, mean over engines.
        started_at: when the process started, seconds since the epoch.
        counters: `COUNTERS` by name, summed over engines.
        prefix_tokens: prompt tokens by the cache they were found in.
        cache: labels of the first engine's cache configuration.
        loras: adapters in use by running and waiting requests.
        lora_room: whether there is a slot for one more.
        asleep: whether an engine of the page sleeps (`POST /sleep`).
        refused: series whose value was NaN, infinite, negative or out of range; all, if there were too many.
    """

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    started_at: float | None = None
    counters: dict[str, float] = field(default_factory=dict)
    prefix_tokens: PrefixTokens | None = None
    cache: dict[str, str] = field(default_factory=dict)
    loras: frozenset[str] | None = None
    lora_room: bool | None = None
    asleep: bool = False
    refused: int = 0


def parse_page(text: bytes) -> Page:
    """Read a page in the Prometheus text format. A page without wanted series has no values.

    A general parser takes 18 ms a page and can be stalled by a hostile line. This one searches for the wanted names at
    the start of lines.
    """
    page = Page()
    # Equal series count once. If their values differ the largest counts: a low load attracts requests.
    # An invalid value is -1.
    found: dict[str, dict[bytes, float]] = {}
    number, loras, loras_at = 0, b"", -1.0
    for name, labels, value in _series(b"\n" + text):
        if name == _LORA:
            # Engines keep one series for each set of adapters that was ever in use. Its value is the time of last use.
            if (at := _number(value)) > loras_at:
                loras, loras_at = labels, at
            continue
        number += 1
        if number > MAX_SERIES:
            return Page(refused=number)
        if name == _CACHE:
            page.cache = page.cache or _cache_labels(labels)
        elif name == _SLEEP:
            page.asleep |= _AWAKE in labels and _number(value) == 0
        else:
            highest = 1.001 if name in (_USAGE, _OLD_USAGE) else LARGEST
            amount = _number(value)
            series = found.setdefault(name, {})
            if 0 <= amount <= highest:
                series[labels] = max(amount, series.get(labels, -1.0))
            else:
                series.setdefault(labels, -1.0)
    whole, means = dict[str, list[float]](), dict[str, float]()
    for name, series in found.items():
        known = [value for value in series.values() if value >= 0]
        page.refused += len(series) - len(known)
        if known:
            means[name] = sum(known) / len(known)
        if len(known) == len(series):
            whole[name] = known
    # An engine whose value is invalid counts as the mean of the others: without it, a sum would be too low.
    page.running, page.waiting = (
        means[name] * len(found[name]) if name in means else None for name in (_RUNNING, _WAITING)
    )
    if (usage := means.get(_USAGE, means.get(_OLD_USAGE))) is not None:
        page.kv_usage = min(1.0, usage)
    if _START in whole:
        page.started_at = max(whole[_START])
    if loras_at >= 0:
        page.loras, page.lora_room = _adapters(loras)
    # A counter without one of its parts would look like a restart.
    page.counters = {name: sum(whole[name]) for name in COUNTERS if name in whole}
    page.prefix_tokens = _prefix_tokens(page.counters)
    return page


def _adapters(labels: bytes) -> tuple[frozenset[str], bool | None]:
    values = {name.decode(): value.decode("utf-8", "replace") for name, value in _LORA_LABEL.findall(labels)}
    used = {values.get(f"{state}_lora_adapters", "") for state in ("running", "waiting")}
    names = frozenset(name.strip() for one in used for name in one.split(",") if name.strip())
    most = values.get("max_lora", "")
    return names, len(names) < int(most) if most.isascii() and most.isdigit() and len(most) < 10 else None


def _prefix_tokens(counters: dict[str, float]) -> PrefixTokens | None:
    queried = next((counters[name] for name in QUERIES if name in counters), None)
    local = next((counters[name] for name in HITS if name in counters), None)
    if queried is None or local is None:
        return None
    external = counters.get(EXTERNAL_HITS, 0.0)
    return PrefixTokens(int(local), int(external), max(0, int(queried - local - external)))


def _series(text: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield name, labels and value of each wanted series."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + STRETCH_BYTES)
        end = len(text) if end < 0 else end + 1
        for match in _SERIES.finditer(text, start, end):
            yield match[1].decode(), match[2] or b"", match[3]
        # The next stretch begins with the newline that ended this one.
        start = end if end == len(text) else end - 1


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _cache_labels(labels: bytes) -> dict[str, str]:
    found = {name.decode(): value.decode("latin-1") for name, value in _LABEL.findall(labels)}
    return {name: found[name] for name in _CACHE_LABELS if name in found}


def _cache_config(labels: dict[str, str]) -> CacheConfig:
    """Return the cache configuration; invalid values stay unknown."""
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


def next_turn(due: float, interval_s: float, now: float) -> float:
    """Return when a loop does its next turn after the one at *due*.

    A turn that is late by less than an interval is done at once: a loop that waits for an answer for an interval must
    not miss every other turn. Turns missed by more, while the process was suspended or busy, are skipped. Otherwise the
    loops of all instances, which are spread over the interval, would run at the same moment from then on.
    """
    turns = (now - due) / interval_s
    return due + interval_s * (1 if turns < 2 else math.ceil(turns))


def _start_loops(
    instances: Collection[Instance],
    visit: Callable[[Instance], Awaitable[object]],
    interval_s: float,
    clock: Callable[[], float],
    *,
    crashed: str,
    at_once: bool,
) -> list[asyncio.Task[None]]:
    """Start a loop for each instance, so that an instance that hangs delays no other.

    The first visits are made at once, or spread over the interval. A visit that raises is a bug: it is logged as the
    event *crashed*, and the loop goes on.
    """
    limit = LogLimit(clock)

    async def run(instance: Instance, offset_s: float) -> None:
        due = clock() + offset_s
        if not at_once:
            await asyncio.sleep(offset_s)
        while True:
            try:
                await visit(instance)
            except Exception:
                if (kept_back := limit.passes(instance.id)) is not None:
                    log.exception(crashed, instance=instance.id, kept_back=kept_back)
            due = next_turn(due, interval_s, clock())
            await asyncio.sleep(due - clock())

    offsets = (interval_s * number / len(instances) for number in range(len(instances)))
    return [
        asyncio.create_task(run(each, offset), name=each.id) for each, offset in zip(instances, offsets, strict=True)
    ]


async def _stop_loops(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class _Seen:
    """State of one instance between two scrapes."""

    result: str = "ok"
    asleep: bool = False
    counters: dict[str, float] = field(default_factory=dict)


class Scraper:
    """Background task that writes scrapes, cache configuration and model names to the instances.

    It reads load and restarts from `/metrics`, and keeps the lists of models. How a scrape is corrected and grows old
    is in `smetric.fleet`.

    Args:
        instances: those to poll.
        interval_s: seconds between two scrapes of one instance.
        timeout_s: seconds one request may take, connecting included.
        resolve: how names are looked up.
        on_restart: called with an instance after its restart, or its sleep, was seen and its incarnation was counted.
        on_sleep: called after each page with whether the engine sleeps.
        on_scrape: called after each scrape with its result (ok, timeout, connect_error, http_error, bad_page) and the
            seconds it took.
        clock: monotonic seconds, the fleet's.

    Attributes:
        models: the lists of models.
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
        on_sleep: Callable[[Instance, bool], None] = lambda _, asleep: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seen = {instance: _Seen() for instance in instances}
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._on_restart = on_restart
        self._on_scrape = on_scrape
        self._on_sleep = on_sleep
        self._clock = clock
        #: Several engines behind one address restart with every page, and one at its limit is late every other time.
        self._change_limit = LogLimit(clock, lines=CHANGE_LINES)
        self._session: PlainSession | None = None
        self._loops: list[asyncio.Task[None]] = []
        self.models = ModelLists(instances, self._get, clock)
        self._unseen = set(instances)
        self._all_seen = asyncio.Event()

    async def start(self) -> None:
        """Open the connection pool and begin to scrape, each instance at once."""
        self._session = PlainSession(self._resolve, timeout_s=self._timeout_s)
        self._loops = _start_loops(
            self._seen, self.scrape, self._interval_s, self._clock, crashed="smetric.scrape.crashed", at_once=True
        )

    async def first_look(self, within_s: float) -> None:
        """Wait until every instance was scraped once, with whatever result, for at most *within_s* seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_seen.wait(), within_s)

    async def stop(self) -> None:
        """End the loops and close the connections."""
        await _stop_loops(self._loops)
        self.models.close()
        if self._session is not None:
            await self._session.close()

    async def scrape(self, instance: Instance) -> str:
        """Read one instance's metrics, and its model list if that is due; return the result as counted."""
        seen = self._seen[instance]
        sent_at, own = self._clock(), instance.own
        try:
            text = await self._get(instance, "/metrics", MAX_PAGE_BYTES)
            page = parse_page(text) if len(text) <= INLINE_PAGE_BYTES else await asyncio.to_thread(parse_page, text)
            result = self._take(instance, seen, page, sent_at, own)
        except Unread as error:
            result = str(error)
        self._unseen.discard(instance)
        if not self._unseen:
            self._all_seen.set()
        if result != seen.result:
            seen.result = result
            self._log_change("smetric.scrape.changed", instance, result=result)
        self._on_scrape(instance, result, self._clock() - sent_at)
        if result not in ("connect_error", "timeout"):
            await self.models.keep(instance)
        return result

    def _take(self, instance: Instance, seen: _Seen, page: Page, sent_at: float, own: int) -> str:
        """Write the values of *page* to *instance*. Unknown values leave the last known ones to grow old."""
        has_computed_nothing = bool(page.counters) and not any(page.counters.values())
        if self._has_restarted(instance, seen, page):
            # Requests in flight may have been sent to the new process; then it does not count as seen empty.
            instance.restarted(page.started_at, seen_empty=has_computed_nothing and not instance.own)
            instance.scrape = None
            seen.counters.clear()
            self.models.forget(instance)
            self._log_change("smetric.instance.restarted", instance, incarnation=instance.incarnation)
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
        if page.asleep and not seen.asleep:
            # Its cache is gone as soon as it sleeps.
            instance.restarted(instance.started_at, seen_empty=not instance.own)
            self._on_restart(instance)
        seen.asleep = page.asleep
        self._on_sleep(instance, page.asleep)
        if page.running is None or page.waiting is None:
            return "bad_page"
        last = instance.scrape
        values = (page.running, page.waiting, page.kv_usage)
        busy = page.running + page.waiting > 0
        frozen = busy and not moved and last is not None and values == (last.running, last.waiting, last.kv_usage)
        # A busy engine whose series stand still has not updated them: its values are as old as their last change.
        if not frozen:
            instance.scrape = Scrape(
                sent_at, page.running, page.waiting, page.kv_usage, own, page.loras, page.lora_room
            )
            instance.load_changed()
        return "ok"

    def _log_change(self, event: str, instance: Instance, **fields: object) -> None:
        if (kept_back := self._change_limit.passes((event, instance.id))) is not None:
            log.warning(event, instance=instance.id, **fields, kept_back=kept_back)

    @staticmethod
    def _has_restarted(instance: Instance, seen: _Seen, page: Page) -> bool:
        both_known = page.started_at is not None and instance.started_at is not None
        if both_known and not instance.is_incarnation(page.started_at):
            return True
        return any(value < seen.counters.get(name, 0.0) for name, value in page.counters.items())

    async def _get(self, instance: Instance, path: str, limit: int) -> bytes:
        """Return the body of a 200 response of at most *limit* bytes.

        Raises:
            Unread: there is none.
        """
        assert self._session is not None, "start() comes first"
        headers = {"Authorization": f"Bearer {instance.key.text}"} if instance.key is not None else {}
        try:
            async with self._session.http.get(instance.url + path, headers=headers, allow_redirects=False) as response:
                if response.status != 200:
                    raise Unread("http_error", response.status)
                if not is_plain(response) or (body := await read_within(response, limit)) is None:
                    raise Unread("bad_page")
                if response.content_length is not None or "chunked" in response.headers.get("Transfer-Encoding", ""):
                    body += b"\n"  # it is whole, and so is its last line
        except TimeoutError:
            raise Unread("timeout") from None
        except (aiohttp.ClientConnectionError, OSError):
            raise Unread("connect_error") from None
        except aiohttp.ClientError:
            raise Unread("bad_page") from None
        return bytes(body)


class Prober:
    """Background task that requests `/health` of each instance and reports the outcome to *health*, which judges it.

    A new connection for each probe proves that the instance still accepts some, and costs a tenth of a client library.
    Any status below 500 is good: an instance that answers 401 or 404 works.

    Args:
        instances: those to probe.
        health: receives the outcome of each probe.
        interval_s: seconds between two probes of one instance.
        timeout_s: seconds one may take, connecting included.
        resolve: how names are looked up.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        health: Health,
        *,
        interval_s: float = 1.0,
        timeout_s: float = 1.0,
        resolve: Resolve = resolve,
    ) -> None:
        self._targets: dict[Instance, tuple[SplitResult, Addresses]] = {}
        for instance in instances:
            parts = urlsplit(instance.url)
            self._targets[instance] = parts, Addresses(parts.hostname or "", port_of(parts), resolve)
        self._health = health
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        # Created for the first instance that needs it: reading the system's certificate authorities takes 20 ms.
        self._tls = cache(ssl.create_default_context)
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to probe."""
        clock, crashed = asyncio.get_running_loop().time, "smetric.probe.crashed"
        visit = self._probe_and_settle
        self._loops = _start_loops(self._targets, visit, self._interval_s, clock, crashed=crashed, at_once=False)

    async def stop(self) -> None:
        """End the loops."""
        await _stop_loops(self._loops)
        for _, addresses in self._targets.values():
            addresses.close()

    async def _probe_and_settle(self, instance: Instance) -> None:
        await self.probe(instance)
        self._health.settle()

    async def probe(self, instance: Instance) -> None:
        """Probe *instance* once."""
        ok, refused = False, False
        parts, addresses = self._targets[instance]
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    reader, writer = await addresses.connect(partial(self._connect, parts), self._timeout_s)
                except TimeoutError:
                    raise
                except OSError as error:
                    if is_own_fault(error):
                        return  # it says nothing about the instance
                    refused = True
                else:
                    ok = 100 <= await _status(reader, writer, parts.netloc) < 500
        except TimeoutError:
            if clock() - began > self._timeout_s + LATE_S:
                return  # this process was suspended or busy: it says nothing about the instance
        self._health.probed(instance, ok=ok, refused=refused)

    async def _connect(self, parts: SplitResult, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls, name = (self._tls(), parts.hostname) if parts.scheme == "https" else (None, None)
        port = port_of(parts)
        return await asyncio.open_connection(address, port, ssl=tls, server_hostname=name, limit=MAX_LINE_BYTES)


async def _status(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> int:
    """Return the status of `GET /health`; 0 if there is no HTTP response. Close the connection."""
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii"))
        line = await reader.readuntil(b"\r\n")
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return 0
    finally:
        writer.transport.abort()  # an orderly close could take as long as the instance likes
    words = line.split(maxsplit=2)
    is_http = len(words) >= 2 and words[0].startswith(b"HTTP/1.") and words[1].isdigit() and len(words[1]) == 3
    return int(words[1]) if is_http else 0

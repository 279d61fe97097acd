"""What is read of a vLLM `/metrics` page: a dozen series out of several hundred, under their new and old names.

A general parser costs 18 ms a page and can be stalled by a hostile line; this one looks for wanted names at line starts
only. Fetching pages, and what follows from two in a row, is in `smetric.sources.vllm`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from smetric.fleet.instance import PrefixTokens
from smetric.policy.vocabulary import LARGEST

#: Most series of wanted names a page may have, those of adapters in use aside; one with more says nothing.
MAX_SERIES = 2048
#: Bytes searched at a stretch, so that a thread that searches a large page lets others run in between.
STRETCH_BYTES = 64 * 1024

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_USAGE = "vllm:kv_cache_usage_perc"
_OLD_USAGE = "vllm:gpu_cache_usage_perc"
_CACHE = "vllm:cache_config_info"
_START = "process_start_time_seconds"
_LORA = "vllm:lora_requests_info"
#: Prompt tokens looked up in the engine's own cache and found there, under the new and the old name; then those not
#: found that were looked up in an external one and found there.
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"
#: Counters that only a new process sets back.
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", *QUERIES, *HITS, EXTERNAL_HITS)
_WANTED = (_RUNNING, _WAITING, _USAGE, _OLD_USAGE, _CACHE, _START, _LORA, *COUNTERS)
# The value must be followed by something: a page cut in the middle of a number would give a wrong one.
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


@dataclass(slots=True)
class Page:
    """One page; None for what it does not say or says insanely.

    Args:
        running: requests running, summed over engines.
        waiting: requests waiting, summed over engines.
        kv_usage: share of KV blocks in use, mean over engines.
        started_at: when the process started, seconds since the epoch.
        counters: by name, summed over engines.
        prefix_tokens: what those of them say about prompt tokens looked up in caches.
        cache: labels of the first engine's cache configuration.
        loras: adapters in use by running and waiting requests.
        lora_room: whether there is a slot for one more.
        refused: series whose value was NaN, infinite, negative or out of range; all, where there were too many.
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
    refused: int = 0


def parse_page(text: bytes) -> Page:
    """Read a page in the Prometheus text format; a page of anything else reads as one that says nothing."""
    page = Page()
    # Equal series count once, whichever comes last.
    found: dict[str, dict[bytes, float]] = {}
    number, loras, loras_at = 0, b"", -1.0
    for name, labels, value in _series(b"\n" + text):
        if name == _LORA:
            # Engines keep one for every set of adapters that was ever in use. Its value is when that was the last time.
            if (at := _number(value)) > loras_at:
                loras, loras_at = labels, at
            continue
        number += 1
        if number > MAX_SERIES:
            return Page(refused=number)
        if name == _CACHE:
            page.cache = page.cache or _cache_labels(labels)
        else:
            found.setdefault(name, {})[labels] = _number(value)
    values: dict[str, list[float]] = {}
    for name, series in found.items():
        highest = 1.001 if name in (_USAGE, _OLD_USAGE) else LARGEST
        sane = [value for value in series.values() if 0 <= value <= highest]
        page.refused += len(series) - len(sane)
        # A sum without one of its parts would be too low, and a low load attracts.
        if len(sane) == len(series):
            values[name] = sane
    if _RUNNING in values:
        page.running = sum(values[_RUNNING])
    if _WAITING in values:
        page.waiting = sum(values[_WAITING])
    if usage := values.get(_USAGE) or values.get(_OLD_USAGE):
        page.kv_usage = min(1.0, sum(usage) / len(usage))
    if _START in values:
        page.started_at = max(values[_START])
    if loras_at >= 0:
        page.loras, page.lora_room = _adapters(loras)
    page.counters = {name: sum(values[name]) for name in COUNTERS if name in values}
    page.prefix_tokens = _prefix_tokens(page.counters)
    return page


def _adapters(labels: bytes) -> tuple[frozenset[str], bool | None]:
    told = {name.decode(): value.decode("utf-8", "replace") for name, value in _LORA_LABEL.findall(labels)}
    used = {told.get(f"{state}_lora_adapters", "") for state in ("running", "waiting")}
    names = frozenset(name.strip() for one in used for name in one.split(",") if name.strip())
    most = told.get("max_lora", "")
    return names, len(names) < int(most) if most.isascii() and most.isdigit() and len(most) < 10 else None


def _prefix_tokens(counters: dict[str, float]) -> PrefixTokens | None:
    queried = next((counters[name] for name in QUERIES if name in counters), None)
    local = next((counters[name] for name in HITS if name in counters), None)
    if queried is None or local is None:
        return None
    external = counters.get(EXTERNAL_HITS, 0.0)
    return PrefixTokens(int(local), int(external), max(0, int(queried - local - external)))


def _series(text: bytes) -> Iterator[tuple[str, bytes, bytes]]:
    """Name, labels and value of each wanted series."""
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

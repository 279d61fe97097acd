"""Checks of the engines' KV caches: on, alike, and cut into blocks as this router believes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smetric.doctor.check import Skipped
from smetric.doctor.engine import Engine
from smetric.doctor.finding import Finding, error, info, listed, shown, warning
from smetric.doctor.site import Site

#: How many times larger than another one a cache may be before it is told.
UNEQUAL = 2.0


async def caches(site: Site) -> list[Finding]:
    """Prefix caching is on everywhere, with the same blocks and hashes."""
    silent = [engine for engine in site.reachable if not engine.page.cache]
    telling = [engine for engine in site.reachable if engine.page.cache]
    found = [
        info(
            engine.where,
            "its /metrics says nothing of its KV cache (vllm:cache_config_info)",
            "block size and capacity are taken to be as configured",
            "run a vLLM from 0.6 on",
        )
        for engine in silent
        if not engine.page_problem and engine.speaks_vllm and not engine.page.refused
    ]
    if not telling:
        if not found:
            raise Skipped("no instance tells of its cache")
        return found
    found += [
        error(
            engine.where,
            "prefix caching is off",
            "it computes every prompt anew, so that sending a session there again gains nothing",
            "start the engine with `--enable-prefix-caching` (and without `--no-enable-prefix-caching`)",
        )
        for engine in telling
        if engine.page.cache.get("enable_prefix_caching") == "False"
    ]
    sizes = _by(telling, "block_size")
    ours = str(site.settings.block_size)
    if set(sizes) - {ours}:
        told = _told(sizes)
        found.append(
            warning(
                "block_size",
                f"it is {ours} here; on the engines it is {told}",
                "expected hits are floored to blocks of another size than the engine's",
                f"set `block_size: {shown(next(iter(sizes)))}`"
                if len(sizes) == 1
                else "start all engines with the same `--block-size`, and set `block_size` to it",
            )
        )
    hashes = _by(telling, "prefix_caching_hash_algo")
    if len(hashes) > 1:
        found.append(
            warning(
                "instances",
                f"hashes of blocks differ: {_told(hashes)}",
                "what one engine puts into a shared store (LMCache), another one never finds",
                "start all engines with the same `--prefix-caching-hash-algo`",
            )
        )
    if unequal := _unequal(telling):
        found.append(unequal)
    return found


def _by(engines: Sequence[Engine], label: str) -> Mapping[str, list[str]]:
    """Ids of instances by the value of *label*, those left out that do not have it."""
    found: dict[str, list[str]] = {}
    for engine in engines:
        value = engine.page.cache.get(label, "None")
        if value != "None":
            found.setdefault(value, []).append(engine.settings.id)
    return found


def _told(by_value: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{shown(value)} on {listed(ids)}" for value, ids in sorted(by_value.items()))


def _unequal(engines: Sequence[Engine]) -> Finding | None:
    sized = sorted((engine for engine in engines if engine.cache_tokens), key=lambda engine: engine.cache_tokens)
    if len(sized) < 2 or sized[-1].cache_tokens <= UNEQUAL * sized[0].cache_tokens:
        return None
    small, large = sized[0], sized[-1]
    return info(
        small.where,
        f"its KV cache holds {small.cache_tokens} tokens; that of {large.settings.id} holds {large.cache_tokens}",
        "by a policy that counts requests, sessions are evicted there much sooner",
        "start it with a higher `--gpu-memory-utilization`, or let the policy look at `kv_usage`",
    )

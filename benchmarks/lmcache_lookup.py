"""What an LMCache look-up costs the router itself: writing the question, hashing the prompt, reading the answer.

    python benchmarks/lmcache_lookup.py [--calls 30]

Prints milliseconds, medians of single calls, by prompt length and number of instances that hold the whole prompt. The
wait for the service is not in here. All cells are measured in turns, so that a busy moment falls on all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable
from functools import partial

import orjson
import xxhash

from smetric.sources.lmcache.client import Controller, Coordinator, LmcacheQuestion

CHUNK = 256
PROMPTS = (1024, 8192, 32768, 131072)
HOLDERS = (4, 32)


def directory(chunks: int, holders: int) -> bytes:
    """The coordinator's answer when all of *holders* hold all of *chunks*; its tokens are repeated, as it does."""
    placements = [
        {
            "instance_id": f"gpu-{holder}",
            "incarnation": 1795986298,
            "tier": "l1",
            "backend": "dram",
            "size_bytes": 1048576,
            "shared": False,
        }
        for holder in range(holders)
    ]
    key = {"model_name": "org/model", "kv_rank": 16777472, "object_group_id": 0, "cache_salt": ""}
    results = [
        {
            "key": {"chunk_hash_hex": f"{chunk:064x}", **key},
            "placements": placements,
            "token_ids": list(range(100000, 100000 + CHUNK)),
            "access_count": 3,
        }
        for chunk in range(chunks)
    ]
    return orjson.dumps({"chunks": chunks, "results": results})


def cells() -> dict[str, Callable[[], object]]:
    """What is measured."""
    coordinator, controller = Coordinator(CHUNK, 1), Controller()
    made: dict[str, Callable[[], object]] = {}
    for tokens in PROMPTS:
        question = LmcacheQuestion(array("I", range(100000, 100000 + tokens)), "org/model", "")
        layout = orjson.dumps({"layout_info": {"gpu-0": ["LocalCPUBackend", tokens]}})
        made[f"{tokens:7} tokens, question"] = partial(coordinator.body, question)
        made[f"{tokens:7} tokens, hash"] = partial(xxhash.xxh3_64_intdigest, memoryview(question.tokens))
        made[f"{tokens:7} tokens, controller's answer"] = partial(controller.read, layout, question)
        for holders in HOLDERS:
            answer = directory(tokens // CHUNK, holders)
            name = f"{tokens:7} tokens, coordinator's answer, {holders} holders, {len(answer) / 1000:.0f} kB"
            made[name] = partial(coordinator.read, answer, question)
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=30)
    calls = parser.parse_args().calls
    measured = cells()
    taken: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(calls):
        for name, call in measured.items():
            started = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - started)
    for name, seconds in taken.items():
        print(f"{statistics.median(seconds) * 1e3:8.3f} ms  {name}")


if __name__ == "__main__":
    main()

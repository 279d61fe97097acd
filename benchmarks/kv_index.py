"""What the index of KV events costs: looking a prompt up in 32 instances, entering events, memory, and the loop's lag.

    python -m benchmarks.kv_index [--instances 200] [--tokens 290000]

CPU time of this process, median of the runs; memory is what the process grew by.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import random
import resource
import time
from array import array
from collections.abc import Callable, Iterator
from statistics import median

import msgspec

from smetric.request.prompt import BlockKeys
from smetric.sources.kv_events.contents import CacheContents, KvIndex, decode
from smetric.sources.kv_events.subscriber import TURN_S

BLOCK = 16
#: Blocks of one engine step: 2,048 tokens.
STEP = 128
ROOM = 64 << 30


def cpu_ms(run: Callable[[], object], rounds: int) -> float:
    """Median CPU time of *run* in milliseconds."""
    times = []
    for _ in range(rounds):
        began = time.process_time_ns()
        run()
        times.append((time.process_time_ns() - began) / 1e6)
    return median(times)


def payloads(rng: random.Random, tokens: array[int]) -> Iterator[bytes]:
    """The messages an engine sends for one prompt, step by step."""
    parent = None
    for start in range(0, len(tokens), STEP * BLOCK):
        part = tokens[start : start + STEP * BLOCK]
        names = [rng.getrandbits(64) for _ in range(len(part) // BLOCK)]
        event = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": parent,
            "token_ids": list(part[: len(names) * BLOCK]),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * len(names),
        }
        yield msgspec.msgpack.encode([0.0, [event], 0])
        parent = names[-1]


def prompt(rng: random.Random, length: int) -> array[int]:
    """Random token ids."""
    return array("I", (rng.randrange(150_000) for _ in range(length)))


def enter(contents: CacheContents, messages: Iterator[bytes]) -> None:
    """Take *messages* as a subscriber does."""
    for message in messages:
        for event in decode(message).events():
            contents.apply(event)


def lookups(rng: random.Random, length: int) -> None:
    """Hit lengths of 32 instances that all hold the whole prompt: the longest walk there is."""
    index = KvIndex(ROOM)
    tokens = prompt(rng, length)
    caches = [CacheContents(index) for _ in range(32)]
    for contents in caches:
        contents.begin()
        enter(contents, payloads(rng, tokens))
    bits = [contents.bit for contents in caches]
    limit = (length - 1) // BLOCK
    hashed = BlockKeys(tokens, BLOCK)
    assert index.depths(hashed, limit, bits) == [limit] * 32
    cold = cpu_ms(lambda: index.depths(BlockKeys(tokens, BLOCK), limit, bits), 50)
    warm = cpu_ms(lambda: index.depths(hashed, limit, bits), 50)
    print(f"look up {length:,} tokens in 32 instances: {cold:.2f} ms, keys known {warm:.2f} ms")


async def fleet(rng: random.Random, instances: int, tokens: int) -> None:
    """Fill the caches of a whole fleet, with pauses as a subscriber makes them."""
    index = KvIndex(ROOM)
    caches = [CacheContents(index) for _ in range(instances)]
    gc.collect()
    before = resident()
    longest, spent, messages = 0.0, 0, 0
    for contents in caches:
        contents.begin()
        made = list(payloads(rng, prompt(rng, tokens)))
        turn_ends = last = time.thread_time()
        for payload in made:
            began = time.process_time_ns()
            enter(contents, iter((payload,)))
            spent += time.process_time_ns() - began
            messages += 1
            if time.thread_time() >= turn_ends:
                longest = max(longest, time.thread_time() - last)
                await asyncio.sleep(0)
                last = time.thread_time()
                turn_ends = last + TURN_S
    gc.collect()
    grown = resident() - before
    print(
        f"{instances} instances, {tokens:,} tokens each, {index.blocks:,} blocks: {grown / 2**20:,.0f} MiB, "
        f"{grown / index.blocks:.0f} bytes a block (the bound counts {index.memory_bytes / index.blocks:.0f}); "
        f"{messages / spent * 1e9:,.0f} messages/s and {index.blocks / spent * 1e9:,.0f} blocks/s of CPU; "
        f"longest turn {longest * 1e3:.1f} ms of CPU"
    )
    began = time.process_time_ns()
    caches[0].close()
    print(f"forget one instance: {(time.process_time_ns() - began) / 1e6:.0f} ms")


def resident() -> int:
    """Bytes of memory this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    """Run all of it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--instances", type=int, default=200)
    options.add_argument("--tokens", type=int, default=290_000)
    options.add_argument("--seed", type=int, default=1)
    chosen = options.parse_args()
    rng = random.Random(chosen.seed)
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores")
    for length in (32_000, 128_000):
        lookups(rng, length)
    asyncio.run(fleet(rng, chosen.instances, chosen.tokens))


if __name__ == "__main__":
    main()

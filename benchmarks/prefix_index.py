"""What the prefix index costs: hashing a prompt, looking it up in 32 instances, entering it; its image; its peers.

    python benchmarks/prefix_index.py [--calls 50]

Prints microseconds of CPU per call, median and 99th percentile, at 32k and 128k tokens of 4 bytes, with few and with
many sessions known: many cost misses of the CPU's cache, no more steps. Then what a full index costs to copy, to write
as bytes and to read.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable, Sequence

from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import PrefixIndex, cut_of
from smetric.sources.prefix_index.persistence import IndexImage, decode_image, encode_image, pack
from smetric.sources.shared.peers import Placement, decode_batch, encode_batch

INSTANCES = 32
BYTES_PER_TOKEN = 4
SESSION_BLOCKS = 128
BLOCK_TOKENS = 16


def fleet() -> list[Instance]:
    """Instances that were idle when first seen."""
    instances = [Instance(f"gpu-{n:02}", f"http://127.0.0.1:{n + 1}") for n in range(INSTANCES)]
    for instance in instances:
        instance.seen_empty, instance.started_at = True, 1000.0
    return instances


def filled(instances: Sequence[Instance], sessions: int) -> PrefixIndex:
    """An index that knows *sessions* sessions, each on one instance."""
    index, rng = PrefixIndex(4 << 30), random.Random(7)
    for number in range(sessions):
        index.placed(instances[number % INSTANCES], array("Q", (rng.getrandbits(64) for _ in range(SESSION_BLOCKS))))
    return index


def timed(calls: int, work: Callable[[int], object]) -> str:
    """Median and 99th percentile of *work* in microseconds."""
    taken = []
    for number in range(calls):
        started = time.thread_time_ns()
        work(number)
        taken.append((time.thread_time_ns() - started) / 1000)
    taken.sort()
    return f"{taken[calls // 2]:9.0f} {taken[min(calls - 1, calls * 99 // 100)]:9.0f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=50)
    calls = parser.parse_args().calls
    instances = fleet()
    print(f"{'CPU us, p50 and p99':44}{'p50':>9} {'p99':>9}")
    for tokens in (32 * 1024, 128 * 1024):
        text = random.Random(tokens).randbytes(tokens * BYTES_PER_TOKEN)
        for sessions in (10, 2000):
            index = filled(instances, sessions)
            prompts = [Prompt([text], float(BYTES_PER_TOKEN), key=b"%d" % number) for number in range(calls)]
            requests = [InferenceRequest(prompt=prompt) for prompt in prompts]
            what = f"{tokens // 1024:>4}k tokens, {sessions:>5} sessions:"
            print(f"{what} hash             ", timed(calls, lambda n: prompts[n].hashes))  # noqa: B023
            print(f"{what} look up, unknown ", timed(calls, lambda n: index.lookup(requests[n], instances)))  # noqa: B023
            print(f"{what} enter            ", timed(calls, lambda n: index.prefilled(requests[n], instances[n % 32])))  # noqa: B023
            print(f"{what} look up, held    ", timed(calls, lambda n: index.lookup(requests[n], instances)))  # noqa: B023
            print(f"{what} enter again      ", timed(calls, lambda n: index.prefilled(requests[n], instances[n % 32])))  # noqa: B023
    for tokens in (32 * 1024, 128 * 1024):
        by_ids, ids = (
            PrefixIndex(4 << 30, block_tokens=BLOCK_TOKENS),
            array("I", random.Random(tokens).randbytes(4 * tokens)),
        )
        requests = [InferenceRequest(prompt=Prompt([b"text"], 4.0, key=b"%d" % n), token_ids=ids) for n in range(calls)]
        what = f"{tokens // 1024:>4}k tokens, blocks of ids:"
        print(f"{what} hash             ", timed(calls, lambda n: cut_of(requests[n], BLOCK_TOKENS)))  # noqa: B023
        print(f"{what} enter            ", timed(calls, lambda n: by_ids.prefilled(requests[n], instances[n % 32])))  # noqa: B023
        print(f"{what} look up, held    ", timed(calls, lambda n: by_ids.lookup(requests[n], instances)))  # noqa: B023
    index = filled(instances, 2000)
    image = IndexImage(0.0, BLOCK_BYTES, list(index.images()))
    data = encode_image(image)
    size_mib = index.table.memory_bytes >> 20
    print(f"index of {size_mib} MiB, {2000 * SESSION_BLOCKS} holdings; image {len(data) >> 10} KiB")
    print("  copy one instance                          ", timed(calls, lambda n: next(index.images())))
    print("  encode                                     ", timed(calls, lambda n: encode_image(image)))
    print("  decode                                     ", timed(calls, lambda n: decode_image(data)))
    blocks = array("Q", range(512))
    batch = encode_batch("s", 0, [Placement("gpu-00", 1000.0, pack(blocks))] * 100)
    print(f"batch of 100 placements of 128k tokens, {len(batch) >> 10} KiB")
    print("  decode                                     ", timed(calls, lambda n: decode_batch(batch)))
    print("  enter one of them                          ", timed(calls, lambda n: index.placed(instances[0], blocks)))


if __name__ == "__main__":
    main()

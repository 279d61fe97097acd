"""What it costs to watch for cache breakers: hashing a prompt's parts, and comparing them with the last prompt's.

    python benchmarks/cache_breaks.py [--calls 50]

Prints microseconds of CPU per request, median and 99th percentile, for agent sessions of several lengths. `read` is
what reading the request costs, to compare with; both others come after the first and after the last byte of the answer.
Then what the memory of conversations takes, and would when it is full.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from typing import Any

from smetric.fleet.instance import Instance
from smetric.request import reader
from smetric.request.memo import PrefixMemo
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio
from smetric.telemetry.cache_breaks import MAX_PARTS, CacheBreaks


def body(session: int, turn: int, result_bytes: int = 3500) -> bytes:
    """A request of an agent with 20 tools: each turn is a tool call and its result of *result_bytes*."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"task {session} " * 40}]
    for number in range(turn):
        call = {"type": "tool_use", "id": f"t{number}", "name": "Read", "input": {"path": f"{session}/{number}"}}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "I look. " * 25}, call]})
        text = f"{session} {number} " + "x" * result_bytes
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": text}
        messages.append({"role": "user", "content": [result]})
    tools = [{"name": f"tool{number}", "description": "d" * 2500} for number in range(20)]
    whole = {"model": "m", "max_tokens": 9, "tools": tools, "system": "s" * 8000, "messages": messages}
    return json.dumps(whole).encode()


def read(session: int, turn: int, result_bytes: int = 3500) -> tuple[InferenceRequest, float]:
    """The request, its prompt hashed as for the prefix index, and the microseconds that reading took."""
    raw, ratio, reading = body(session, turn, result_bytes), TokenRatio(), ReaderSettings()
    headers = [(b"x-claude-code-session-id", b"%d" % session)]
    started = time.thread_time_ns()
    request = parse(Api.MESSAGES, raw, headers, ratio, reading)
    taken = (time.thread_time_ns() - started) / 1000
    assert request.prompt is not None
    _ = request.prompt.hashes
    return request, taken


def figures(taken: list[float]) -> str:
    """Median and 99th percentile."""
    taken = sorted(taken)
    return f"{taken[len(taken) // 2]:9.0f} {taken[min(len(taken) - 1, len(taken) * 99 // 100)]:9.0f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=50)
    calls = parser.parse_args().calls
    instance = Instance("gpu-0", "http://127.0.0.1:1")
    print(f"{'CPU us, p50 and p99':44}{'p50':>9} {'p99':>9}")
    for turn in (1, 5, 20, 100, 300):
        breaks = CacheBreaks(lambda part, change: None)
        rows: dict[str, list[float]] = {"read": [], "hash parts": [], "compare": []}
        for session in range(calls):
            for at in (turn, turn + 1):
                request, taken = read(session, at)
                started = time.thread_time_ns()
                request.answering()
                hashed = time.thread_time_ns()
                breaks.answered(request, instance, 0.9, "other")
                ended = time.thread_time_ns()
                rows["read"].append(taken)
                rows["hash parts"].append((hashed - started) / 1000)
                rows["compare"].append((ended - hashed) / 1000)
        size = len(body(0, turn + 1)) >> 10
        for name, times in rows.items():
            print(f"{f'{size:>5} KiB, {turn:>3} turns: {name}':44}{figures(times)}")
    reader.memo = PrefixMemo(most_bytes=0)  # it would be counted as well
    tracemalloc.start()
    breaks = CacheBreaks(lambda part, change: None)
    session = 0
    while breaks.parts < MAX_PARTS / 10:
        request, _ = read(session, 55, 0)
        request.answering()
        breaks.answered(request, instance, 0.9, "other")
        request.let_go()
        session += 1
    del request
    held = tracemalloc.get_traced_memory()[0]
    each = held / breaks.parts
    print(f"{breaks.conversations} conversations of {breaks.parts} parts: {each:.0f} bytes for each part")
    print(f"at most {MAX_PARTS} parts: {MAX_PARTS * each / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()

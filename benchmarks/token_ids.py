"""Time to tokenise an agent's turns locally: a first turn whole, and follow-ups of which only the end is new.

    python benchmarks/token_ids.py

Prints milliseconds, p50 of several runs, for prompts of growing length; and the longest time that the event loop was
held up meanwhile. The conversation is Python source from the standard library, the tokenizer that of tests/data.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from smetric.request.request import Api
from smetric.sources.tokens.local import ANY_MODEL, LocalEncoder
from tests.sources.tokens.recorded import model_folder, request_of, tokens_of

TURN_BYTES = 6000
RUNS = 7


def conversation(turns: int) -> dict[str, Any]:
    """A chat body of *turns* turns, each with a call of a tool and its result."""
    source = "".join(path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))[:60])
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent. " * 200}]
    for number in range(turns):
        text = source[number * TURN_BYTES % len(source) :][:TURN_BYTES]
        call = {"id": str(number), "type": "function", "function": {"name": "read", "arguments": f'{{"n":{number}}}'}}
        messages += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": "let me look", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": str(number), "content": text},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    return {"model": "m", "messages": [*messages, {"role": "user", "content": "go on"}]}


async def longest_gap(stop: asyncio.Event) -> float:
    """Seconds of the longest time between two looks at the clock, a millisecond apart."""
    longest, last = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


async def timed(encoder: LocalEncoder, body: dict[str, Any]) -> tuple[float, float, int]:
    """Seconds until the ids are there, seconds the loop was held up, and how many ids there are."""
    request = request_of(Api.CHAT, body)
    stop = asyncio.Event()
    watching = asyncio.create_task(longest_gap(stop))
    await asyncio.sleep(0)
    started = time.perf_counter()
    ids = await tokens_of(encoder).of(request)
    took = time.perf_counter() - started
    stop.set()
    assert ids is not None
    return took, await watching, len(ids)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = model_folder(Path(folder), "thinking")
        print(f"{'tokens':>8} {'body KiB':>9} {'first ms':>9} {'follow-up ms':>13} {'loop held up ms':>16}")
        for turns in (1, 4, 16, 60):
            first, follow, gaps, tokens = [], [], [], 0
            for _ in range(RUNS):
                encoder = LocalEncoder({ANY_MODEL: path}, max_bytes=64 << 20)
                took, gap, _ = await timed(encoder, conversation(turns))
                first.append(took)
                gaps.append(gap)
                took, gap, tokens = await timed(encoder, conversation(turns + 1))
                follow.append(took)
                gaps.append(gap)
                await encoder.stop()
            size = len(json.dumps(conversation(turns))) / 1024
            milliseconds = [statistics.median(times) * 1e3 for times in (first, follow)]
            print(f"{tokens:8} {size:9.0f} {milliseconds[0]:9.1f} {milliseconds[1]:13.1f} {max(gaps) * 1e3:16.1f}")


if __name__ == "__main__":
    asyncio.run(main())

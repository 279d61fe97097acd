"""What it costs to know a request, stage by stage: reading its body, hashing, looking up, entering, comparing.

    python benchmarks/reading.py [--sessions 16] [--sizes 0.3,32,256,1024]

Prints the mean microseconds of CPU per request, for first turns and for follow-ups of agent sessions, as `router.py`
sends them: sessions share a system prompt, an eighth of the body, and no text comes twice. The index holds 100,000
blocks before. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TypeVar

from benchmarks.kit.bodies import STAMP, Shape, write
from smetric.fleet.instance import Instance
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, TokenRatio, Usage
from smetric.sources.prefix_index.index import PrefixIndex
from smetric.telemetry.cache_breaks import CacheBreaks

INSTANCES = 4
WARM_SESSIONS, WARM_BLOCKS = 800, 128
HEADERS = [(b"content-type", b"application/json"), (b"user-agent", b"OpenAI/Python")]
T = TypeVar("T")
STAGES = ("read", "hash", "look up", "enter", "parts", "settle", "compare")


class Stages:
    """Runs requests through everything that looks at them, and keeps the time."""

    def __init__(self) -> None:
        self.instances = [Instance(f"gpu-{n}", f"http://127.0.0.1:{n + 1}") for n in range(INSTANCES)]
        for instance in self.instances:
            instance.seen_empty = True
        self.index, rng = PrefixIndex(), random.Random(7)
        for number in range(WARM_SESSIONS):
            blocks = array("Q", (rng.getrandbits(64) for _ in range(WARM_BLOCKS)))
            self.index.placed(self.instances[number % INSTANCES], blocks)
        self.breaks = CacheBreaks(lambda part, change: None)
        self.ratio, self.reading = TokenRatio(), ReaderSettings()
        self.spent: dict[str, float] = defaultdict(float)

    def take(self, body: bytes, session: int) -> None:
        """One request, from its body to the end of its answer."""
        spent = self.spent

        def timed(stage: str, work: Callable[[], T]) -> T:
            started = time.thread_time_ns()
            result = work()
            spent[stage] += (time.thread_time_ns() - started) / 1000
            return result

        request = timed("read", lambda: parse(Api.CHAT, body, HEADERS, self.ratio, self.reading))
        prompt = request.prompt
        assert prompt is not None
        instance = self.instances[session % INSTANCES]
        timed("hash", lambda: prompt.hashes)
        held = self.index.least(request, self.instances)[session % INSTANCES]
        if request.turn:
            timed("look up", lambda: self.index.lookup(request, self.instances))
        timed("enter", lambda: self.index.prefilled(request, instance))
        timed("parts", request.answering)
        timed("settle", lambda: self.index.settled(request, instance, Usage(request.prompt_len, 9, held)))
        timed("compare", lambda: self.breaks.answered(request, instance, 1.0, "openai-sdk"))
        request.let_go()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=16, help="of each size (default 16)")
    parser.add_argument("--sizes", default="0.3,32,256,1024", help="KiB of a session's first body")
    options = parser.parse_args()
    print(f"{'KiB':>7} {'':10}" + "".join(f"{stage:>9}" for stage in (*STAGES, "all")))
    stamps = count(1)
    for size in map(float, options.sizes.split(",")):
        shape = Shape(int(size * 1024), sessions=options.sessions)
        stages = Stages()
        with tempfile.TemporaryDirectory() as folder:
            write(shape, Path(folder) / "bodies")
            bodies = [path.read_bytes() for path in sorted((Path(folder) / "bodies").iterdir())]
        for what in ("unmeasured", "measured"):
            stages.spent.clear()
            stamp = b"stamp:%010d" % next(stamps)
            for number, body in enumerate(bodies):
                if what == "measured" and number in (0, options.sessions):
                    stages.spent.clear()
                stages.take(body.replace(STAMP.encode(), stamp), number % options.sessions)
                if what == "measured" and number in (options.sessions - 1, len(bodies) - 1):
                    is_first = number < options.sessions
                    requests = options.sessions if is_first else len(bodies) - options.sessions
                    figures = [stages.spent[stage] / requests for stage in STAGES]
                    row = "".join(f"{figure:9.0f}" for figure in (*figures, sum(figures)))
                    print(f"{size:7g} {'first turn' if is_first else 'follow-up':10}{row}", flush=True)


if __name__ == "__main__":
    main()

"""`smetric` that says on SIGUSR1 what it holds: tasks by what they run, file descriptors, bytes of memory.

One line of JSON on stderr, as its log. Only tests run it: `python -m tests.faults.probed serve …`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import orjson

from smetric.cli import main


def tell(_number: int, _frame: FrameType | None) -> None:
    """Collect garbage, return free memory, and report what is left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    said = {
        "event": "probe",
        "tasks": Counter(getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()),
        "fds": len(os.listdir("/proc/self/fd")),
        "rss": pages * resource.getpagesize(),
        "objects": len(gc.get_objects()),
    }
    sys.stderr.write(orjson.dumps(said).decode() + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell)
    main()

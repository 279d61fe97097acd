"""Router process that lists the modules it loads and the calls of a request; run as a script by `benchmarks/house.py`.

    python probe.py TREE REPORT COLLECTOR serve [OPTIONS]

TREE is the checkout to run, REPORT the file to write, COLLECTOR the base URL of an OTLP collector or an empty text.
The rest is the command line of `smetric`. SIGUSR1 starts a recording, SIGUSR2 ends it and writes REPORT as JSON:

    modules   files of smetric that the process has loaded, relative to TREE
    calls     [nanoseconds, root, file] of each call of smetric code in the main thread since SIGUSR1, in order

A call's root is the code that the event loop called: a callback, or the outermost coroutine of a task.

It imports nothing of the benchmarks, so that it runs in a checkout that lacks them.
"""

from __future__ import annotations

import asyncio.base_events
import asyncio.events
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import CodeType, FrameType

#: Frames of these files belong to the event loop.
LOOP_FILES = {asyncio.base_events.__file__, asyncio.events.__file__}


class Recorder:
    """Records the calls of code below *package* while it is on."""

    def __init__(self, package: str, report: Path) -> None:
        self._package = package
        self._report = report
        self._calls: list[tuple[int, CodeType, CodeType]] = []
        self._base: set[FrameType] = set()

    def start(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: forget what was recorded, and record."""
        self._calls.clear()
        self._base.clear()
        while frame is not None:
            self._base.add(frame)
            frame = frame.f_back
        sys.setprofile(self._record)

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: end the recording and write the report."""
        sys.setprofile(None)
        above = len(self._package.rpartition("smetric")[0])
        files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
        report = {
            "modules": sorted(file[above:] for file in files if file.startswith(self._package)),
            "calls": [
                (at, f"{Path(root.co_filename).name}:{root.co_qualname}", code.co_filename[above:])
                for at, root, code in self._calls
            ],
        }
        draft = self._report.with_suffix(".draft")
        draft.write_text(json.dumps(report))
        draft.replace(self._report)

    def _record(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(self._package):
            return
        root = frame
        while (above := root.f_back) is not None and above not in self._base:
            if above.f_code.co_filename in LOOP_FILES:
                break
            root = above
        self._calls.append((time.monotonic_ns(), root.f_code, frame.f_code))


def main() -> None:
    """Run `smetric` with default settings, whatever the environment says."""
    tree, report, collector, *command = sys.argv[1:]
    for name in [name for name in os.environ if name.startswith(("SMETRIC_", "OTEL_"))]:
        del os.environ[name]
    if collector:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
    sys.path[0] = tree
    recorder = Recorder(f"{tree}/smetric/", Path(report))
    signal.signal(signal.SIGUSR1, recorder.start)
    signal.signal(signal.SIGUSR2, recorder.stop)
    from smetric.__main__ import run

    sys.argv = ["smetric", *command]
    run()


if __name__ == "__main__":
    main()

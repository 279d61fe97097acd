"""Server process that runs for the length of a block."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(
    command: Sequence[str | Path],
    environ: Mapping[str, str],
    log: Path,
    *,
    ready: str,
    ready_s: float,
    end_s: float,
) -> Iterator[None]:
    """Run *command* within the block, from when it answers at the URL *ready*; end it afterwards.

    Args:
        command: the program and its arguments.
        environ: variables beside our own.
        log: where its output goes.
        ready: a URL that answers 200 once it serves.
        ready_s: seconds it may take until then.
        end_s: seconds it may take to end, before it is killed.

    Raises:
        RuntimeError: it ended, or did not answer in time; says where its log is.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(command, env=os.environ | environ, stdout=out, stderr=out)
    try:
        _wait(process, ready, ready_s, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(end_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, ready_s: float, log: Path) -> None:
    deadline = time.monotonic() + ready_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                break
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    # The answer may come from another process that holds the port.
    if process.poll() is not None or time.monotonic() >= deadline:
        raise RuntimeError(f"nothing answers at {url}, or not this process; see {log}")

"""`smetric serve` as a process in front of given engines, its traces going to a tracing UI."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

#: Seconds until it serves.
READY_S = 60.0


@contextmanager
def router(
    engines: Sequence[str],
    work: Path,
    environ: Mapping[str, str],
    *,
    port: int,
    admin_port: int,
    ui: str,
    policy: str = "smetric",
) -> Iterator[str]:
    """A router that serves, by its URL; Bailian is its shadow. It ends with the block, and has sent its spans then.

    Args:
        engines: their URLs; they are called vllm-1, vllm-2 and so on.
        work: a folder for its configuration and its log.
        environ: the `OTEL_…` variables.
        port: where requests go, on loopback.
        admin_port: where `/metrics` and `/admin/…` are.
        ui: URL of the tracing UI, for the links of the live page.
        policy: a shipped name or a file.

    Raises:
        RuntimeError: it ended, or was not ready in time; says where its log is.
    """
    work.mkdir(parents=True, exist_ok=True)
    settings = {
        "policy": policy,
        "shadow": ["bailian"],
        "instances": [{"id": f"vllm-{number}", "url": url} for number, url in enumerate(engines, 1)],
        "listen": {"port": port},
        "admin": {"port": admin_port},
        "trace": {"ui_url": f"{ui}/redirects/traces/{{trace_id}}"},
    }
    config, log = work / "smetric.yaml", work / "router.log"
    config.write_text(yaml.safe_dump(settings, sort_keys=False))
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "smetric", "serve", "--config", str(config)],
            env=os.environ | environ,
            stdout=out,
            stderr=out,
        )
    try:
        _wait(process, f"http://127.0.0.1:{admin_port}/readyz", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                break
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(0.2)
    if process.poll() is not None or time.monotonic() >= deadline:
        raise RuntimeError(f"the router is not ready; see {log}")

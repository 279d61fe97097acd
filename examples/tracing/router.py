"""`smetric serve` as a process in front of given engines, with traces sent to a tracing UI."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from examples.tracing.process import serving

#: Longest start, and longest end including the export of spans, seconds.
READY_S = END_S = 60.0


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
    """Run a router with Bailian in shadow within the block and yield its URL; its spans are sent at the end.

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
    with serving(
        [sys.executable, "-m", "smetric", "serve", "--config", str(config)],
        environ,
        log,
        ready=f"http://127.0.0.1:{admin_port}/readyz",
        ready_s=READY_S,
        end_s=END_S,
    ):
        yield f"http://127.0.0.1:{port}"

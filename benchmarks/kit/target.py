"""The routers that are compared: how each one is started, beside the same mock instances."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.kit.load import free_ports, listens
from benchmarks.kit.process import Process, running

#: The peer's version that all published figures are against.
SGLANG_ROUTER = "sglang-router==0.3.2"
#: Share of requests whose trace SMetric records.
SAMPLED = "0.01"
#: Seconds a router gets to listen.
READY_S = 60.0


class Missing(Exception):
    """A router cannot be had on this machine; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Running:
    """A router that takes requests on `port` and shows its metrics on `admin`."""

    process: Process
    port: int
    admin: int


@contextmanager
def _listening(
    name: str, command: list[str], folder: Path, ports: tuple[int, int], **environ: str
) -> Iterator[Running]:
    with running(name, command, folder / f"{name}.log", environ=environ) as process:
        process.wait_until(lambda: all(map(listens, ports)), READY_S)
        yield Running(process, *ports)


@contextmanager
def _smetric(kept: Path, folder: Path, instances: Sequence[str], collector: str) -> Iterator[Running]:
    """As it is run: policy, prefix index, metrics, access log to a file, traces sampled and exported."""
    port = free_ports(2)
    command = [sys.executable, "-m", "smetric", "serve", "--policy", "smetric"]
    command += ["--port", str(port), "--admin-port", str(port + 1)]
    command += [word for url in instances for word in ("--instance", url)]
    with _listening(
        "smetric",
        command,
        folder,
        (port, port + 1),
        OTEL_EXPORTER_OTLP_ENDPOINT=collector,
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG=SAMPLED,
    ) as started:
        yield started


@contextmanager
def _sglang(policy: str, kept: Path, folder: Path, instances: Sequence[str], collector: str) -> Iterator[Running]:
    """sglang-router from PyPI, in a venv of its own; it has no tracing that is on by default."""
    port = free_ports(2)
    command = [str(_installed(kept)), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(port + 1), "--log-level", "warn", "--policy", policy]
    command += ["--worker-urls", *instances]
    with _listening(f"sglang-{policy}", command, folder, (port, port + 1)) as started:
        yield started


def _installed(kept: Path) -> Path:
    """The Python of the venv that holds sglang-router, made when it is first asked for.

    Raises:
        Missing: pip cannot install it.
    """
    home = kept / SGLANG_ROUTER.replace("==", "-")
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", SGLANG_ROUTER]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
        if done.returncode:
            reason = next(
                (line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), done.stderr
            )
            raise Missing(f"`pip install {SGLANG_ROUTER}` failed: {reason.strip()}")
        (home / "installed").touch()
    return python


#: By name; each is called with a folder that outlives the run, one that does not, the instances' URLs and an OTLP
#: collector's URL.
TARGETS: dict[str, Callable[[Path, Path, Sequence[str], str], AbstractContextManager[Running]]] = {
    "smetric": _smetric,
    "sglang-rr": partial(_sglang, "round_robin"),
    "sglang-cache": partial(_sglang, "cache_aware"),
}

"""Real vLLM engines on loopback: what `setup_vllm.sh` installs, started, waited for, killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.ports import free_ports

HERE = Path(__file__).parent
MODEL = "tiny"
BLOCK = 32
#: Seconds until an engine answers. Three at once on two cores take about 90.
READY_S = 400.0


def folder() -> Path:
    """Where everything is installed."""
    return Path(os.environ.get("E2E_FOLDER", Path(tempfile.gettempdir()) / "smetric-e2e"))


def set_up() -> None:
    """Install vLLM and make the model, unless they are there."""
    subprocess.run([HERE / "setup_vllm.sh", folder()], check=True)


class RealEngine:
    """One `vllm serve` with KV events on.

    Args:
        number: which CPU it is bound to, by parity, and what its log is called.
        blocks: blocks of its KV cache.
        traces: where it sends its spans; empty for nowhere.
    """

    def __init__(self, number: int, *, blocks: int, traces: str = "") -> None:
        self.number = number
        self.port, self.events, self.replays = free_ports(3)
        self._blocks = blocks
        self._traces = traces
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return folder() / f"engine-{self.number}.log"

    def start(self) -> None:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replays}",
        }
        options = {
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "bfloat16",
            "max-model-len": 8192,
            "max-num-seqs": 8,
            "max-num-batched-tokens": 4096,
            "block-size": BLOCK,
            "num-gpu-blocks-override": self._blocks,
            "generation-config": "vllm",
            "tool-call-parser": "hermes",
            "kv-events-config": json.dumps(events),
        }
        if self._traces:
            options["otlp-traces-endpoint"] = f"{self._traces}/v1/traces"
        switches = ["enforce-eager", "enable-prefix-caching", "enable-prompt-tokens-details", "enable-auto-tool-choice"]
        command = [str(folder() / "venv/bin/vllm"), "serve", str(folder() / "model")]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command += [f"--{name}" for name in switches]
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "SMETRIC_"))} | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(self.number % (os.cpu_count() or 1)),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_SERVICE_NAME": f"engine-{self.number}",
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    async def ready(self) -> None:
        """Wait until it answers."""
        assert self._process is not None
        deadline = time.monotonic() + READY_S
        while not await asyncio.to_thread(self._answers):
            assert self._process.poll() is None, f"the engine ended; see {self.log}"
            assert time.monotonic() < deadline, f"the engine is not ready after {READY_S} s; see {self.log}"
            await asyncio.sleep(1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """End the server and its workers at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

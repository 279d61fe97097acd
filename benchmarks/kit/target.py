"""The routers that are compared: how each one is started, beside the same mock instances."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.kit.installed import Missing, installed
from benchmarks.kit.load import free_ports, listens
from benchmarks.kit.process import Process, running

#: The versions that published figures are against.
SGLANG_ROUTER = "sglang-router==0.3.2"
VLLM_ROUTER = "vllm-router==0.1.17"
#: Share of requests whose trace SMetric records.
SAMPLED = "0.01"
#: Seconds a router gets to listen.
READY_S = 60.0
#: Where a checkout of github.com/vllm-project/production-stack is: it is on no index.
PRODUCTION_STACK = "PRODUCTION_STACK"
#: Where another checkout of SMetric is, set up by `make test`, to compare two commits in one run.
OTHER_CHECKOUT = "OTHER_SMETRIC"


@dataclass(frozen=True, slots=True)
class Running:
    """A router that takes requests on `port` and shows its metrics on `admin`; no process for the way without one."""

    process: Process | None
    port: int
    admin: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where routers run.

    Args:
        kept: a folder that outlives the run.
        folder: one that does not.
        instances: base URLs of the instances.
        collector: URL of an OTLP collector.
    """

    kept: Path
    folder: Path
    instances: Sequence[str]
    collector: str


@contextmanager
def _listening(
    name: str, command: list[str], folder: Path, ports: tuple[int, int], **environ: str
) -> Iterator[Running]:
    with running(name, command, folder / f"{name}.log", environ=environ) as process:
        process.wait_until(lambda: all(map(listens, ports)), READY_S)
        yield Running(process, *ports)


@contextmanager
def _direct(site: Site) -> Iterator[Running]:
    """No router: the load client speaks to the first instance."""
    port = int(site.instances[0].rpartition(":")[2])
    yield Running(None, port, port)


@contextmanager
def _smetric(site: Site, name: str = "smetric", python: str = sys.executable) -> Iterator[Running]:
    """As it is run: policy, prefix index, metrics, access log to a file, traces sampled and exported."""
    port = free_ports(2)
    command = [python, "-P", "-m", "smetric", "serve", "--policy", "smetric"]
    command += ["--port", str(port), "--admin-port", str(port + 1)]
    command += [word for url in site.instances for word in ("--instance", url)]
    with _listening(
        name,
        command,
        site.folder,
        (port, port + 1),
        OTEL_EXPORTER_OTLP_ENDPOINT=site.collector,
        OTEL_TRACES_SAMPLER="parentbased_traceidratio",
        OTEL_TRACES_SAMPLER_ARG=SAMPLED,
    ) as started:
        yield started


@contextmanager
def _other(site: Site) -> Iterator[Running]:
    """Another checkout of SMetric, such as one of the commit before."""
    python = Path(os.environ.get(OTHER_CHECKOUT, "")) / ".venv" / "bin" / "python"
    if not python.is_file():
        raise Missing(f"set {OTHER_CHECKOUT} to a checkout with its environment in .venv")
    with _smetric(site, "smetric-other", str(python)) as started:
        yield started


@contextmanager
def _rust(package: str, module: str, level: str, policy: str, site: Site) -> Iterator[Running]:
    """sglang-router, or vllm-router which has its options from it; neither traces by default."""
    python = installed(site.kept, package.replace("==", "-"), [package])
    port = free_ports(2)
    command = [str(python), "-m", module, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(port + 1), "--log-level", level, "--policy", policy]
    command += ["--worker-urls", *site.instances]
    with _listening(f"{package}-{policy}", command, site.folder, (port, port + 1)) as started:
        yield started


@contextmanager
def _production_stack(site: Site) -> Iterator[Running]:
    """The router of vLLM's production stack, from a checkout."""
    checkout = Path(os.environ.get(PRODUCTION_STACK, ""))
    requirements = checkout / "src" / "vllm_router" / "requirements.txt"
    if not requirements.is_file():
        raise Missing(f"set {PRODUCTION_STACK} to a checkout of github.com/vllm-project/production-stack")
    newer = next(filter(None, map(shutil.which, ("python3.12", "python3.13"))), None)
    if newer is None:
        raise Missing("it needs Python 3.12")
    python = installed(site.kept, "production-stack", ["-r", str(requirements), "httptools", "uvloop"], newer)
    port = free_ports(1)
    command = [str(python), "-m", "vllm_router.app", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--service-discovery", "static", "--static-backends", ",".join(site.instances)]
    command += ["--static-models", ",".join("m" for _ in site.instances)]
    command += ["--routing-logic", "roundrobin", "--log-level", "warning"]
    path = str(checkout / "src")
    with _listening("production-stack", command, site.folder, (port, port), PYTHONPATH=path) as started:
        yield started


NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err warn;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 2m; keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream instances {{ least_conn; {servers} keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=2048;
    location / {{
      proxy_pass http://instances; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@contextmanager
def _nginx(site: Site) -> Iterator[Running]:
    """nginx with `least_conn`, one worker, no access log: what forwarding alone costs."""
    program = shutil.which("nginx")
    if program is None:
        raise Missing("nginx is not installed")
    port = free_ports(1)
    servers = " ".join(f"server {url.removeprefix('http://')};" for url in site.instances)
    file = site.folder / "nginx.conf"
    file.write_text(NGINX.format(folder=site.folder, servers=servers, port=port))
    with _listening("nginx", [program, "-c", str(file)], site.folder, (port, port)) as started:
        yield started


#: By name.
TARGETS: dict[str, Callable[[Site], AbstractContextManager[Running]]] = {
    "direct": _direct,
    "nginx": _nginx,
    "sglang-rr": partial(_rust, SGLANG_ROUTER, "sglang_router.launch_router", "warn", "round_robin"),
    "sglang-cache": partial(_rust, SGLANG_ROUTER, "sglang_router.launch_router", "warn", "cache_aware"),
    "vllm-rr": partial(_rust, VLLM_ROUTER, "vllm_router.launch_router", "warning", "round_robin"),
    "vllm-cache": partial(_rust, VLLM_ROUTER, "vllm_router.launch_router", "warning", "cache_aware"),
    "production-stack": _production_stack,
    "smetric": _smetric,
    "smetric-other": _other,
}

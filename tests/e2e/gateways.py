"""Real gateways, started with the files of `examples/gateways` on free ports; `setup_gateways.sh` gets them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from examples.tracing.process import serving
from tests.e2e.real_vllm import HERE, folder
from tests.ports import free_ports

FILES = HERE.parents[1] / "examples" / "gateways"
#: Where the files say that the gateway and its routers are.
GATEWAY, ROUTERS = "8081", ("10.0.0.1:8080", "10.0.0.2:8080")
READY_S = 60.0

NGINX = """
daemon off; pid {work}/pid; error_log {work}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {work}/body; proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi; uwsgi_temp_path {work}/uwsgi; scgi_temp_path {work}/scgi;
    include {work}/nginx.conf;
}}
"""
HTTPD_MODULES = ["mpm_event", "authz_core", "reqtimeout", "proxy", "proxy_http", "proxy_balancer", "proxy_hcheck"]
HTTPD_MODULES += ["slotmem_shm", "lbmethod_byrequests", "lbmethod_bybusyness"]
HTTPD = """
ServerRoot {work}
ServerName localhost
PidFile {work}/pid
DefaultRuntimeDir {work}
ErrorLog {work}/error.log
User www-data
Group www-data
KeepAliveTimeout 60
{modules}
Include {work}/httpd.conf
"""


def set_up() -> None:
    """Put the gateways where they can be had, unless they are there."""
    subprocess.run([HERE / "setup_gateways.sh", folder()], check=True)


@dataclass(frozen=True)
class Kind:
    """A kind of gateway.

    Attributes:
        program: its name.
        files: of the manual; the first one is that with which it is started.
        arguments: of the program; `{work}` is the folder of the files.
        wrap: a configuration that includes the manual's, for one that is no whole one.
        environ: variables that it needs.
    """

    program: str
    files: Sequence[str]
    arguments: Sequence[str]
    wrap: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


KINDS = {
    "nginx": Kind("nginx", ["nginx.conf"], ["-c", "{work}/whole.conf"], NGINX),
    "haproxy": Kind("haproxy", ["haproxy.cfg"], ["-db", "-f", "{work}/haproxy.cfg"]),
    "httpd": Kind("apache2", ["httpd.conf"], ["-D", "FOREGROUND", "-f", "{work}/whole.conf"], HTTPD),
    "caddy": Kind("caddy", ["Caddyfile"], ["run", "--config", "{work}/Caddyfile", "--adapter", "caddyfile"]),
    "traefik": Kind("traefik", ["traefik.yaml", "traefik-routers.yaml"], ["--configFile={work}/traefik.yaml"]),
    "envoy": Kind("envoy", ["envoy.yaml"], ["-c", "{work}/envoy.yaml", "--disable-hot-restart", "--concurrency", "1"]),
    "litellm": Kind(
        "litellm",
        ["litellm.yaml"],
        ["--config", "{work}/litellm.yaml", "--host", "127.0.0.1", "--port", "{port}"],
        environ={
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",
            "OTEL_EXPORTER": "in_memory",
        },
    ),
}


def program(name: str) -> str | None:
    """Where the program *name* is; None for nowhere."""
    place = folder() / "gateways"
    return shutil.which(name, path=os.pathsep.join([str(place / "usr/sbin"), str(place / "bin"), os.environ["PATH"]]))


@contextmanager
def gateway(kind: Kind, routers: Sequence[str], work: Path) -> Iterator[str]:
    """A gateway by its URL, in front of two *routers*, `host:port` each; its files and log are in *work*."""
    found = program(kind.program)
    assert found is not None
    (port,) = free_ports(1)
    for file in kind.files:
        text = (FILES / file).read_text().replace("/etc/traefik", str(work))
        for said, meant in zip((GATEWAY, *ROUTERS), (str(port), *routers), strict=True):
            text = text.replace(said, meant)
            in_envoy, meant = (one.replace(":", ", port_value: ") for one in (said, meant))
            text = text.replace(in_envoy, meant)
        (work / file).write_text(text)
    modules = "\n".join(
        f"LoadModule {name}_module {Path(found).parents[1]}/lib/apache2/modules/mod_{name}.so" for name in HTTPD_MODULES
    )
    (work / "whole.conf").write_text(kind.wrap.format(work=work, modules=modules))
    libraries = next(iter((folder() / "gateways" / "usr" / "lib").glob("*-linux-gnu")), Path())
    environ = {"LD_LIBRARY_PATH": str(libraries), "HOME": str(work), **kind.environ}
    command = [found, *(argument.format(work=work, port=port) for argument in kind.arguments)]
    url = f"http://127.0.0.1:{port}"
    with serving(command, environ, work / "gateway.log", ready=f"{url}/v1/models", ready_s=READY_S, end_s=10.0):
        yield url

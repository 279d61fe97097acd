"""Arize Phoenix as a process on loopback, without telemetry of its own, and queries for the spans it stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.tracing.process import serving

SETUP = Path(__file__).parent / "setup_phoenix.sh"
#: Project under which Phoenix shows the spans; it reads the name from their resource.
PROJECT = "smetric"
_SPANS = """query($name: String!, $condition: String) {
  getProjectByName(name: $name) {
    spans(first: 500, filterCondition: $condition, sort: {col: startTime, dir: desc}) {
      edges { node { name spanId attributes trace { traceId } } }
    }
  }
}"""
#: Longest start, seconds; the first start creates a database.
READY_S = 180.0
#: Longest end, seconds.
END_S = 20.0


def folder() -> Path:
    """Return the folder that `setup_phoenix.sh` installs into."""
    return Path(os.environ.get("PHOENIX_FOLDER", Path(tempfile.gettempdir()) / "smetric-phoenix"))


def set_up() -> None:
    """Install Phoenix if it is missing."""
    subprocess.run([SETUP, folder()], env={"PYTHON": sys.executable} | os.environ, check=True)


def export_to(url: str) -> dict[str, str]:
    """Return the `OTEL_…` variables that send a router's traces to the Phoenix at *url*."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_SERVICE_NAME": "smetric",
        "OTEL_RESOURCE_ATTRIBUTES": f"openinference.project.name={PROJECT}",
    }


@dataclass(frozen=True)
class Found:
    """Span as Phoenix stores it: attributes as a tree of dotted names, and the page that shows it."""

    name: str
    trace_id: str
    attributes: dict[str, Any]
    page: str


def find(url: str, condition: str = "") -> list[Found]:
    """Return the newest 500 spans that match a filter of Phoenix's search box; none for an unknown project.

    Spans take a second or more from the exporter to the database: ask again.

    Raises:
        RuntimeError: Phoenix does not take the condition; says why.
    """
    asked = {"query": _SPANS, "variables": {"name": PROJECT, "condition": condition or None}}
    request = urllib.request.Request(
        f"{url}/graphql", json.dumps(asked).encode(), {"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        said = json.load(answer)
    if said.get("errors"):
        raise RuntimeError(f"Phoenix does not take {condition!r}: {said['errors'][0]['message']}")
    project = said["data"]["getProjectByName"]
    nodes = [edge["node"] for edge in project["spans"]["edges"]] if project else []
    return [
        Found(
            node["name"],
            node["trace"]["traceId"],
            json.loads(node["attributes"]),
            f"{url}/redirects/spans/{node['spanId']}",
        )
        for node in nodes
    ]


@contextmanager
def phoenix(work: Path, *, port: int, grpc_port: int) -> Iterator[str]:
    """Run Phoenix within the block and yield its URL once it answers.

    Args:
        work: a folder for its database and its log.
        port: of the pages, of its APIs and of OTLP over HTTP; on loopback.
        grpc_port: of OTLP over gRPC, which is not asked for here but is always opened, on all addresses.

    Raises:
        RuntimeError: it ended, or did not answer in time; says where its log is.
    """
    work.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    environ = {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_WORKING_DIR": str(work),
    }
    log = work / "phoenix.log"
    command: list[str | Path] = [folder() / "venv" / "bin" / "phoenix", "serve"]
    with serving(command, environ, log, ready=f"{url}/healthz", ready_s=READY_S, end_s=END_S):
        yield url

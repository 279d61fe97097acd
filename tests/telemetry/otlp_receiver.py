"""A collector in a thread: takes OTLP/HTTP protobuf on a free port and keeps the decoded spans."""

from __future__ import annotations

import gzip
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

#: By content coding.
_OPEN: dict[str, Callable[[bytes], bytes]] = {"": bytes, "gzip": gzip.decompress, "deflate": zlib.decompress}


@dataclass
class Received:
    span: Span
    attributes: dict[str, Any]
    resource: dict[str, Any]
    scope: str

    @property
    def name(self) -> str:
        return str(self.span.name)


@dataclass
class Receiver:
    url: str
    spans: list[Received] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def named(self, start: str) -> list[Received]:
        return [each for each in self.spans if each.name.startswith(start)]


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


@contextmanager
def receiving(status: int = 200, after_s: float = 0.0, answer: bytes = b"") -> Iterator[Receiver]:
    """A collector that answers each export with *status* and *answer*, *after_s* seconds after it came."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"]))
            body = _OPEN[self.headers.get("content-encoding", "")](sent)
            receiver.paths.append(self.path)
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            request = ExportTraceServiceRequest.FromString(body)
            for resource_spans in request.resource_spans:
                resource = {each.key: _plain(each.value) for each in resource_spans.resource.attributes}
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        attributes = {each.key: _plain(each.value) for each in span.attributes}
                        receiver.spans.append(Received(span, attributes, resource, scope_spans.scope.name))
            time.sleep(after_s)
            self.send_response(status)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)

"""What a collector answers to an export: spans it did not take although the SDK believes so are found out here.

The SDK counts a redirect, which it does not follow, as success, and does not read that a part of a batch was rejected.
Retries and time limits are the SDK's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import requests
import structlog
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from smetric.telemetry.log_limit import LogLimit

log = structlog.get_logger("smetric.telemetry")


class Collector:
    """The receiver of an exporter over HTTP.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        #: Spans that it rejected out of batches that it took.
        self.rejected = 0
        self._limit = LogLimit(clock)

    def session(self) -> requests.Session:
        """What an exporter sends with."""
        session = requests.Session()
        session.hooks["response"].append(self._read)
        return session

    def _read(self, answer: requests.Response, **_: Any) -> None:
        """Read *answer*; what is raised is to the exporter a batch that failed."""
        if 300 <= answer.status_code < 400:
            answer.close()
            raise requests.RequestException(
                f"HTTP {answer.status_code}, a redirect, which is not followed: name the endpoint it leads to"
            )
        if not answer.ok or not answer.content:
            return
        try:
            partial = ExportTraceServiceResponse.FromString(answer.content).partial_success
        except DecodeError:  # no OTLP: some collectors answer with a word
            return
        self.rejected += partial.rejected_spans
        if not partial.rejected_spans and not partial.error_message:
            return
        kept_back = self._limit.passes("partial")
        if kept_back is not None:
            log.warning(
                "smetric.tracing.rejected",
                spans=partial.rejected_spans,
                problem=partial.error_message,
                kept_back=kept_back,
            )

"""The SDK's id generator, told which trace id to use: the sampling decision was made on it. Needs the SDK."""

from __future__ import annotations

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


class GivenIds(RandomIdGenerator):
    """Random span ids; `given` is the next trace id. Used from the event loop alone, set just before each root span."""

    given = 0

    def generate_trace_id(self) -> int:
        """The given id."""
        return self.given

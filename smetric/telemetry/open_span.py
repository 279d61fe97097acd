"""A span while it is open: a name, ids and a plain dict, handed to the exporter as the SDK's when it ends.

Needs the SDK, whose own recording spans check every attribute, take locks and call samplers and processors: that costs
more than all that is recorded here, where types are known, one thread writes, and what is sampled is decided before a
span begins.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
#: Attributes of a span that need not be counted: no span of ours has as many.
_FEW = 96


class SpanMaker:
    """What all spans of a process have in common.

    Args:
        processor: takes ended spans.
        resource: what the process is.
        scope: who instruments it.
        limits: the user's; by default none that a span of ours could exceed.
    """

    def __init__(
        self, processor: SpanProcessor, resource: Resource, scope: InstrumentationScope, limits: SpanLimits
    ) -> None:
        self._processor = processor
        self._resource = resource
        self._scope = scope
        most, longest = limits.max_span_attributes, limits.max_span_attribute_length
        self._limits = (most, longest) if longest is not None or (most is not None and most < _FEW) else None

    def begin(
        self,
        name: str,
        trace_id: int,
        trace_state: TraceState | None,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: Mapping[str, Any],
        start_ns: int,
        links: Sequence[Link] = (),
    ) -> OpenSpan:
        """A span that begins at *start_ns*, Unix nanoseconds, below *parent*."""
        context = SpanContext(trace_id, random.getrandbits(64) or 1, False, _SAMPLED, trace_state)
        return OpenSpan(self, name, context, parent, kind, dict(attributes), start_ns, links)

    def finish(self, span: OpenSpan, end_ns: int) -> None:
        """Hand *span* over, as it is now."""
        attributes: Any = span.attributes
        if self._limits is not None:
            most, longest = self._limits
            attributes = BoundedAttributes(most, attributes, immutable=True, max_value_len=longest)
        self._processor.on_end(
            ReadableSpan(
                span.name,
                span.context,
                span.parent,
                self._resource,
                attributes,
                (),
                span.links,
                span.kind,
                None,
                span.status,
                span.start_ns,
                max(end_ns, span.start_ns),
                self._scope,
            )
        )


class OpenSpan:
    """One span."""

    __slots__ = ("_maker", "attributes", "context", "kind", "links", "name", "parent", "start_ns", "status")

    def __init__(
        self,
        maker: SpanMaker,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: dict[str, Any],
        start_ns: int,
        links: Sequence[Link],
    ) -> None:
        self._maker = maker
        self.name = name
        self.context = context
        self.parent = parent
        self.kind = kind
        self.attributes = attributes
        self.start_ns = start_ns
        self.links = links
        self.status = _UNSET

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add *attributes*; values are of the types that the table of names says."""
        self.attributes.update(attributes)

    def failed(self) -> None:
        """What it stands for went wrong."""
        self.status = Status(StatusCode.ERROR)

    def end(self, end_ns: int) -> None:
        """It ended at *end_ns*, Unix nanoseconds; called once."""
        self._maker.finish(self, end_ns)

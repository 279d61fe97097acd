"""Tracing: provider, sampling, context."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import structlog

import smetric
from smetric import names
from smetric.errors import ConfigError
from smetric.names import KEPT
from smetric.telemetry.decision_text import LIMIT
from smetric.telemetry.exporter import address, exporter_kind

if TYPE_CHECKING:
    from opentelemetry.trace import SpanKind

    from smetric.telemetry.exporter import BoundedProcessor
    from smetric.telemetry.spans import OpenSpan, SpanMaker


# Which traces are recorded: decided once per request, when its outcome is known, before any span exists.
#
# The rule is the user's (`OTEL_TRACES_SAMPLER`, `OTEL_TRACES_SAMPLER_ARG`); what is out of the ordinary is kept
# whatever it says: outcomes but `routed` and `pinned`, and migrations, unless the caller's word is to count more. The
# SDK's samplers need a span context per call; this one costs a few comparisons. Tail sampling by latency is a
# collector's work.

_SAMPLERS = ("always_on", "always_off", "traceidratio")


@dataclass(frozen=True, slots=True)
class Sampler:
    """Keeps a share of the traces.

    Args:
        ratio: share of root traces kept, 0..1, by the low 64 bits of the trace id as the SDK does it.
        parent_based: follow the caller's sampled flag where a caller is continued.
        keep: what is recorded whatever these say, of `names.KEPT`.
        keep_over_parent: this too where the caller that is continued does not record; its trace is a fragment then.
    """

    ratio: float = 1.0
    parent_based: bool = True
    keep: frozenset[str] = frozenset(KEPT)
    keep_over_parent: bool = True
    _bound: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_bound", round(self.ratio * (1 << 64)))

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str], keep: Collection[str] = KEPT, *, keep_over_parent: bool = True
    ) -> Sampler:
        """Read `OTEL_TRACES_SAMPLER` and its argument; unset is `parentbased_always_on`.

        Args:
            environ: where they are read from.
            keep: what is recorded whatever they say.
            keep_over_parent: also where the caller does not record.

        Raises:
            ConfigError: an unknown sampler, or a ratio outside 0..1.
        """
        name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
        kind = name.removeprefix("parentbased_")
        if kind not in _SAMPLERS:
            known = ", ".join([*_SAMPLERS, *(f"parentbased_{each}" for each in _SAMPLERS)])
            raise ConfigError(f"OTEL_TRACES_SAMPLER: unknown sampler {name!r}; known are {known}")
        ratio = {"always_on": 1.0, "always_off": 0.0}.get(kind)
        if ratio is None:
            ratio = _ratio(environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1.0")
        return cls(ratio, kind != name, frozenset(keep), keep_over_parent)

    def keeps(self, trace_id: int, parent_sampled: bool | None, kinds: Collection[str]) -> bool:
        """Whether to record a trace.

        Args:
            trace_id: 128 bits.
            parent_sampled: the flag of the caller whose trace is continued, None for a root.
            kinds: the outcome of the decision, and `migration`; empty where there was none.
        """
        if (self.keep_over_parent or parent_sampled is not False) and not self.keep.isdisjoint(kinds):
            return True
        if self.parent_based and parent_sampled is not None:
            return parent_sampled
        return (trace_id & 0xFFFF_FFFF_FFFF_FFFF) < self._bound


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG: {text!r} is not a share between 0 and 1")
    return ratio


# Trace context on the wire: what arrived in `traceparent`, `tracestate` and `baggage`, and what goes upstream.
#
# W3C Trace Context level 2, read strictly; no spans here. Peers that are not trusted can neither join our traces nor
# force sampling: what they send is kept for a link and never passed on.

#: A longer `tracestate` is dropped as a whole, which the standard allows.
TRACESTATE_MAX = 512
#: A longer `baggage` is dropped, where it is passed on at all.
BAGGAGE_MAX = 8192

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?")
_MEMBER = re.compile(
    rb"[ \t]*(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    rb"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e][ \t]*"
)
_WANTED = frozenset({b"traceparent", b"tracestate", b"baggage"})
_NAME = itemgetter(0)

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Parent:
    """A valid incoming trace context.

    Args:
        trace_id: 32 hex digits.
        span_id: 16 hex digits.
        sampled: the caller records this trace.
        is_random: its ids are random, which every hop passes on unchanged.
        trusted: we continue it; otherwise it is only linked to.
        tracestate: validated, or empty.
    """

    trace_id: bytes
    span_id: bytes
    sampled: bool
    is_random: bool
    trusted: bool
    tracestate: bytes = b""

    def headers(self, *, sampled: bool) -> Headers:
        """The headers that let an instance continue this context directly, without a span of ours between."""
        flags = sampled + 2 * self.is_random
        headers = [(b"traceparent", b"00-%b-%b-0%d" % (self.trace_id, self.span_id, flags))]
        if self.tracestate:
            headers.append((b"tracestate", self.tracestate))
        return headers


@dataclass(frozen=True, slots=True)
class Propagation:
    """Which of the headers are read and sent, by `OTEL_PROPAGATORS` (default `tracecontext`).

    `unknown` names the propagators asked for that do not exist here.
    """

    tracecontext: bool = True
    baggage: bool = False
    unknown: tuple[str, ...] = ()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Propagation:
        """Read `OTEL_PROPAGATORS`. Unlike the SDK's default, baggage must be asked for: it can carry user data."""
        names = [name.strip().lower() for name in environ.get("OTEL_PROPAGATORS", "tracecontext").split(",")]
        unknown = tuple(name for name in names if name and name not in ("tracecontext", "baggage", "none"))
        return cls("tracecontext" in names, "baggage" in names, unknown)

    def extract(self, headers: Iterable[tuple[bytes, bytes]], *, trusted: bool) -> tuple[Parent | None, bytes]:
        """The trace context of a request, None when there is no valid one, and the baggage to pass on.

        Args:
            headers: names in lower case, as ASGI gives them.
            trusted: the peer may continue its trace here.
        """
        if _WANTED.isdisjoint(map(_NAME, headers)):
            return None, b""
        found = [header for header in headers if header[0] in _WANTED]
        parents = [value for name, value in found if name == b"traceparent"]
        baggage = b""
        if self.baggage and trusted:
            baggage = b",".join(value for name, value in found if name == b"baggage")
            if len(baggage) > BAGGAGE_MAX:
                baggage = b""
        # Two traceparents are none: which of them is meant cannot be known.
        if not self.tracecontext or len(parents) != 1:
            return None, baggage
        ids = _parse(parents[0])
        if ids is None:
            return None, baggage
        state = b""
        if trusted:
            state = _tracestate(b",".join(value for name, value in found if name == b"tracestate"))
        return Parent(*ids, trusted, state), baggage


def _parse(value: bytes) -> tuple[bytes, bytes, bool, bool] | None:
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == b"ff" or (version == b"00" and rest is not None):
        return None
    if trace_id == b"0" * 32 or span_id == b"0" * 16:
        return None
    return trace_id, span_id, bool(int(flags, 16) & 1), bool(int(flags, 16) & 2)


def _tracestate(value: bytes) -> bytes:
    """*value* if it is valid and short enough, else nothing: a state cut in half would be another vendor's lie."""
    if not value or len(value) > TRACESTATE_MAX:
        return b""
    members = [member for member in value.split(b",") if member.strip()]
    keys = {member.strip().partition(b"=")[0] for member in members}
    if len(members) > 32 or len(keys) != len(members):
        return b""
    return value if all(_MEMBER.fullmatch(member) for member in members) else b""


# Builds the tracer from `OTEL_*` at start-up, makes spans, and shuts the export down within a bound.
#
# No endpoint configured: tracing is off, the SDK is not even imported, and only incoming contexts are passed on. When
# spans are made and what they say is in `exchange.py`, `http_attributes.py` and `decision_attributes.py`.

#: Seconds an export may hold up the end of the process.
SHUTDOWN_S = 2.0

log = structlog.get_logger("smetric.telemetry")


class Tracing:
    """Makes spans, or none.

    Args:
        environ: `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER` (otlp, console, none), `OTEL_EXPORTER_OTLP_*`,
            `OTEL_TRACES_SAMPLER*`, `OTEL_PROPAGATORS`, `OTEL_BSP_*`, `OTEL_METRICS_EXEMPLAR_FILTER` are honoured. The
            SDK reads most of them from the process's environment by itself.
        candidates: how many candidates a decision span shows.
        ui_hints: add the attributes by which tracing UIs lay a span out.
        keep: what is recorded whatever the sampler says, of `names.KEPT`.
        keep_over_parent: this too where the caller that is continued does not record.
        resource: more resource attributes, e.g. the policy at start.

    Raises:
        ConfigError: one of these variables cannot be used.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        *,
        candidates: int = 8,
        ui_hints: bool = True,
        keep: Collection[str] = names.KEPT,
        keep_over_parent: bool = True,
        resource: Mapping[str, str] | None = None,
    ) -> None:
        self.candidates = candidates
        self.ui_hints = ui_hints
        self.propagation = Propagation.from_environ(environ)
        self.sampler = Sampler.from_environ(environ, keep, keep_over_parent=keep_over_parent)
        #: Bytes of the candidates' attributes: the SDK, too, would cut what is longer than the user's limit.
        self.value_limit = LIMIT
        #: Whether histograms name the traces that are recorded.
        self.has_exemplars = _has_exemplars(environ)
        #: Whether any span can be made.
        self.enabled = False
        self._processor: BoundedProcessor | None = None
        self._maker: SpanMaker | None = None
        if self.propagation.unknown:
            log.warning("smetric.tracing", unknown_propagators=list(self.propagation.unknown))
        kind = exporter_kind(environ)
        if kind:
            try:
                self._build(kind, environ, resource or {})
            except (ValueError, RuntimeError) as error:  # as the SDK tells of a limit that is no number, and the like
                raise ConfigError(f"OTEL_*: {error}") from error
        to = address(environ) if kind == "otlp" else ""
        log.info("smetric.tracing", exporter=kind or "off", **({"to": to} if to else {}))

    def _build(self, kind: str, environ: Mapping[str, str], extra: Mapping[str, str]) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import SpanLimits
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from smetric.telemetry import exporter
        from smetric.telemetry.exporter import Collector
        from smetric.telemetry.spans import SpanMaker

        own = {"service.name": "smetric", "service.version": smetric.__version__, **extra}
        # What `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` say wins over what we say of ourselves.
        resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        limits = SpanLimits()
        if limits.max_span_attribute_length is not None:
            self.value_limit = min(LIMIT, limits.max_span_attribute_length)
        collector = Collector()
        self._processor = exporter.BoundedProcessor(exporter.build(kind, environ, collector), collector, environ)
        scope = InstrumentationScope(names.SCOPE, smetric.__version__)
        self._maker = SpanMaker(self._processor, resource, scope, limits)
        self.enabled = True

    @property
    def dropped(self) -> int:
        """Spans lost so far."""
        return self._processor.dropped if self._processor is not None else 0

    def root(
        self, name: str, trace_id: int, parent: Parent | None, attributes: Mapping[str, Any], start_ns: int
    ) -> OpenSpan:
        """A SERVER span: continues *parent* if it is trusted, else begins *trace_id* and links to *parent*.

        Args:
            name: from a bounded set.
            trace_id: 128 bits, for a root.
            parent: the incoming context.
            attributes: by which it starts.
            start_ns: Unix nanoseconds.
        """
        from opentelemetry import trace

        assert self._maker is not None
        state, above, links = None, None, tuple[trace.Link, ...]()
        if parent is not None:
            state = trace.TraceState.from_header([parent.tracestate.decode()]) if parent.tracestate else None
            remote = trace.SpanContext(
                int(parent.trace_id, 16), int(parent.span_id, 16), True, trace.TraceFlags(parent.sampled), state
            )
            if parent.trusted:
                trace_id, above = remote.trace_id, remote
            else:
                links = (trace.Link(remote),)
        return self._maker.begin(name, trace_id, state, above, trace.SpanKind.SERVER, attributes, start_ns, links)

    def child(
        self, name: str, parent: OpenSpan, kind: SpanKind, attributes: Mapping[str, Any], start_ns: int
    ) -> OpenSpan:
        """A span below *parent*; arguments as of `root`."""
        assert self._maker is not None
        above = parent.context
        return self._maker.begin(name, above.trace_id, above.trace_state, above, kind, attributes, start_ns)

    async def flush(self) -> None:
        """Send what waits, without blocking the loop; for tests and tools."""
        if self._processor is not None:
            await asyncio.to_thread(self._processor.force_flush)

    async def shutdown(self, within_s: float = SHUTDOWN_S) -> bool:
        """Send what waits; after *within_s* seconds give it up. False if it was given up."""
        processor = self._processor
        if processor is None:
            return True
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            processor.shutdown()
            # The loop may be gone by now, and with it whoever waited.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        # A daemon thread, not the loop's executor: the interpreter would wait for that one at exit.
        threading.Thread(target=send, name="smetric-trace-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(within_s):
                await done.wait()
        except TimeoutError:
            processor.abandon()
            log.warning("smetric.tracing", abandoned_after_s=within_s)
            return False
        return True


def _has_exemplars(environ: Mapping[str, str]) -> bool:
    asked = environ.get("OTEL_METRICS_EXEMPLAR_FILTER", "").strip().lower() or "trace_based"
    if asked not in ("always_on", "always_off", "trace_based"):
        raise ConfigError(f"OTEL_METRICS_EXEMPLAR_FILTER: {asked!r} is not one of always_on, always_off, trace_based")
    return asked != "always_off"

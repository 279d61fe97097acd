"""Tracing, configured by `OTEL_*`: provider, exporters and propagators of the SDK, and the end of the export.

Without an exporter tracing is off: the SDK is not imported, and the trace context of trusted peers passes on as it
came. The spans themselves are made in `spans.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import structlog

import smetric
from smetric import names
from smetric.errors import ConfigError
from smetric.fleet.exchange import Attempt, Exchange, Headers, Listener

if TYPE_CHECKING:
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.sdk.trace import Tracer, TracerProvider

    from smetric.fleet.instance import Instance
    from smetric.telemetry.exporter import BoundedProcessor

#: Seconds an export may hold up the end of the process.
SHUTDOWN_S = 2.0
#: A longer `tracestate` or `baggage` is dropped as a whole, which the standards allow.
TRACESTATE_MAX = 512
BAGGAGE_MAX = 8192
#: The variables that name an OTLP endpoint; the first one set counts.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
#: A header as the SDK reads it. It logs others whole, secrets and all, and goes on without them.
_HEADER = re.compile(r"""\s*[-!#$%&'*+.^_`|~0-9A-Za-z]+\s*=[^"\\;\x00-\x1f\x7f-\U0010ffff]*""")
_USER = re.compile(r"//[^/]*@")
#: Names of installed exporters, by OTLP protocol.
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?"
)

log = structlog.get_logger("smetric.telemetry")


class Tracing:
    """The SDK's tracing, or none.

    Args:
        environ: `OTEL_SDK_DISABLED`, `OTEL_TRACES_EXPORTER`, `OTEL_EXPORTER_OTLP_*`, `OTEL_TRACES_SAMPLER*`,
            `OTEL_PROPAGATORS`, `OTEL_BSP_*`, `OTEL_METRICS_EXEMPLAR_FILTER` are honoured. The SDK reads most of them
            from the process's environment by itself.
        candidates: candidates that a decision span shows at most.
        ui_hints: add the attributes by which tracing UIs lay a span out.
        keep: outcomes that are recorded whatever the sampler decides, of `names.KEPT`.
        keep_over_parent: keep them also if the caller does not record its trace.
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
        self._propagators = propagator_names(environ)
        self._options: dict[str, Any] = {
            "candidates": candidates,
            "ui_hints": ui_hints,
            "keep": frozenset(keep),
            "keep_over_parent": keep_over_parent,
            "has_exemplars": _has_exemplars(environ),
        }
        #: The provider that makes spans: one that another part of the process has set, such as
        #: `opentelemetry-instrument`, else one of our own; None for off.
        self.provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        self._processors: list[BoundedProcessor] = []
        sampler, ratio = sampler_of(environ)
        kinds = exporter_kinds(environ)
        shown = ",".join(kinds) or "off"
        try:
            self.provider = _global_provider()
            if self.provider is not None:
                shown = "global"
            elif kinds:
                if "otlp" in kinds:
                    _check_otlp(environ)
                self.provider = self._build(kinds, sampler, ratio, environ, resource or {})
            if self.provider is not None:
                self._tracer = _tracer_of(self.provider)
        except (ValueError, RuntimeError) as error:  # raised by the SDK, e.g. for a limit that is no number
            raise ConfigError(f"OTEL_*: {error}") from error
        to = {"to": address(environ)} if "otlp" in kinds and shown != "global" else {}
        log.info("smetric.tracing", exporter=shown, **to)

    def _build(
        self,
        kinds: Sequence[str],
        sampler: str,
        ratio: float,
        environ: Mapping[str, str],
        extra: Mapping[str, str],
    ) -> TracerProvider:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider, sampling

        from smetric.telemetry.exporter import BoundedProcessor, exporter_of

        own = {"service.name": "smetric", "service.version": smetric.__version__, **extra}
        # `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` override these.
        resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        own_samplers = {
            "always_on": sampling.ALWAYS_ON,
            "always_off": sampling.ALWAYS_OFF,
            "traceidratio": sampling.TraceIdRatioBased(ratio),
            "parentbased_always_on": sampling.DEFAULT_ON,
            "parentbased_always_off": sampling.DEFAULT_OFF,
            "parentbased_traceidratio": sampling.ParentBasedTraceIdRatio(ratio),
        }
        # The SDK loads any other one by itself.
        provider = TracerProvider(own_samplers.get(sampler), resource, shutdown_on_exit=False)
        for kind in kinds:
            if kind == "otlp":
                kind = _OTLP[protocol_of(environ)]
            processor = BoundedProcessor(exporter_of(kind, environ), environ)
            self._processors.append(processor)
            provider.add_span_processor(processor)
        return provider

    @property
    def enabled(self) -> bool:
        """Whether spans can be made."""
        return self._tracer is not None

    @property
    def dropped(self) -> int:
        """Spans lost so far."""
        return sum(processor.dropped for processor in self._processors)

    def listener(self, instances: Callable[[], Sequence[Instance]]) -> Listener:
        """Return the listener that traces exchanges; *instances* gives all of them."""
        passes_baggage = "baggage" in self._propagators
        if self._tracer is None:
            return PassOn("tracecontext" in self._propagators, passes_baggage)
        from smetric.telemetry.spans import Spans

        return Spans(
            self._tracer,
            _propagator(self._propagators),
            instances,
            baggage=passed_baggage if passes_baggage else None,
            **self._options,
        )

    async def flush(self) -> None:
        """Send what is queued, without blocking the loop; for tests and tools."""
        if self.provider is not None:
            await asyncio.to_thread(self.provider.force_flush)

    async def shutdown(self, within_s: float = SHUTDOWN_S) -> bool:
        """Send what is queued and end our own provider; return False if that took more than *within_s* seconds."""
        provider = self.provider
        if provider is None or not self._processors:
            return True
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            provider.shutdown()
            # The loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        # A daemon thread, as the interpreter waits at exit for threads of the loop's executor.
        threading.Thread(target=send, name="smetric-trace-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(within_s):
                await done.wait()
        except TimeoutError:
            for processor in self._processors:
                processor.abandon()
            log.warning("smetric.tracing", abandoned_after_s=within_s)
            return False
        return True


def _global_provider() -> TracerProvider | None:
    """Return the SDK's provider that another part of the process has set; None without one."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import get_tracer_provider

    provider = get_tracer_provider()
    return provider if isinstance(provider, TracerProvider) else None


def _tracer_of(provider: TracerProvider) -> Tracer | None:
    """Return a tracer of our own, whose sampler may be replaced; None where `OTEL_SDK_DISABLED`."""
    from opentelemetry.sdk.trace import Tracer

    tracer = provider.get_tracer(names.SCOPE, smetric.__version__)
    return copy.copy(tracer) if isinstance(tracer, Tracer) else None


def _propagator(wanted: Sequence[str]) -> TextMapPropagator:
    """Return the propagators of these names; baggage is passed on as it comes and needs none."""
    from opentelemetry.propagators.composite import CompositePropagator

    found = [each for name in wanted if name != "baggage" for each in _installed(name)]
    return CompositePropagator([each.load()() for each in found])


def _installed(name: str) -> Collection[EntryPoint]:
    return entry_points(group="opentelemetry_propagator", name=name)


def propagator_names(environ: Mapping[str, str]) -> list[str]:
    """Return the names in `OTEL_PROPAGATORS` that are installed; unknown ones are logged.

    Unlike the SDK's default, baggage must be asked for: it can carry user data.
    """
    asked = [name.strip().lower() for name in environ.get("OTEL_PROPAGATORS", "tracecontext").split(",")]
    asked = [name for name in asked if name not in ("", "none")]
    known = [name for name in asked if name in ("tracecontext", "baggage") or _installed(name)]
    unknown = [name for name in asked if name not in known]
    if unknown:
        log.warning("smetric.tracing", unknown_propagators=unknown)
    return known


def passed_baggage(headers: Headers) -> bytes:
    """Return the baggage of *headers*, byte for byte: the SDK's propagator would lose the properties of members."""
    baggage = b",".join(value for name, value in headers if name == b"baggage")
    return baggage if len(baggage) <= BAGGAGE_MAX else b""


class PassOn(Listener):
    """Listener that passes the trace context of trusted peers on, while tracing is off.

    Args:
        tracecontext: pass `traceparent` and `tracestate` on.
        baggage: pass `baggage` on.
    """

    def __init__(self, tracecontext: bool, baggage: bool) -> None:
        self._tracecontext = tracecontext
        self._baggage = baggage

    def arrived(self, exchange: Exchange) -> None:
        """Read the headers of a trusted peer."""
        if not exchange.trusted:
            return
        headers = exchange.scope["headers"]
        passed: Headers = []
        if self._tracecontext and (trace_id := traced_id(headers)):
            exchange.trace_id = trace_id
            state = b",".join(value for name, value in headers if name == b"tracestate")
            passed = [header for header in headers if header[0] == b"traceparent"]
            if 0 < len(state) <= TRACESTATE_MAX:
                passed.append((b"tracestate", state))
        if self._baggage and (baggage := passed_baggage(headers)):
            passed.append((b"baggage", baggage))
        exchange.trace = passed

    def sent(self, exchange: Exchange, attempt: Attempt) -> None:
        """Add them to the headers of an attempt."""
        if exchange.trace:
            attempt.headers += exchange.trace


def traced_id(headers: Headers) -> str:
    """Return the trace id of *headers*, 32 hex digits; empty unless there is one valid `traceparent`."""
    parents = [value for name, value in headers if name == b"traceparent"]
    match = _TRACEPARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if match is None or (match[2] is not None and parents[0].startswith(b"00")):
        return ""
    return match[1].decode()


# ── settings in `OTEL_*`, without the SDK ────────────────────────────────────


def exporter_kinds(environ: Mapping[str, str]) -> list[str]:
    """Return the exporters of `OTEL_TRACES_EXPORTER`; unset it is `otlp` if an endpoint is set. Empty for off."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    asked = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if asked:
        return [kind.strip() for kind in asked.split(",") if kind.strip() not in ("", "none")]
    return ["otlp"] if any(environ.get(name, "").strip() for name in ENDPOINTS) else []


def protocol_of(environ: Mapping[str, str]) -> str:
    """Return the OTLP protocol asked for."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return next(filter(None, (environ.get(name, "").strip() for name in names)), "http/protobuf")


def address(environ: Mapping[str, str]) -> str:
    """Return host and port of the endpoint; its path and credentials stay out of the log."""
    default = "localhost:4317" if protocol_of(environ) == "grpc" else "localhost:4318"
    at = next(filter(None, (environ.get(name, "").strip() for name in ENDPOINTS)), default)
    return urlsplit(at if "//" in at else f"//{at}").netloc.rpartition("@")[2]


def sampler_of(environ: Mapping[str, str]) -> tuple[str, float]:
    """Return the sampler's name and its ratio.

    Raises:
        ConfigError: an unknown sampler, which the SDK would replace by its default, or a ratio outside 0..1.
    """
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    kind = name.removeprefix("parentbased_")
    if kind not in _SAMPLERS and not entry_points(group="opentelemetry_traces_sampler", name=name):
        known = ", ".join([*_SAMPLERS, *(f"parentbased_{each}" for each in _SAMPLERS)])
        raise ConfigError(f"OTEL_TRACES_SAMPLER: unknown sampler {name!r}; known are {known}")
    if kind != "traceidratio":
        return name, 1.0
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1.0"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG: {text!r} is not a share between 0 and 1")
    return name, ratio


def _check_otlp(environ: Mapping[str, str]) -> None:
    """Refuse protocols, endpoints and headers that cannot be used, or that the SDK would leave out in silence."""
    protocol = protocol_of(environ)
    if protocol not in _OTLP:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not one of {', '.join(_OTLP)}")
    for name in ENDPOINTS:
        value = environ.get(name, "").strip()
        # gRPC endpoints may be written without a scheme.
        if value and protocol != "grpc" and not _is_address(value):
            shown = _USER.sub("//…@", value).partition("?")[0]  # neither passwords nor keys
            raise ConfigError(f"{name}: {shown!r} is not an address such as http://collector:4318")

    for name in _HEADERS:
        for place, header in enumerate(environ.get(name, "").split(","), 1):
            if header.strip() and not (_HEADER.fullmatch(header) and unquote(header.strip()).isprintable()):
                raise ConfigError(
                    f"{name}: header {place} is not written as name=value, with all but plain characters of the value "
                    "as %XX (a quotation mark is %22, a semicolon %3B)"
                )


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _has_exemplars(environ: Mapping[str, str]) -> bool:
    asked = environ.get("OTEL_METRICS_EXEMPLAR_FILTER", "").strip().lower() or "trace_based"
    if asked not in ("always_on", "always_off", "trace_based"):
        raise ConfigError(f"OTEL_METRICS_EXEMPLAR_FILTER: {asked!r} is not one of always_on, always_off, trace_based")
    return asked != "always_off"

"""Where `OTEL_*` say that spans go: by which exporter, over which protocol, to which address. Needs no SDK.

What sends them there is `exporter.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from smetric.errors import ConfigError

#: The variables that name an OTLP endpoint; the first one set counts.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
#: A header as the SDK reads it. It logs others whole, secrets and all, and goes on without them.
_HEADER = re.compile(r"""\s*[-!#$%&'*+.^_`|~0-9A-Za-z]+\s*=[^"\\;\x00-\x1f\x7f-\U0010ffff]*""")
_USER = re.compile(r"//[^/]*@")


def exporter_kind(environ: Mapping[str, str]) -> str:
    """`otlp`, `console`, or empty for off."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    asked = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if asked in ("otlp", "console"):
        return asked
    if asked == "none":
        return ""
    if asked:
        raise ConfigError(f"OTEL_TRACES_EXPORTER: {asked!r} is not one of otlp, console, none")
    return "otlp" if any(environ.get(name, "").strip() for name in ENDPOINTS) else ""


def address(environ: Mapping[str, str]) -> str:
    """Host and port of the endpoint configured; its path and credentials stay out of the log."""
    named = (environ.get(name, "").strip() for name in ENDPOINTS)
    default = "localhost:4317" if protocol_of(environ) == "grpc" else "localhost:4318"
    at = next(filter(None, named), default)
    return urlsplit(at if "//" in at else f"//{at}").netloc.rpartition("@")[2]


def endpoint(environ: Mapping[str, str]) -> str | None:
    """Where traces go over HTTP; None for the SDK's default."""
    traces, base = (environ.get(name, "").strip() for name in ENDPOINTS)
    return traces or (f"{base.rstrip('/')}/v1/traces" if base else None)


def protocol_of(environ: Mapping[str, str]) -> str:
    """The OTLP protocol asked for."""
    return (
        environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "").strip()
        or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip()
        or "http/protobuf"
    )


def check(environ: Mapping[str, str]) -> None:
    """Refuse endpoints and headers that the SDK would choke on, or leave out in silence.

    Raises:
        ConfigError: one cannot be used.
    """
    _check_endpoint(environ)
    _check_headers(environ)


def _check_endpoint(environ: Mapping[str, str]) -> None:
    for name in ENDPOINTS:
        value = environ.get(name, "").strip()
        # gRPC endpoints may be written without a scheme.
        if value and protocol_of(environ) != "grpc" and not _is_address(value):
            shown = _USER.sub("//…@", value).partition("?")[0]  # neither passwords nor keys
            raise ConfigError(f"{name}: {shown!r} is not an address such as http://collector:4318")


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _check_headers(environ: Mapping[str, str]) -> None:
    for name in _HEADERS:
        for place, header in enumerate(environ.get(name, "").split(","), 1):
            if header.strip() and not (_HEADER.fullmatch(header) and unquote(header.strip()).isprintable()):
                raise ConfigError(
                    f"{name}: header {place} is not written as name=value, with all but plain characters of the value "
                    "as %XX (a quotation mark is %22, a semicolon %3B)"
                )

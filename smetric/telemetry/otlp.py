"""Spans as OTLP's protobuf, written straight into bytes: the SDK builds an object for each attribute, at a high price.

Field numbers are those of opentelemetry-proto 1.x (`trace/v1/trace.proto`, `common/v1/common.proto`), which are stable.
What sends the bytes is the SDK's exporter (`exporter.py`); a test compares them with what the SDK would have sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext, StatusCode

_double = struct.Struct("<d").pack
_fixed64 = struct.Struct("<Q").pack
_fixed32 = struct.Struct("<I").pack
#: Keys of attributes that are remembered in their encoded form.
_MOST_KEYS = 1024
_IS_REMOTE_KNOWN, _IS_REMOTE = 0x100, 0x200


def _long_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_VARINTS = [_long_varint(value) for value in range(2304)]
_keys: dict[str, bytes] = {}


def _varint(value: int) -> bytes:
    return _VARINTS[value] if value < 2304 else _long_varint(value)


def _field(tag: bytes, body: bytes) -> bytes:
    """A field that holds bytes; *tag* is its number and type."""
    return tag + _varint(len(body)) + body


class Encoded:
    """An export request, as the SDK's exporter wants it.

    Args:
        spans: one at least; all of one process and of one scope, as `open_span.py` makes them.
    """

    def __init__(self, spans: Sequence[ReadableSpan]) -> None:
        resource, scope = spans[0].resource, spans[0].instrumentation_scope
        assert scope is not None
        about = _field(b"\x0a", scope.name.encode()) + _field(b"\x12", (scope.version or "").encode())
        made = b"".join([_field(b"\x12", _span(span)) for span in spans])
        of_scope = _field(b"\x12", _field(b"\x0a", about) + made)
        self._bytes = _field(b"\x0a", _field(b"\x0a", _attributes(b"\x0a", resource.attributes)) + of_scope)

    def SerializeToString(self) -> bytes:  # noqa: N802
        """The bytes."""
        return self._bytes

    SerializePartialToString = SerializeToString


def _span(span: ReadableSpan) -> bytes:
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    parts = [b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big")]
    if context.trace_state:
        parts.append(_field(b"\x1a", context.trace_state.to_header().encode()))
    if parent is not None:
        parts += (b"\x22\x08", parent.span_id.to_bytes(8, "big"))
    parts.append(_field(b"\x2a", span.name.encode(errors="replace")))
    # The API's kinds begin at 0 with INTERNAL, OTLP's at 1.
    parts += (b"\x30", _varint(span.kind.value + 1))
    parts += (b"\x39", _fixed64(span.start_time or 0), b"\x41", _fixed64(span.end_time or 0))
    parts.append(_attributes(b"\x4a", span.attributes or {}))
    if span.dropped_attributes:
        parts += (b"\x50", _varint(span.dropped_attributes))
    parts += [_field(b"\x6a", _link(link)) for link in span.links]
    code = span.status.status_code
    parts.append(b"\x7a\x00" if code is StatusCode.UNSET else b"\x7a\x02\x18" + _varint(code.value))
    parts += (b"\x85\x01", _fixed32(_flags(parent)))
    return b"".join(parts)


def _link(link: Link) -> bytes:
    context = link.context
    head = b"\x0a\x10" + context.trace_id.to_bytes(16, "big") + b"\x12\x08" + context.span_id.to_bytes(8, "big")
    return head + _attributes(b"\x22", link.attributes or {}) + b"\x35" + _fixed32(_flags(context))


def _flags(parent: SpanContext | None) -> int:
    return _IS_REMOTE_KNOWN | _IS_REMOTE if parent is not None and parent.is_remote else _IS_REMOTE_KNOWN


def _attributes(tag: bytes, attributes: Mapping[str, Any]) -> bytes:
    """Each as a field of its own with *tag*."""
    parts: list[bytes] = []
    for name, value in attributes.items():
        key = _keys.get(name) or _key(name)
        body = _value(value)
        length = _varint(len(body))
        parts += (tag, _varint(len(key) + 1 + len(length) + len(body)), key, b"\x12", length, body)
    return b"".join(parts)


def _key(name: str) -> bytes:
    key = _field(b"\x0a", name.encode(errors="replace"))
    if len(_keys) < _MOST_KEYS:
        _keys[name] = key
    return key


def _value(value: Any) -> bytes:
    """An `AnyValue`."""
    kind = type(value)
    if kind is str:
        text = value.encode(errors="replace")
        return b"\x0a" + _varint(len(text)) + text  # type: ignore[no-any-return]
    if kind is bool:
        return b"\x10\x01" if value else b"\x10\x00"
    if kind is int:
        return b"\x18" + (_VARINTS[value] if 0 <= value < 2304 else _long_varint(value & 0xFFFF_FFFF_FFFF_FFFF))
    if kind is float:
        return b"\x21" + _double(value)
    if isinstance(value, Iterable):
        return _field(b"\x2a", b"".join(_field(b"\x0a", _value(each)) for each in value))
    return _value(str(value))

"""Trace context on the wire: what arrived in `traceparent`, `tracestate` and `baggage`, and what goes upstream.

W3C Trace Context level 2, read strictly; no spans here. Peers that are not trusted can neither join our traces nor
force sampling: what they send is kept for a link and never passed on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

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

"""Which header fields pass, in either direction: end-to-end ones, as they came, in order, duplicates kept."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from smetric.errors import HttpError

Headers = list[tuple[bytes, bytes]]

#: RFC 9110 §7.6.1, and what belongs to one connection in practice.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"expect",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
#: Set anew for the upstream request; trace context goes upstream as ours.
OURS = frozenset({b"host", b"content-length", b"traceparent", b"tracestate", b"baggage"})
NOT_FORWARDED = HOP_BY_HOP | OURS
#: What gateways and this router tell each other. From a client it is a forgery, with underscores too, which some take
#: for dashes; so is the router's own part of it from an instance. Found among names, each on a line.
_FORGED_BY_CLIENT = re.compile(rb"^x[-_](?:smetric[-_]|gateway[-_]destination[-_]endpoint)", re.MULTILINE)
_FORGED_BY_INSTANCE = re.compile(rb"^x-smetric-", re.MULTILINE)
#: The routers that a request has passed, so that it does not go round in circles; most of them in a row.
VIA = b"x-smetric-via"
MOST_ROUTERS = 8


def request_headers(received: Headers, router: bytes) -> Headers:
    """The client's header fields that go to the instance; names are lower-case as ASGI gives them.

    Fields that only the router may set are dropped. One is added: the routers passed, the one called *router* last.

    Raises:
        HttpError: 508, the request has been here before, or has passed too many routers.
    """
    names = dict(received)
    passed = _end_to_end(received, names, NOT_FORWARDED, _FORGED_BY_CLIENT)
    if VIA not in names:
        passed.append((VIA, router))
        return passed
    passed_by = b",".join(value for name, value in received if name == VIA).replace(b" ", b"").split(b",")
    if router in passed_by or len(passed_by) >= MOST_ROUTERS:
        raise HttpError(
            508,
            "the request goes round in circles: an instance leads back to a router; take it out of `instances`",
            "loop_detected",
        )
    passed.append((VIA, b", ".join([*passed_by, router])))
    return passed


def with_key(headers: Headers, key: str) -> Headers:
    """*headers* with the instance's own *key* in place of what the client showed."""
    kept = [field for field in headers if field[0] not in (b"authorization", b"x-api-key")]
    return [*kept, (b"authorization", b"Bearer " + key.encode())]


def response_headers(received: Headers) -> Headers:
    """The instance's header fields that go to the client; names are lower-case."""
    return _end_to_end(received, dict(received), HOP_BY_HOP, _FORGED_BY_INSTANCE)


def _end_to_end(
    received: Headers, names: Mapping[bytes, bytes], dropped: frozenset[bytes], forged: re.Pattern[bytes]
) -> Headers:
    """*received* without the fields *dropped*, those that a Connection field names, and those *forged*."""
    if b"connection" in names:
        dropped = dropped.union(*(_named(value) for name, value in received if name == b"connection"))
    if forged.search(b"\n".join(names)) is not None:
        dropped = dropped.union(name for name in names if forged.match(name))
    return [field for field in received if field[0] not in dropped]


def first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of *name* (lower-case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def _named(connection: bytes) -> Collection[bytes]:
    """Fields that a Connection header names; keep-alive and close, by far the commonest, name none."""
    value = connection.lower()
    return () if value in (b"keep-alive", b"close") else {token.strip() for token in value.split(b",")}

"""Header fields that pass, in either direction, and the types of ASGI.

End-to-end fields pass as they came: in order, duplicates kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any

from smetric.errors import HttpError

Headers = list[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Fields of one connection: RFC 9110 §7.6.1, and others in practice.
HOP_BY_HOP = frozenset(
    b"connection expect http2-settings keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
#: Fields that the router sets itself in the upstream request; the trace context is its own.
OURS = frozenset({b"host", b"content-length", b"traceparent", b"tracestate", b"baggage"})
NOT_FORWARDED = HOP_BY_HOP | OURS
#: Fields that a Connection header may not name, and their beginnings: an instance must see what a gateway has set, and
#: what the client itself relies on. A client could have it stripped otherwise (CVE-2022-31813).
_END_TO_END = frozenset(
    b"api-key authorization baggage cache-control cookie date forwarded host idempotency-key origin session-id "
    b"traceparent tracestate user-agent via x-api-key x-client-ip x-correlation-id x-real-ip x-request-id x-session-id "
    b"x-session-turn x-tenant-id x-user-id".split()
)
_END_TO_END_STARTS = tuple(
    b"accept access-control- anthropic- content- openai- sec- x-claude- x-dynamo- x-envoy- x-forwarded- x-gateway- "
    b"x-smetric- x-stainless- x-vllm-".split()
)
#: Fields between gateways and this router; from a client they are forged.
RESERVED = (b"x-smetric-", b"x-gateway-destination-endpoint")
#: The field that lists the routers a request has passed, and the limit on their number: a loop is detected.
VIA = b"x-smetric-via"
MOST_ROUTERS = 8
#: Limit on the digits of a Content-Length: parsers skip leading zeros, and Python refuses thousands of digits.
MOST_DIGITS = 20


def request_headers(received: Iterable[tuple[bytes, bytes]], router: bytes) -> Headers:
    """Return the client's header fields that go to the instance, with the routers passed, *router* last.

    Names are lower-case, as ASGI has them. Fields that only the router may set are dropped: `x-smetric-…`, also with
    underscores, which some servers read as dashes.

    Raises:
        HttpError: 508, the request has passed this router before, or too many routers.
    """
    passed: Headers = []
    passed_by: list[bytes] = []
    named: Collection[bytes] = ()
    for field in received:
        name, value = field
        if name in NOT_FORWARDED:
            if name == b"connection":
                named = {*named, *named_fields(value)}
        elif name >= b"x" and name.replace(b"_", b"-").startswith(RESERVED):
            if name == VIA:
                passed_by += filter(None, value.replace(b" ", b"").split(b","))
        else:
            passed.append(field)
    if passed_by and (router in passed_by or len(passed_by) >= MOST_ROUTERS):
        raise HttpError(
            508,
            "the request goes round in circles: an instance leads back to a router; take it out of `instances`",
            "loop_detected",
        )
    if named:
        passed = [field for field in passed if field[0] not in named]
    passed.append((VIA, b", ".join([*passed_by, router]) if passed_by else router))
    return passed


def with_key(headers: Headers, key: str) -> Headers:
    """Return *headers* with the instance's *key* in place of the client's credentials."""
    kept = [field for field in headers if field[0] not in (b"authorization", b"x-api-key")]
    return [*kept, (b"authorization", b"Bearer " + key.encode())]


def response_headers(received: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the instance's header fields that go to the client; names are lower-cased, values and order kept."""
    passed: Headers = []
    named: Collection[bytes] = ()
    for given, value in received:
        name = given.lower()
        if name in HOP_BY_HOP:
            if name == b"connection":
                named = {*named, *named_fields(value)}
        elif name < b"x" or not name.startswith(b"x-smetric-"):
            passed.append((name, value))
    return [field for field in passed if field[0] not in named] if named else passed


def first(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """Return the first value of *name*, in lower case, or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def named_fields(connection: bytes) -> Collection[bytes]:
    """Return the fields that a Connection header names, in lower case, without empty elements (RFC 9110 §5.6.1)."""
    value = connection.lower()
    return () if value in (b"keep-alive", b"close") else {token.strip() for token in value.split(b",")} - {b""}


def is_end_to_end(name: bytes) -> bool:
    """Return whether a Connection header may not name the field *name*; some servers read underscores as dashes."""
    name = name.replace(b"_", b"-")
    return name in _END_TO_END or name.startswith(_END_TO_END_STARTS)


def retry_fields(error: HttpError) -> list[tuple[bytes, bytes]]:
    """Return the header fields that say when to retry, if *error* does.

    The clients of OpenAI and Anthropic read the milliseconds. Whole seconds would bring many of them back at once.
    """
    if error.retry_after_s is None:
        return []
    seconds = max(0.0, error.retry_after_s)  # a policy may compute it: `retry 2s - req.held`
    return [(b"retry-after", b"%d" % max(1, round(seconds))), (b"retry-after-ms", b"%d" % round(1000 * seconds))]

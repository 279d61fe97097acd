"""Every error SMetric raises on purpose, and the HTTP status or exit code it stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec

# Moved.


def closest(word: str, words: Iterable[str]) -> str:
    """The one of *words* that *word* was probably meant to be, or nothing."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return close[0] if close else ""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """`; did you mean …?` when one of *words* is close to *word*, else nothing."""
    close = closest(word, words)
    return f"; did you mean {close}?" if close else ""


# Every error SMetric raises on purpose, and the HTTP status or exit code it stands for.
#
# SmetricError
# ├─ ConfigError           start-up: exit 2, one line, no traceback
# ├─ PolicyError           check or start-up: exit 1, caret and help; on reload the old policy stays
# ├─ RequestError          400, 413, …   in the API's own error shape
# ├─ NoCandidate           404 / 503   nobody serves the model, or a filter left nobody
# ├─ Shed                  429   a reject rule, with Retry-After
# ├─ Overloaded            429 / 503   more than the instances, or the router itself, can take; with Retry-After
# └─ UpstreamError         502 / 504   after retries
#
# `PolicyError` itself lives in `smetric.policy.diagnostic`, which imports nothing of smetric; it is not a subclass
# here.


class SmetricError(Exception):
    """Anything SMetric raises on purpose."""


class ConfigError(SmetricError):
    """The configuration cannot be used: names the place, the value, the rule and the way out, in one line.

    Args:
        message: what is not printable in it, such as a line break in a value, is shown as an escape.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__("".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in message))


class HttpError(SmetricError):
    """An error that is answered to a client.

    Args:
        status: HTTP status.
        message: what is wrong and what to do; never text from a prompt or an upstream.
        kind: the machine-readable type in the error body.
        retry_after_s: seconds for Retry-After, if any.
        param: the field of the request that is at fault, if one is.
    """

    def __init__(
        self, status: int, message: str, kind: str, *, retry_after_s: float | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.param = param


class RequestError(HttpError):
    """The client's request cannot be served as sent."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "invalid_request_error", param: str | None = None
    ):
        super().__init__(status, message, kind, param=param)


class NoCandidate(HttpError):
    """No instance can serve this: an unknown model (404), or nobody left (503)."""

    def __init__(
        self, message: str, *, status: int = 503, kind: str = "service_unavailable", retry_after_s: float | None = 1.0
    ):
        super().__init__(status, message, kind, retry_after_s=retry_after_s if status == 503 else None)


class Shed(HttpError):
    """A `reject` rule of the policy fired."""

    def __init__(self, status: int, message: str, retry_after_s: float | None):
        super().__init__(
            status, message, "rate_limit_exceeded" if status == 429 else "rejected", retry_after_s=retry_after_s
        )


class Overloaded(HttpError):
    """More than can be taken now: refused before anything is read of the body, or after too long a wait.

    `reason` is one of a closed list for metrics: in_flight, queue, bytes, lag, memory, files. The first two are
    answered 429, for the instances have no room; the others 503, for the router itself has none.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: float):
        status = 429 if reason in ("in_flight", "queue") else 503
        kind = "rate_limit_exceeded" if status == 429 else "overloaded"
        super().__init__(status, message, kind, retry_after_s=retry_after_s)
        self.reason = reason


class UpstreamError(HttpError):
    """The chosen instances failed before a response could be passed on.

    `reason` is one of a closed list for metrics: connect_error, connect_timeout, exhausted, timeout, closed, protocol.
    A 503 says that waiting may help, and how long.
    """

    def __init__(self, message: str, *, reason: str, status: int = 502):
        super().__init__(status, message, "upstream_error", retry_after_s=1.0 if status == 503 else None)
        self.reason = reason


# What msgspec raises for bytes that are not what is looked for. What that means is for whoever decodes them to say.

#: Of another form; no UTF-8; nested more deeply than the stack has room for, which any JSON from outside may be.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

"""Errors that SMetric raises on purpose, with the HTTP status or exit code of each.

SmetricError
├─ ConfigError           start-up: exit 2, one line, no traceback
└─ HttpError             answered in the API's own error shape
   ├─ RequestError       400, 413, …
   ├─ NoCandidate        404 / 503   no instance serves the model, or a filter left none
   ├─ Shed               429         a reject rule, with Retry-After
   ├─ Overloaded         429 / 503   more than the instances, or the router itself, can take; with Retry-After
   └─ UpstreamError      502 / 504   after retries

`PolicyError` (check or start-up: exit 1, caret and help; on reload the old policy stays) is in
`smetric.policy.diagnostic`, which imports nothing of smetric, and is not a subclass.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec

#: Raised by msgspec for bytes of another form, invalid UTF-8, or nesting beyond the stack, which any JSON may have.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


#: Longest name of a model that an error repeats, characters.
MAX_SHOWN = 200


def closest(word: str, words: Iterable[str]) -> str:
    """Return the one of *words* that *word* probably means, or an empty text."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return close[0] if close else ""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return `; did you mean …?` if one of *words* is close to *word*, else an empty text."""
    close = closest(word, words)
    return f"; did you mean {close}?" if close else ""


class SmetricError(Exception):
    """Base of the errors that SMetric raises on purpose."""


class ConfigError(SmetricError):
    """The configuration cannot be used: place, value, rule and way out, in one line for each error.

    Args:
        message: unprintable characters in it, such as a line break in a value, are shown as escapes.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__("".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in message))
        #: Further errors of the same configuration.
        self.further: list[ConfigError] = []

    def all(self) -> list[ConfigError]:
        """Return this error and the further ones, in the order of the configuration."""
        return [self, *self.further]


class ConfigErrors:
    """Collection of errors, so that a reader goes on behind the first one.

    Each `with errors:` keeps the `ConfigError` that its block raises; `raise_any` raises the first with the others.
    """

    def __init__(self) -> None:
        self._found: list[ConfigError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._found += error.all()
        return True

    def raise_any(self) -> None:
        """Raise the first error that was kept, if there is one."""
        if self._found:
            first, *others = self._found
            first.further = others
            raise first


class HttpError(SmetricError):
    """An error that is answered to a client.

    Args:
        status: HTTP status.
        message: what is wrong and what to do; never text of a prompt or an upstream.
        kind: machine-readable type in the error body.
        retry_after_s: seconds for Retry-After, if any.
        param: the request field at fault, if any.
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
    """The request cannot be served as sent."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "invalid_request_error", param: str | None = None
    ):
        super().__init__(status, message, kind, param=param)


class NoCandidate(HttpError):
    """No instance can serve the request: an unknown model (404), or no candidate left (503)."""

    def __init__(
        self, message: str, *, status: int = 503, kind: str = "service_unavailable", retry_after_s: float | None = 1.0
    ):
        super().__init__(status, message, kind, retry_after_s=retry_after_s if status == 503 else None)


def unknown_model(name: str) -> NoCandidate:
    """Return the error of a model that no instance serves, in the words of engines."""
    message = f"the model `{name[:MAX_SHOWN]}` does not exist here; GET /v1/models lists the models that do"
    return NoCandidate(message, status=404, kind="model_not_found")


class Shed(HttpError):
    """A `reject` rule of the policy fired."""

    def __init__(self, status: int, message: str, retry_after_s: float | None):
        super().__init__(
            status, message, "rate_limit_exceeded" if status == 429 else "rejected", retry_after_s=retry_after_s
        )


class Overloaded(HttpError):
    """Overload: refused before the body is read, or after too long a wait.

    Args:
        message: as of `HttpError`.
        reason: one of in_flight, queue (429: the instances have no room), bytes, lag, memory, files (503: the router
            has none).
        retry_after_s: seconds for Retry-After.
    """

    def __init__(self, message: str, *, reason: str, retry_after_s: float):
        status = 429 if reason in ("in_flight", "queue") else 503
        kind = "rate_limit_exceeded" if status == 429 else "overloaded"
        super().__init__(status, message, kind, retry_after_s=retry_after_s)
        self.reason = reason


class UpstreamError(HttpError):
    """The chosen instances failed before a response could be passed on.

    Args:
        message: as of `HttpError`.
        reason: one of connect_error, connect_timeout, exhausted, timeout, closed, protocol.
        status: 502, 504, or 503 if waiting may help.
    """

    def __init__(self, message: str, *, reason: str, status: int = 502):
        super().__init__(status, message, "upstream_error", retry_after_s=1.0 if status == 503 else None)
        self.reason = reason

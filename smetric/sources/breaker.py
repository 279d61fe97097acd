"""A circuit breaker: after some failures in a row a service is left alone for a while, then tried with one request.

What counts as a failure is the caller's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Breaker:
    """Says whether a service may be asked, from how it answered before.

    Closed, it lets everything through. *failures* in a row open it for *open_s* seconds; then it lets one request
    through at a time, until one succeeds (closed) or fails (open again).

    Args:
        failures: in a row, that open it; at least 1.
        open_s: seconds it stays open.
        clock: monotonic seconds.
    """

    def __init__(self, failures: int, open_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the service counts as failing; a single request may be let through nevertheless."""
        return self._opened_at is not None

    def allows(self) -> bool:
        """Whether a request may be sent now. Whoever is told so reports its end to exactly one of the methods below."""
        if self._opened_at is None:
            return True
        if self._probing or self._clock() < self._opened_at + self._open_s:
            return False
        self._probing = True
        return True

    def succeeded(self) -> None:
        """A request was answered well."""
        self._failures = 0
        self._opened_at = None
        self._probing = False

    def failed(self) -> None:
        """A request was not answered, too late, or with nonsense."""
        self._failures += 1
        # What was under way when it opened fails late; that must not hold the next try back for ever.
        if self._probing or (self._opened_at is None and self._failures >= self._most):
            self._opened_at = self._clock()
        self._probing = False

    def abandoned(self) -> None:
        """A request ended for reasons that say nothing of the service."""
        self._probing = False

"""Exchange: one request from its arrival to the end of its answer, and the listeners that record it.

The proxy reports what happens, in this order:

    exchange = exchanges.begin(scope, "/v1/chat/completions", trusted=True)
    exchange.decided(record)                                after each decision, a refusal included
    attempt = exchange.attempt("/v1/chat/completions")      before sending; `attempt.headers` go along
    attempt.first_output()
    exchange.answering()
    attempt.end("ok", status=200)
    exchange.end(200, bytes_out=5120, usage=Usage(...))     once, whatever happened

Each of these calls is synchronous and never raises because of a listener.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVarTuple

import structlog
from msgspec import Struct, field

from smetric.errors import HttpError
from smetric.fleet.record import DecisionRecord
from smetric.log_limit import LogLimit

if TYPE_CHECKING:
    from smetric.request.request import Usage

Ts = TypeVarTuple("Ts")
Headers = list[tuple[bytes, bytes]]
_NAME = itemgetter(0)

log = structlog.get_logger("smetric.exchange")


class Listener:
    """Protocol of a listener to exchanges; each method does nothing unless a listener overrides it.

    Methods run on the event loop, in the tick of what they report, and must not block. An exception costs the
    listener its own record of the event: the request and the other listeners go on.
    """

    def arrived(self, exchange: Exchange) -> None:
        """A request has arrived."""

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        """A decision was made. `exchange.previous` is the decision before it, whose attempt has failed."""

    def sent(self, exchange: Exchange, attempt: Attempt) -> None:
        """An attempt is about to be sent; a listener may add to `attempt.headers`."""

    def answering(self, exchange: Exchange, record: DecisionRecord) -> None:
        """The first output has arrived; called once, and only if the answer is no error."""

    def attempt_ended(self, exchange: Exchange, attempt: Attempt) -> None:
        """An attempt has ended."""

    def ended(self, exchange: Exchange) -> None:
        """The answer has ended, or the request was refused. The prompt is released after all listeners have run."""

    def unreadable(self, problem: HttpError, scope: Mapping[str, Any], is_seen: bool) -> None:
        """A request was refused for its head, or for how its body was sent.

        Args:
            problem: the refusal.
            scope: ASGI scope that names the client.
            is_seen: the request has an exchange, which ends with this refusal.
        """


class Exchanges:
    """The listeners of a router.

    Args:
        listeners: called in this order; a listener may read what an earlier one has noted in the record.
        model_label: maps a model name to a bounded set of labels.
        on_failure: counts a failure of the listener with this class name.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        *,
        model_label: Callable[[str], str] = lambda model: model,
        on_failure: Callable[[str], None] = lambda listener: None,
    ) -> None:
        def overridden(event: str) -> Sequence[Listener]:
            return [one for one in listeners if getattr(type(one), event) is not getattr(Listener, event)]

        self.model_label = model_label
        self.arrived = tuple(one.arrived for one in overridden("arrived"))
        self.decided = tuple(one.decided for one in overridden("decided"))
        self.sent = tuple(one.sent for one in overridden("sent"))
        self.answering = tuple(one.answering for one in overridden("answering"))
        self.attempt_ended = tuple(one.attempt_ended for one in overridden("attempt_ended"))
        self.ended = tuple(one.ended for one in overridden("ended"))
        self._unreadable = tuple(one.unreadable for one in overridden("unreadable"))
        self._on_failure = on_failure
        self._limit = LogLimit()

    def begin(self, scope: Mapping[str, Any], route: str, *, trusted: bool, is_routed: bool = True) -> Exchange:
        """Begin the exchange of a request that has arrived.

        Args:
            scope: the ASGI scope.
            route: the matched route template, from a bounded set.
            trusted: the peer may continue its trace here.
            is_routed: an instance is to answer the request; otherwise the router itself does, and there is no trace.
        """
        exchange = Exchange(self, scope, route, trusted, is_routed)
        self.notify(self.arrived, exchange)
        return exchange

    def unreadable(self, problem: HttpError, scope: Mapping[str, Any], is_seen: bool) -> None:
        """Report a refused request; arguments as of `Listener.unreadable`."""
        self.notify(self._unreadable, problem, scope, is_seen)

    def notify(self, listeners: Sequence[Callable[[*Ts], None]], *about: *Ts) -> None:
        """Call *listeners*; count what they raise, and log it once a minute for each of them."""
        for listener in listeners:
            try:
                listener(*about)
            except Exception:
                name = type(getattr(listener, "__self__", listener)).__name__
                self._on_failure(name)
                if (kept_back := self._limit.passes(name)) is not None:
                    with suppress(Exception):  # the log itself may be what fails
                        log.exception("smetric.listener.failed", listener=name, kept_back=kept_back)


class Attempt(Struct, eq=False):
    """Attempt to have one instance answer a request.

    Args:
        exchange: the request.
        record: the decision for the instance.
        path: of the request to the instance.
        number: 1 for the first attempt of a request.

    The fields from `started` on are noted by itself and by listeners.
    """

    exchange: Exchange
    record: DecisionRecord
    path: str
    number: int
    #: Start, monotonic seconds.
    started: float = field(default_factory=time.perf_counter)
    #: Trace headers to send.
    headers: Headers = []
    #: Number of times that the request was sent again to the same instance, on a new connection.
    resends: int = 0
    #: One of `names.RESULTS`, and the instance's status; empty and None until the attempt has ended.
    result: str = ""
    status: int | None = None
    usage: Usage | None = None
    finish_reason: str = ""
    #: End, seconds after the arrival of the request.
    ended_s: float = 0.0
    #: Ids of the attempt's span; None unless it is recorded.
    span: Any = None

    __repr__ = object.__repr__  # it holds a body

    def replacing(self, headers: Headers) -> Headers:
        """Return the client's *headers* with the trace headers in place of those of the same names."""
        names = frozenset(map(_NAME, self.headers))
        if not names.isdisjoint(map(_NAME, headers)):
            headers = [header for header in headers if header[0] not in names]
        return headers + self.headers

    def first_output(self) -> float:
        """Note the first output of the answer; return the seconds since the attempt began."""
        now = time.perf_counter()
        self.exchange.ttft_s = now - self.exchange.started
        self.record.ttfc_s = ttfc_s = now - self.started
        return ttfc_s

    def resent(self) -> None:
        """Note that the request was sent again to the same instance."""
        self.resends += 1

    def end(
        self, result: str, *, status: int | None = None, usage: Usage | None = None, finish_reason: str = ""
    ) -> None:
        """End the attempt; only the first call counts.

        Args:
            result: one of `names.RESULTS`.
            status: the instance's status, None without an answer.
            usage: tokens as the instance counted them.
            finish_reason: why the instance ended its answer.
        """
        if self.result:
            return
        exchange = self.exchange
        self.result, self.status, self.usage, self.finish_reason = result, status, usage, finish_reason
        self.ended_s = exchange.elapsed_s()
        exchange.listeners.notify(exchange.listeners.attempt_ended, exchange, self)


class Exchange(Struct, eq=False):
    """One request and its answer; the module docstring has the order of calls.

    Args:
        listeners: get its events.
        scope: ASGI scope.
        route: the matched route template.
        trusted: the peer may continue its trace here.
        is_routed: an instance is to answer the request.

    The fields from `arrival_ns` on are noted by itself and by listeners.
    """

    listeners: Exchanges
    scope: Mapping[str, Any]
    route: str
    trusted: bool
    is_routed: bool = True
    #: Arrival, Unix nanoseconds and monotonic seconds.
    arrival_ns: int = field(default_factory=time.time_ns)
    started: float = field(default_factory=time.perf_counter)
    #: The last decision, and the one before it.
    record: DecisionRecord | None = None
    previous: DecisionRecord | None = None
    #: Bounded label of the model that was decided for.
    model: str = ""
    attempts: list[Attempt] = []
    #: Why no other instance was tried: one of `names.NOT_RETRIED`, else empty.
    gave_up: str = ""
    #: Seconds from arrival to the first output of the answer.
    ttft_s: float | None = None
    #: 32 hex digits, empty without a trace.
    trace_id: str = ""
    #: Labels that lead from a metric to the recorded trace.
    exemplar: dict[str, str] | None = None
    #: Belongs to the listener that traces.
    trace: Any = None
    # The end; see `end`.
    _ended: bool = False
    status: int = 0
    duration_s: float = 0.0
    bytes_out: int = 0
    usage: Usage | None = None
    error_type: str = ""
    #: The client got an error of ours or of the instance, or an answer that broke off.
    failed: bool = False
    #: Mean seconds between two events of the stream; None with less than two events.
    gap_s: float | None = None

    __repr__ = object.__repr__  # it holds headers and a body

    def elapsed_s(self) -> float:
        """Return the seconds since arrival."""
        return time.perf_counter() - self.started

    def decided(self, record: DecisionRecord) -> None:
        """Report a decision, in the tick in which it was made."""
        previous = self.previous = self.record
        self.record = record
        record.trace_id = self.trace_id
        if previous is not None:
            record.rank = previous.rank + 1
            previous.followed_by = record.id
        listeners = self.listeners
        self.model = listeners.model_label(record.request.model)
        listeners.notify(listeners.decided, self, record)

    def attempt(self, path: str) -> Attempt:
        """Begin an attempt: the request is about to be sent to the chosen instance, to *path*."""
        assert self.record is not None
        attempt = Attempt(self, self.record, path, len(self.attempts) + 1)
        self.attempts.append(attempt)
        self.listeners.notify(self.listeners.sent, self, attempt)
        return attempt

    def give_up(self, reason: str) -> None:
        """Note that no other instance is tried after a failed attempt; *reason* is one of `names.NOT_RETRIED`."""
        self.gave_up = reason

    def answering(self) -> None:
        """Report the first output of an answer that is no error."""
        if self.record is not None:
            self.listeners.notify(self.listeners.answering, self, self.record)

    def end(
        self, status: int, *, bytes_out: int = 0, events: int = 0, usage: Usage | None = None, error_type: str = ""
    ) -> None:
        """End the exchange; only the first call counts.

        Args:
            status: the status sent to the client; 499 if the client left or stopped reading before the end.
            bytes_out: bytes of the body sent to it.
            events: events of the stream sent to it.
            usage: tokens as the instance counted them.
            error_type: what went wrong, from a closed list; empty for nothing.
        """
        if self._ended:
            return
        self._ended = True
        self.status, self.bytes_out, self.usage, self.error_type = status, bytes_out, usage, error_type
        self.failed = status >= 500 or bool(error_type and status < 400)
        self.duration_s = self.elapsed_s()
        if events > 1 and self.ttft_s is not None:
            self.gap_s = (self.duration_s - self.ttft_s) / (events - 1)
        record = self.record
        if record is not None:
            record.status, record.duration_s = status, self.duration_s
            if record.is_inference:
                record.ttft_s = self.ttft_s
            record.usage, record.error_type = usage, error_type
        self.listeners.notify(self.listeners.ended, self)
        self.attempts.clear()  # they refer to this exchange: a cycle would keep both until a garbage collection
        if record is not None:
            # The record outlives the request in the decision log, and must not keep its body alive.
            record.request.let_go()

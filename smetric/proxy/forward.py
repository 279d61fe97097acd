"""Forwarding of one request to at most two instances.

The bytes pass untouched in both directions. The router decides on the instance; `delivery.py` passes its answer on. A
second instance is tried only before the client has seen a byte.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field

from smetric import names
from smetric.errors import HttpError, Overloaded, UpstreamError
from smetric.fleet.exchange import Attempt, Exchange
from smetric.fleet.health import AttemptLog
from smetric.fleet.instance import Instance, Lease
from smetric.fleet.record import DecisionRecord
from smetric.http.answer import AnswerBroken, InstanceUnreachable, UpstreamFailed, UpstreamResponse
from smetric.http.headers import Headers, Scope, request_headers, response_headers
from smetric.proxy.admission import Permit
from smetric.proxy.context import ProxyContext
from smetric.proxy.delivery import Delivery
from smetric.proxy.error_response import send_error
from smetric.proxy.intake import Client
from smetric.request.request import InferenceRequest, Usage
from smetric.routing.router import Routing

#: Statuses of an instance that is overloaded, stopping or broken. Another instance may do better; so it may where a
#: model does not exist.
ELSEWHERE = frozenset({429, 500, 502, 503})
#: Message of an engine, or of a router, that does not serve the model of a request. It names the model first.
NO_SUCH_MODEL = re.compile(rb'"message": ?"[Tt]he model `[^`]{0,1000}` does not exist')
#: Largest body of such an answer that is held back while another instance is tried, bytes.
HELD_BYTES = 16 * 1024
#: Messages that an engine sends with 500 as soon as it stops. A client could have sent a part of one.
SHUTTING_DOWN = tuple(b'"message":%b"cannot schedule new futures after shutdown"' % gap for gap in (b"", b" "))
#: Results of an attempt on an instance that has died: the connection ended, or a new one failed.
_DIED = frozenset({names.CLOSED, names.CONNECT_ERROR, names.CONNECT_TIMEOUT})
#: Error texts for failed attempts, by reason.
_ERROR_TEXTS = {
    names.CONNECT_ERROR: "the instance chosen for this request could not be reached",
    names.CONNECT_TIMEOUT: "the instance chosen for this request could not be reached",
    names.CLOSED: "the instance chosen for this request ended the connection before it answered",
    names.PROTOCOL: "what the instance chosen for this request answered is not HTTP/1.1",
    names.EXHAUSTED: "the router has no connection left for this request; send it again",
}
#: Reasons that would apply on another instance too.
_EVERYWHERE = frozenset({names.PROTOCOL, names.EXHAUSTED})


@dataclass(frozen=True, slots=True)
class Failure:
    """Failed attempt of which the client has seen nothing: an error of the router, or an answer that is held back."""

    error: HttpError | None = None
    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    #: Another instance may be tried.
    elsewhere: bool = True


@dataclass(slots=True, eq=False)
class Forwarding:
    """Forwarding of a request: `run` sends it and streams the answer back.

    Args:
        context: shared context of all requests.
        scope: ASGI scope.
        client: gets the answer; its body has been read.
        exchange: telemetry of the request.
        request: the request as the router sees it.
        body: the bytes to send; None for no body.
        permit: its entry in admission.
        leased: it counts as load and the policy decides; otherwise any candidate does.
        headers: header fields that an instance gets.
        trial: reports its attempts to health checking.
        delivery: the answer that the client gets.
    """

    context: ProxyContext
    scope: Scope
    client: Client
    exchange: Exchange
    request: InferenceRequest
    body: bytes | None
    permit: Permit
    leased: bool
    headers: Headers = field(init=False)
    trial: AttemptLog = field(init=False)
    delivery: Delivery | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.request.path = self.scope["path"]
        self.headers = request_headers(self.scope["headers"], self.context.id)
        self.trial = AttemptLog(self.context.router.fleet.health)

    async def run(self) -> None:
        """Route, send, stream back; answer errors in the API's own shape."""
        self.context.retries.arrived()
        self.client.watch()
        self.client.watchdog.disarm()  # waits in admission have bounds of their own
        try:
            await self._attempts()
        except HttpError as error:
            # The frames of its traceback refer to it: together they would keep the body until garbage is collected.
            error.__traceback__ = None
            await self._fail(error)
        finally:
            self.context.retries.ended()
            if self.trial.failures:
                self.trial.close()

    async def _attempts(self) -> None:
        router, permit = self.context.router, self.permit
        failure: Failure | None = None
        tried: list[Instance] = []
        while True:
            try:
                routing = await permit.route(router, self.request, exclude=tried, leased=self.leased)
            except (asyncio.CancelledError, Overloaded) as error:
                if permit.held is not None:
                    self.exchange.decided(self._record(permit.held))
                if failure is None or not isinstance(error, Overloaded):
                    raise
                self._give_up(error.reason)
                break
            lease = routing.lease
            try:
                record = self._record(routing)
                self.exchange.decided(record)
                router.observe(routing, record)
                if lease is None:
                    assert routing.error is not None
                    if failure is None:
                        raise routing.error
                    if routing.outcome == names.REJECTED:
                        self._give_up(names.REJECTED)
                    break
                attempt = self.exchange.attempt(self.request.path)
                try:
                    failure = await self._attempt(lease, record, attempt)
                finally:
                    self.trial.ended(lease, attempt.result, attempt.status)
                    if attempt.result == names.ABORTED:
                        self.trial.gave_up(lease, attempt)
            finally:
                if lease is not None:
                    lease.release()
            if failure is None:
                return
            if tried or not failure.elsewhere or routing.outcome == names.PINNED:
                break
            if not self.context.retries.take(has_died=attempt.result in _DIED):
                self._give_up(names.BUDGET)
                break
            tried.append(lease.instance)
            self.client.watchdog.disarm()
        # Without a second instance the first one's own answer says more than an error of the router.
        await self._give(failure)

    def _give_up(self, reason: str) -> None:
        """Try no other instance, for *reason*, one of `names.NOT_RETRIED`."""
        self.exchange.give_up(reason)
        self.trial.untried()

    def _record(self, routing: Routing) -> DecisionRecord:
        """Return the record of the decision of *routing*."""
        generation, decision, lease, held = routing.generation, routing.decision, routing.lease, self.permit.held
        record = DecisionRecord(
            time_ns=time.time_ns(),
            outcome=routing.outcome if held is None or lease is None else names.HELD,
            request=self.request,
            policy=generation.policy,
            generation=generation.number,
            decision=decision,
            instance=lease.instance if lease is not None else None,
            evaluate_s=routing.evaluate_s,
            lookup_s=routing.lookup_s,
            held_s=self.permit.waited_s,
            route=routing.route.name,
            arm=routing.arm.name if decision is not None or routing.outcome == names.ERROR else "",
            policy_origin=generation.origin,
        )
        record.is_inference = self.leased
        record.is_in_one_piece = self.leased and not self.request.stream
        if held is not None:
            record.held_by = held.decision
        if routing.beside is not None:
            record.beside = ((routing.beside, None),)
        if decision is not None and (shadows := routing.route.shadows) is not None:
            record.judge = shadows.judge
        return record

    async def _attempt(self, lease: Lease, record: DecisionRecord, attempt: Attempt) -> Failure | None:
        """Send the request to the chosen instance and relay its answer; return None once the client has an answer."""
        scope, watchdog = self.scope, self.client.watchdog
        target: bytes = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        deadlines = self.context.deadlines
        seconds = deadlines.answer_s if record.is_in_one_piece else deadlines.first_byte_s
        watchdog.arm(seconds, "first_byte")
        answer: UpstreamResponse | None = None
        try:
            answer = await self.context.upstream.send(
                lease.instance,
                scope["method"],
                target,
                attempt.replacing(self.headers) if attempt.headers else self.headers,
                self.body,
                attempt.resent,
            )
            return await self._answer(lease, record, attempt, answer)
        except UpstreamFailed as failed:
            attempt.end(failed.reason)
            status = 503 if isinstance(failed, InstanceUnreachable) or failed.reason == names.EXHAUSTED else 502
            error = UpstreamError(_ERROR_TEXTS[failed.reason], reason=failed.reason, status=status)
            return Failure(error, elsewhere=failed.reason not in _EVERYWHERE)
        except asyncio.CancelledError:
            if watchdog.expired == "first_byte" and not self.client.status:
                watchdog.resume()
                attempt.end("timeout")
                if record.is_in_one_piece:
                    self.trial.excuse()
                error = UpstreamError(f"no answer within {seconds:g} s", reason="timeout", status=504)
                return Failure(error, elsewhere=False)
            attempt.end("aborted", status=answer.status if answer is not None else None)
            raise
        finally:
            if answer is not None and not answer.is_over:
                answer.close()

    async def _answer(
        self, lease: Lease, record: DecisionRecord, attempt: Attempt, answer: UpstreamResponse
    ) -> Failure | None:
        """Relay *answer*, or hold it back if another instance may do better."""
        held, status = b"", answer.status
        if status in ELSEWHERE or status == 404:
            try:
                while piece := await answer.read():
                    held += piece
                    if len(held) > HELD_BYTES:
                        break
                if len(held) <= HELD_BYTES and (status != 404 or NO_SUCH_MODEL.search(held)):
                    answer.finish()
                    attempt.end("5xx" if status >= 500 else "ok", status=status)
                    if status == 404:
                        self.context.router.lost_model(lease.instance, self.request.model)
                    elif status == 500 and any(message in held for message in SHUTTING_DOWN):
                        self.trial.stopping(lease)
                    headers = response_headers(answer.headers) + self.context.receipt(record)
                    return Failure(status=status, headers=headers, body=held)
            except AnswerBroken:
                attempt.end("closed", status=status)
                return Failure(UpstreamError("the instance broke off its answer", reason="closed"))
        if self.trial.failures:
            self.trial.answers(status)
        self.body = None  # no other instance is tried from here on
        self.permit.settle(0)
        self.delivery = Delivery(
            self.context, self.scope, self.exchange, self.client, lease, attempt, answer, self.trial, record
        )
        await self.delivery.run(held)
        return None

    async def _give(self, failure: Failure) -> None:
        """Answer with the failure of the last attempt."""
        if failure.error is not None:
            raise failure.error
        if self.client.begin(failure.status, failure.headers, failure.body, is_last=True):
            await self.client.drained()
        self.exchange.end(failure.status, bytes_out=len(failure.body), error_type="upstream_status")

    async def _fail(self, error: HttpError) -> None:
        """Answer *error*, unless the client has left."""
        record = self.exchange.record
        reason = error.reason if isinstance(error, UpstreamError) else error.kind
        self.exchange.end(error.status, error_type=reason)
        await send_error(self.client.send, self.request.path, error, self.context.receipt(record) if record else None)

    async def append_error(self, error: HttpError) -> None:
        """Append *error* to an answer that has begun, if it is a stream that can carry it."""
        if self.delivery is not None:
            await self.delivery.append_error(error)

    @property
    def bytes_out(self) -> int:
        """Number of bytes of the instance's answer that were passed on."""
        return self.delivery.observer.size if self.delivery is not None else 0

    @property
    def usage(self) -> Usage | None:
        """Tokens that the instance has counted so far."""
        return self.delivery.observer.usage() if self.delivery is not None else None

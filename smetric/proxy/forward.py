"""Forwards one request: route, send, stream back; at most one other instance, never after the first byte.

The bytes pass untouched in both directions. Which instance is the router's business.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field

from smetric.caches.watch import CacheWatch
from smetric.errors import HttpError, UpstreamError
from smetric.fleet.instance import Instance
from smetric.fleet.trial import Trial
from smetric.proxy.asgi import Scope
from smetric.proxy.error_response import error_event, send_error
from smetric.proxy.headers import Headers, first, request_headers, response_headers
from smetric.proxy.inbox import Inbox
from smetric.proxy.outbox import Outbox
from smetric.proxy.relay import Observer
from smetric.proxy.retry_budget import RetryBudget
from smetric.proxy.upstream import Answer, Upstream
from smetric.proxy.wire import AnswerBroken, Unreachable, UpstreamFailed
from smetric.request import InferenceRequest
from smetric.router import Router, Routing
from smetric.telemetry.attempt import Attempt
from smetric.telemetry.exchange import Exchange
from smetric.telemetry.record import DecisionRecord
from smetric.tokens import TokenRatio

#: What an instance answers when it is overloaded, stopping or broken; another one may do better.
ELSEWHERE = frozenset({429, 500, 502, 503})
#: Such an answer is held back while another instance is tried, if its body is at most this many bytes.
HELD_BYTES = 16 * 1024
#: What an engine answers, with 500, from the moment it is told to stop to its end.
SHUTTING_DOWN = b"cannot schedule new futures after shutdown"
#: The status logged for a client that left first.
CLIENT_CLOSED = 499


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds: until the first byte of an answer (queueing and prefill included), and between two pieces of it."""

    first_byte_s: float = 300.0
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that gave nothing the client has seen: an error of ours, or an answer held back."""

    error: HttpError | None = None
    status: int = 0
    headers: Headers | None = None
    body: bytes = b""
    #: Another instance may be tried.
    elsewhere: bool = True


@dataclass(frozen=True, slots=True)
class Plane:
    """What all requests share."""

    router: Router
    upstream: Upstream
    tokens: TokenRatio
    caches: CacheWatch
    deadlines: Deadlines
    response_headers: bool = True
    #: This router, among those that a request may pass.
    id: bytes = field(default_factory=lambda: secrets.token_hex(8).encode())
    retries: RetryBudget = field(default_factory=RetryBudget)


class Forwarding:
    """One request on its way: `run` sends it and streams the answer back.

    Args:
        plane: what all requests share.
        scope: the ASGI scope.
        inbox: the client's side, its body read.
        outbox: where the answer goes.
        exchange: what telemetry sees.
        request: what the router sees.
        body: the bytes to send; None for no body.
        leased: it counts as load and the policy decides; otherwise any candidate does.
    """

    def __init__(
        self,
        plane: Plane,
        scope: Scope,
        inbox: Inbox,
        outbox: Outbox,
        exchange: Exchange,
        request: InferenceRequest,
        body: bytes | None,
        *,
        leased: bool = True,
    ) -> None:
        self._leased = leased
        self._plane = plane
        self._scope = scope
        self._path: str = scope["path"]
        query: bytes = scope["query_string"]
        self._target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self._inbox = inbox
        self._outbox = outbox
        self._exchange = exchange
        self._request = request
        self._body = body
        self._headers = request_headers(scope["headers"], plane.id)
        self._observer: Observer | None = None
        self._trial = Trial(plane.router.fleet.health)
        #: The last attempt.
        self._sent: Attempt | None = None

    async def run(self) -> None:
        """Route, send, stream back; answers errors in the API's own shape."""
        exchange, watchdog = self._exchange, self._inbox.watchdog
        self._inbox.watch()
        try:
            await self._attempts()
        except HttpError as error:
            await self.fail(error)
        except asyncio.CancelledError:
            if not self._inbox.gone and watchdog.expired is None:
                exchange.end(503, error_type="shutdown")
            else:
                exchange.end(CLIENT_CLOSED, bytes_out=self._bytes_out, error_type="client_gone")
            raise
        finally:
            self._trial.close()

    async def _attempts(self) -> None:
        router, retries = self._plane.router, self._plane.retries
        retries.arrived()
        failure: Failure | None = None
        tried: list[Instance] = []
        while True:
            routing = await router.route(self._request, exclude=tried, leased=self._leased)
            lease = routing.lease
            try:
                record = self._record(routing)
                self._exchange.decided(record)
                if lease is None:
                    assert routing.error is not None
                    if failure is not None:
                        break  # nobody else: the first instance's own answer says more than ours
                    raise routing.error
                attempted = await self._attempt(routing, record)
            finally:
                if lease is not None:
                    lease.release()
                    if self._sent is not None:
                        self._trial.ended(lease.instance, self._sent.result, self._sent.status)
            if attempted is None:
                return
            failure = attempted
            if tried or not failure.elsewhere or routing.outcome == "pinned":
                break
            if not retries.take():
                self._exchange.telemetry.metrics.retry_refused()
                self._trial.untried()
                break
            tried.append(lease.instance)
        await self._give(failure)

    def _record(self, routing: Routing) -> DecisionRecord:
        generation = routing.generation
        return DecisionRecord(
            time_ns=time.time_ns(),
            outcome=routing.outcome,
            request=self._request,
            policy=generation.policy,
            generation=generation.number,
            decision=routing.decision,
            instance=routing.lease.instance if routing.lease is not None else None,
            evaluate_s=routing.evaluate_s,
            lookup_s=routing.lookup_s,
        )

    async def _attempt(self, routing: Routing, record: DecisionRecord) -> Failure | None:
        """Send to the chosen instance and relay its answer; None when the client has been answered."""
        assert routing.lease is not None
        instance = routing.lease.instance
        attempt = self._sent = self._exchange.attempt(self._path)
        watchdog = self._inbox.watchdog
        watchdog.arm(self._plane.deadlines.first_byte_s, "first_byte")
        try:
            answer = await self._plane.upstream.send(
                instance,
                self._scope["method"],
                self._target,
                [*self._headers, *attempt.headers],
                self._body,
                attempt.resent,
            )
        except UpstreamFailed as failed:
            attempt.end(failed.reason)
            if failed.reason in ("connect_error", "connect_timeout"):
                instance.healthy = False  # until a scrape succeeds again
            return Failure(
                UpstreamError(
                    "the instance chosen for this request could not be reached",
                    reason=failed.reason,
                    status=503 if isinstance(failed, Unreachable) else 502,
                ),
                elsewhere=failed.reason != "protocol",
            )
        except asyncio.CancelledError:
            if watchdog.expired == "first_byte":
                return self._overdue(attempt)
            attempt.end("aborted")
            raise
        try:
            return await self._answer(routing, record, attempt, answer)
        except asyncio.CancelledError:
            answer.close()
            if watchdog.expired == "first_byte" and not self._outbox.started:
                return self._overdue(attempt)
            attempt.end("aborted", status=answer.status)
            raise
        except BaseException:
            answer.close()
            raise

    def _overdue(self, attempt: Attempt) -> Failure:
        """The first byte did not come in time."""
        self._resume()
        attempt.end("timeout")
        seconds = self._plane.deadlines.first_byte_s
        return Failure(UpstreamError(f"no answer within {seconds:g} s", reason="timeout", status=504), elsewhere=False)

    def _resume(self) -> None:
        """Go on after our own deadline cancelled this task."""
        self._inbox.watchdog.expired = None
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()

    async def _answer(
        self, routing: Routing, record: DecisionRecord, attempt: Attempt, answer: Answer
    ) -> Failure | None:
        """Relay *answer*, or hold it back if another instance may do better."""
        held: list[bytes] = []
        if answer.status in ELSEWHERE:
            try:
                while piece := await answer.read():
                    held.append(piece)
                    if sum(map(len, held)) > HELD_BYTES:
                        break
                else:
                    answer.finish()
                    attempt.end("5xx" if answer.status >= 500 else "ok", status=answer.status)
                    if answer.status == 500 and SHUTTING_DOWN in b"".join(held):
                        assert routing.lease is not None
                        self._trial.stopping(routing.lease.instance)
                    return Failure(
                        status=answer.status,
                        headers=response_headers(answer.headers) + self._own_headers(record),
                        body=b"".join(held),
                    )
            except AnswerBroken:
                answer.close()
                attempt.end("closed", status=answer.status)
                return Failure(UpstreamError("the instance broke off its answer", reason="closed"))
        await self._relay(routing, record, attempt, answer, held)
        return None

    async def _relay(
        self, routing: Routing, record: DecisionRecord, attempt: Attempt, answer: Answer, held: list[bytes]
    ) -> None:
        """Stream the answer to the client, watching what passes."""
        outbox, watchdog, deadlines, lease = self._outbox, self._inbox.watchdog, self._plane.deadlines, routing.lease
        assert lease is not None
        headers = response_headers(answer.headers)
        is_stream = (first(headers, b"content-type") or b"").startswith(b"text/event-stream")
        if is_stream:
            headers.append((b"x-accel-buffering", b"no"))
        headers += self._own_headers(record)
        observer = self._observer = Observer(self._request.api, is_stream=is_stream and answer.status == 200)
        await outbox({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            for piece in held:
                observer.passed(piece)
                await outbox({"type": "http.response.body", "body": piece, "more_body": True})
            watchdog.arm(deadlines.first_byte_s, "first_byte")
            # The last piece goes with the end where it is known to be the last; another message costs as much as it.
            is_sent = False
            while not is_sent and (piece := await answer.read()):
                observer.passed(piece)
                if is_sent := answer.is_whole and observer.ended:
                    lease.release()  # the engine has ended, however long the client takes to read
                if observer.size == len(piece):
                    await self._first_piece(routing, attempt, answer, piece, is_last=is_sent)
                else:
                    await outbox({"type": "http.response.body", "body": piece, "more_body": not is_sent})
                watchdog.arm(deadlines.idle_s, "idle")
        except AnswerBroken:
            await self._break_off(attempt, answer, is_stream, "closed")
            return
        except asyncio.CancelledError:
            if watchdog.expired not in ("first_byte", "idle"):
                raise
            self._resume()
            await self._break_off(attempt, answer, is_stream, "timeout")
            return
        if not (observer.ended or observer.is_engine_error):
            await self._break_off(attempt, answer, is_stream, "closed")
            return
        answer.finish()
        lease.release()
        if not is_sent:
            await outbox({"type": "http.response.body", "body": b"", "more_body": False})
        self._settle(routing, attempt, answer)

    async def _first_piece(
        self, routing: Routing, attempt: Attempt, answer: Answer, piece: bytes, *, is_last: bool
    ) -> None:
        """Pass the first bytes on, then note that the prompt has been prefilled."""
        attempt.first_byte()
        assert routing.lease is not None
        routing.lease.first_byte()
        if attempt.ttfc_s is not None and self._leased and self._observer is not None and self._observer.is_stream:
            self._trial.waited(routing.lease, attempt.ttfc_s)
        await self._outbox({"type": "http.response.body", "body": piece, "more_body": not is_last})
        if answer.status == 200 and self._leased:
            self._plane.router.prefilled(self._request, routing.lease.instance)

    def _settle(self, routing: Routing, attempt: Attempt, answer: Answer) -> None:
        """The answer is complete: learn from it."""
        observer, request = self._observer, self._request
        assert observer is not None
        assert routing.lease is not None
        usage = observer.usage() if answer.status == 200 else None
        if observer.is_aborted:
            self._trial.aborted(routing.lease.instance)
        prompt = request.prompt
        if prompt is not None and not prompt.counted and request.prompts == 1 and usage is not None:
            self._plane.tokens.learn(request.model, prompt.size, usage.prompt_tokens or 0)
        response_id = observer.response_id()
        if response_id:
            self._plane.router.pin(response_id, routing.lease.instance)
        if answer.status == 200 and self._leased:
            self._plane.router.settled(request, routing.lease.instance, usage)
            assert self._exchange.record is not None
            self._plane.caches.answered(self._exchange.record, usage, self._scope["headers"])
        attempt.end("5xx" if answer.status >= 500 else "ok", status=answer.status, usage=usage)
        self._exchange.end(answer.status, bytes_out=observer.size, usage=usage)

    async def _break_off(self, attempt: Attempt, answer: Answer, is_stream: bool, result: str) -> None:
        """The answer ended early and the client has seen some of it: say so in the stream, end without its end mark.

        What is no event stream is cut off: returning without a last piece makes the server close the connection.
        """
        answer.close()
        attempt.end(result, status=answer.status)
        self._exchange.end(answer.status, bytes_out=self._bytes_out, error_type=f"upstream_{result}")
        if is_stream:
            error = UpstreamError("the instance broke off its answer", reason=result)
            event = error_event(self._path, error)
            await self._outbox({"type": "http.response.body", "body": event, "more_body": True})

    async def _give(self, failure: Failure) -> None:
        """Answer with what is left after the last attempt."""
        if failure.error is not None:
            raise failure.error
        assert failure.headers is not None
        await self._outbox({"type": "http.response.start", "status": failure.status, "headers": failure.headers})
        await self._outbox({"type": "http.response.body", "body": failure.body, "more_body": False})
        self._exchange.end(failure.status, bytes_out=len(failure.body), error_type="upstream_status")

    async def fail(self, error: HttpError) -> None:
        """Answer *error*, unless the client has left."""
        record = self._exchange.record
        await send_error(self._outbox, self._path, error, self._own_headers(record) if record else None)
        reason = error.reason if isinstance(error, UpstreamError) else error.kind
        self._exchange.end(error.status, error_type=reason)

    def _own_headers(self, record: DecisionRecord) -> Headers:
        """`x-smetric-…`: the receipt a client can quote."""
        if not self._plane.response_headers:
            return []
        policy = record.policy
        headers = [
            (b"x-smetric-decision-id", record.id.encode()),
            (b"x-smetric-policy", f"{policy.name}@{policy.digest}".encode()),
        ]
        if record.instance is not None:
            headers.append((b"x-smetric-instance", record.instance.id.encode()))
        if record.rule:
            headers.append((b"x-smetric-rule", record.rule.encode()))
        return headers

    @property
    def awaits_events(self) -> bool:
        """The client is in the middle of a stream of events."""
        return self._observer is not None and self._observer.is_stream and not self._observer.ended

    @property
    def _bytes_out(self) -> int:
        return self._observer.size if self._observer is not None else 0

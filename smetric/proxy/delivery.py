"""One answer of an instance on its way to the client: passed on as it comes, watched, and learnt from at its end.

Which instance it comes from, and whether another is tried instead, is `forward.py`'s.
"""

from __future__ import annotations

import asyncio

from smetric.errors import HttpError, UpstreamError
from smetric.fleet.lease import Lease
from smetric.fleet.trial import Trial
from smetric.proxy.answer import Answer
from smetric.proxy.asgi import Scope
from smetric.proxy.client import Client
from smetric.proxy.error_response import error_event
from smetric.proxy.headers import first, response_headers
from smetric.proxy.plane import Plane
from smetric.proxy.relay import Observer
from smetric.proxy.wire import AnswerBroken
from smetric.telemetry.attempt import Attempt
from smetric.telemetry.exchange import Exchange
from smetric.telemetry.record import DecisionRecord


class Delivery:
    """One answer, from its first byte on.

    Args:
        plane: what all requests share.
        scope: the client's request, as ASGI has it.
        exchange: what telemetry sees of it.
        client: where the answer goes.
        lease: the charge on the instance.
        attempt: the answer's own telemetry.
        answer: its head has come.
        trial: what the request says of instances.
        record: the decision that led here, with the request as the router has it.
    """

    __slots__ = (
        "_answer",
        "_attempt",
        "_client",
        "_exchange",
        "_headers",
        "_is_compressed",
        "_is_stream",
        "_lease",
        "_plane",
        "_record",
        "_scope",
        "_trial",
        "observer",
    )

    def __init__(
        self,
        plane: Plane,
        scope: Scope,
        exchange: Exchange,
        client: Client,
        lease: Lease,
        attempt: Attempt,
        answer: Answer,
        trial: Trial,
        record: DecisionRecord,
    ) -> None:
        self._plane = plane
        self._scope = scope
        self._exchange = exchange
        self._client = client
        self._lease = lease
        self._attempt = attempt
        self._answer = answer
        self._trial = trial
        self._record = record
        self._headers = response_headers(answer.headers)
        self._is_stream = (first(self._headers, b"content-type") or b"").lower().startswith(b"text/event-stream")
        #: The client asked for it; nothing of it can be read here, nor added to it.
        self._is_compressed = (first(self._headers, b"content-encoding") or b"identity").lower() != b"identity"
        #: What passes.
        self.observer = Observer(
            record.request.api, self._is_stream and answer.status == 200 and not self._is_compressed
        )
        lease.answer = self.observer

    async def run(self, held: bytes) -> None:
        """Pass on what is *held* of the answer and what is still to come."""
        answer, client, deadlines = self._answer, self._client, self._plane.deadlines
        watchdog = client.watchdog
        observer, is_inference = self.observer, self._record.is_inference
        headers = self._headers
        if self._is_stream:
            headers.append((b"x-accel-buffering", b"no"))
        headers += self._plane.receipt(self._record)
        # A write costs more than all else here: the head goes with the first piece if that has come too, and the last
        # piece with the end where it is known to be the last.
        has_begun, is_sent = bool(held) or not answer.pieces, False
        try:
            if has_begun:
                observer.passed(held)
                if client.begin(answer.status, headers, held):
                    await client.drained()
            if not answer.pieces:
                watchdog.arm(deadlines.first_byte_s, "first_byte")
            while not is_sent and (piece := answer.take() if answer.pieces else await answer.read()):
                is_first = not observer.size
                observer.passed(piece)
                if is_sent := observer.ended and answer.is_done:  # *piece* was all there was
                    self._lease.release()  # the engine has ended, however long the client takes to read
                if is_first:
                    ttfc_s = self._attempt.first_byte()
                    self._lease.first_byte()
                    if is_inference and observer.is_stream and not self._lease.is_past:
                        self._trial.waited(self._lease, ttfc_s)
                        self._plane.router.first_token(self._lease, ttfc_s)
                if has_begun:
                    is_full = client.pass_on(piece, is_last=is_sent)
                else:
                    has_begun = True
                    is_full = client.begin(answer.status, headers, piece, is_last=is_sent)
                if is_full:
                    await client.drained()
                if is_first and answer.status == 200 and is_inference:
                    if not self._lease.is_past:
                        self._plane.router.prefilled(self._record.request, self._lease.instance)
                    self._record.request.answering()
                    self._exchange.answering()
                if not is_sent:
                    watchdog.arm(deadlines.idle_s, "idle")
        except AnswerBroken:
            await self._break_off("closed")
            return
        except asyncio.CancelledError:
            if watchdog.expired not in ("first_byte", "idle"):
                raise
            watchdog.resume()
            await self._break_off("timeout")
            return
        if not (observer.ended or observer.is_engine_error):
            await self._break_off("closed")
            return
        answer.finish()
        self._lease.release()
        if not is_sent and client.pass_on(b"", is_last=True):
            await client.drained()
        self._settle()

    def _settle(self) -> None:
        """The answer is complete: learn from it."""
        plane, observer, record, request = self._plane, self.observer, self._record, self._record.request
        status, lease = self._answer.status, self._lease
        usage = observer.usage() if status == 200 else None
        if observer.is_aborted():
            self._trial.aborted(lease)
        prompt = request.prompt
        if prompt is not None and not prompt.counted and request.prompts == 1 and usage is not None:
            plane.tokens.learn(request.model, prompt.size, usage.prompt_tokens or 0)
        response_id = observer.response_id()
        if response_id:  # also of a process that seems gone: it may be new, and asked before it was seen to be
            plane.router.pin(response_id, lease.instance)
        if status == 200 and record.is_inference and not lease.is_past:
            plane.router.settled(request, lease.instance, usage)
            plane.caches.answered(record, usage, self._scope["headers"])
        reason = observer.finish_reason() if self._attempt.is_recorded and status == 200 else ""
        self._attempt.end("5xx" if status >= 500 else "ok", status=status, usage=usage, finish_reason=reason)
        self._exchange.end(status, bytes_out=observer.size, events=observer.events, usage=usage)

    async def _break_off(self, result: str) -> None:
        """The answer ended early and the client has seen some of it.

        Returning without a last piece makes the server close the connection.
        """
        self._answer.close()
        self._attempt.end(result, status=self._answer.status)
        self._exchange.end(self._answer.status, bytes_out=self.observer.size, error_type=f"upstream_{result}")
        await self.tell(UpstreamError("the instance broke off its answer", reason=result))

    async def tell(self, error: HttpError) -> None:
        """Add *error* to the stream as its last event, where it is one that can be read and does not look whole then.

        One of an announced length has room for less than it lacks. Behind part of another event there is none: clients
        would read that part as an event, and fail at its JSON, where they know what a connection's early end is.
        """
        observer = self.observer
        has_ended = observer.is_past_mark or (observer.ended and self._answer.is_whole)
        if self._is_stream and not (self._is_compressed or has_ended or observer.is_within_event):
            event = error_event(self._scope["path"], error)
            length = first(self._headers, b"content-length")
            if (length is None or observer.size + len(event) < int(length)) and self._client.pass_on(event):
                await self._client.drained()

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.errors import HttpError, RequestError
from smetric.fleet.exchange import Attempt, Exchange, Exchanges, Listener
from smetric.fleet.record import DecisionRecord
from smetric.request.prompt import Prompt
from smetric.request.request import Usage
from tests.telemetry.samples import ROUTE, record, scope


class Notes(Listener):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def arrived(self, exchange: Exchange) -> None:
        self.seen.append("arrived")

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        self.seen.append(("decided", record.rank, exchange.previous is not None))

    def sent(self, exchange: Exchange, attempt: Attempt) -> None:
        self.seen.append(("sent", attempt.number))

    def answering(self, exchange: Exchange, record: DecisionRecord) -> None:
        self.seen.append("answering")

    def attempt_ended(self, exchange: Exchange, attempt: Attempt) -> None:
        self.seen.append(("attempt_ended", attempt.result, attempt.resends))

    def ended(self, exchange: Exchange) -> None:
        assert exchange.record is not None
        self.seen.append(("ended", exchange.status, exchange.record.request.prompt is not None))

    def unreadable(self, problem: HttpError, scope: Any, is_seen: bool) -> None:
        self.seen.append(("unreadable", problem.status))


class Broken(Listener):
    """Raises at each event that `Notes` notes."""

    def arrived(self, exchange: Exchange) -> None:
        raise ZeroDivisionError

    def decided(self, exchange: Exchange, record: DecisionRecord) -> None:
        raise ZeroDivisionError

    def sent(self, exchange: Exchange, attempt: Attempt) -> None:
        raise ZeroDivisionError

    def answering(self, exchange: Exchange, record: DecisionRecord) -> None:
        raise ZeroDivisionError

    def attempt_ended(self, exchange: Exchange, attempt: Attempt) -> None:
        raise ZeroDivisionError

    def ended(self, exchange: Exchange) -> None:
        raise ZeroDivisionError

    def unreadable(self, problem: HttpError, scope: Any, is_seen: bool) -> None:
        raise ZeroDivisionError


def retry(exchanges: Exchanges) -> Exchange:
    """Run a request whose first attempt fails and whose second one is answered."""
    exchange = exchanges.begin(scope(), ROUTE, trusted=True)
    first, second = record(), record()
    second.request.prompt = Prompt([b"hello"], 4.0)
    exchange.decided(first)
    exchange.attempt(ROUTE).end(names.CONNECT_ERROR)
    exchange.decided(second)
    attempt = exchange.attempt(ROUTE)
    attempt.resent()
    attempt.first_output()
    exchange.answering()
    attempt.end(names.OK, status=200)
    attempt.end(names.ABORTED)
    exchange.end(200, bytes_out=7, events=3, usage=Usage(10, 3, 0))
    exchange.end(502, error_type="closed")
    exchanges.unreadable(RequestError("no HTTP"), scope(), False)
    return exchange


EVENTS = [
    "arrived",
    ("decided", 0, False),
    ("sent", 1),
    ("attempt_ended", names.CONNECT_ERROR, 0),
    ("decided", 1, True),
    ("sent", 2),
    "answering",
    ("attempt_ended", names.OK, 1),
    ("ended", 200, True),
    ("unreadable", 400),
]


def test_listener_hears_of_each_event_once() -> None:
    notes = Notes()
    exchange = retry(Exchanges([Listener(), notes]))
    assert notes.seen == EVENTS
    assert (exchange.status, exchange.bytes_out, exchange.error_type) == (200, 7, "")
    assert exchange.gap_s is not None
    made = exchange.record
    assert made is not None
    assert (made.status, made.usage, made.request.prompt) == (200, Usage(10, 3, 0), None)


def test_listener_that_raises_costs_its_own_record_alone() -> None:
    notes, failures = Notes(), list[str]()
    with capture_logs() as lines:
        retry(Exchanges([Broken(), notes], on_failure=failures.append))
    assert notes.seen == EVENTS
    assert failures == ["Broken"] * len(EVENTS)
    (line,) = lines
    assert (line["event"], line["listener"], line["kept_back"]) == ("smetric.listener.failed", "Broken", 0)


def test_log_that_fails_as_well_does_not_break_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    monkeypatch.setattr("smetric.fleet.exchange.log", None)
    retry(Exchanges([Broken(), notes]))
    assert notes.seen == EVENTS


def test_trace_headers_replace_the_clients() -> None:
    exchange = Exchanges([]).begin(scope(), ROUTE, trusted=True)
    exchange.decided(record())
    attempt = exchange.attempt(ROUTE)
    attempt.headers = [(b"b3", b"ours")]
    assert attempt.replacing([(b"b3", b"theirs"), (b"a", b"1")]) == [(b"a", b"1"), (b"b3", b"ours")]


def test_exchange_without_a_decision_ends_with_its_duration() -> None:
    exchange = Exchanges([]).begin(scope(), ROUTE, trusted=True)
    exchange.answering()
    exchange.end(400, error_type="invalid_request_error")
    assert not exchange.failed
    assert exchange.duration_s > 0
    assert exchange.gap_s is None

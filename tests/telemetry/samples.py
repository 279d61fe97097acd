"""Decision records made by a real policy on small snapshots, and ASGI scopes to arrive with."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.exchange import Exchange, Listener
from smetric.fleet.instance import Instance, Scrape
from smetric.fleet.record import DecisionRecord
from smetric.policy import Decision, Policy, Snapshot, load
from smetric.request.request import Api, InferenceRequest
from smetric.routing.shadow import ShadowJudge
from smetric.sources.measured import PrefillTime
from smetric.telemetry.decisions import DecisionLog
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.metrics import Metrics, ModelLabels
from smetric.telemetry.outcomes import Outcomes, ServiceLevel
from smetric.telemetry.tracing import Tracing

STICKY = """
policy sticky
let s = argmax(hit_len, then: requests)
def not_overloaded(s) = requests[s] <= 2.0 * mean(requests)
reject 429 "all instances are full" when mean(requests) > 1000 as full
route s when req.turn != 0 and not_overloaded(s) as stick
route rr_argmin(requests) as balance
"""

ROUTE = "/v1/chat/completions"
TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"


@functools.cache
def policy() -> Policy:
    return load(STICKY, VOCABULARY, path="/etc/smetric/sticky.policy")


def request(**fields: Any) -> InferenceRequest:
    given: dict[str, Any] = {
        "turn": 3,
        "prompt_len": 1000,
        "est_hit": 900,
        "model": "m",
        "session": "s-1",
        "api": Api.CHAT,
    }
    return InferenceRequest(**(given | fields))


def fleet(count: int = 3, *, id: str = "gpu-{}") -> list[Instance]:
    instances = [Instance(id.format(i), f"http://10.0.0.{i % 250}:8000", models=["m"]) for i in range(count)]
    for instance in instances:
        instance.scrape = Scrape(time.monotonic(), 2.0, 1.0, 0.25, 0)
    return instances


def record(
    outcome: str = names.ROUTED,
    *,
    hits: Sequence[float] = (0, 880, 0),
    loads: Sequence[float] = (2, 3, 1),
    instances: Sequence[Instance] | None = None,
    known: list[bool] | None = None,
    time_ns: int | None = None,
    **fields: Any,
) -> DecisionRecord:
    """A record of *outcome*; a routed one was decided by the policy on the given hits and loads."""
    acting, asked = policy(), request(**fields)
    if instances is None:
        instances = fleet(len(hits))
    decision: Decision | None = None
    instance: Instance | None = None
    if outcome in (names.ROUTED, names.REJECTED):
        if outcome == names.REJECTED:
            loads = [5000.0] * len(loads)
        snapshot = Snapshot(
            [each.id for each in instances],
            {"hit_len": list(hits), "requests": list(loads)},
            {"hit_len": known} if known else {},
            {"requests": [99.5] * len(hits)},
            {"hit_len": ["prefix_index"] * len(hits)},
            100.0,
        )
        made = acting.decide(snapshot, asked, {}, 7)
        assert isinstance(made, Decision)
        decision = made
        instance = instances[made.index] if made.index >= 0 else None
    elif outcome == names.PINNED:
        instance = instances[0]
    return DecisionRecord(
        time_ns=time.time_ns() if time_ns is None else time_ns,
        outcome=outcome,
        request=asked,
        policy=acting,
        generation=2,
        decision=decision,
        instance=instance,
        evaluate_s=0.000_02,
    )


def scope(*headers: tuple[bytes, bytes], path: str = ROUTE, method: str = "POST") -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"secret=1",
        "scheme": "http",
        "http_version": "1.1",
        "client": ("10.1.2.3", 5000),
        "server": ("127.0.0.1", 8080),
        "headers": list(headers),
    }


def telemetry(
    environ: dict[str, str] | None = None,
    *,
    instances: Callable[[], Sequence[Instance]] = fleet,
    prefill: Callable[[Instance], PrefillTime | None] = lambda _: None,
    others: Sequence[Listener] = (),
    **options: Any,
) -> Telemetry:
    metrics, by_id = Metrics(), {one.id: one for one in instances()}
    return Telemetry(
        tracing=Tracing(environ or {}, **options),
        metrics=metrics,
        decisions=DecisionLog(),
        outcomes=Outcomes(metrics.registry, ServiceLevel(1.0, 0.0001, 0.03), prefill, by_id.get),
        models=ModelLabels(lambda: ["m"]),
        instances=instances,
        others=[ShadowJudge(), *others],
    )


def begin(app: Telemetry, *headers: tuple[bytes, bytes], trusted: bool = True) -> Exchange:
    return app.begin(scope(*headers), ROUTE, trusted=trusted)


def run_one(app: Telemetry, made: DecisionRecord, *headers: tuple[bytes, bytes], trusted: bool = True) -> Exchange:
    """One request that is answered 200, or refused."""
    exchange = begin(app, *headers, trusted=trusted)
    exchange.decided(made)
    if made.instance is None:
        exchange.end(429 if made.outcome == names.REJECTED else 503)
        return exchange
    attempt = exchange.attempt(ROUTE)
    attempt.first_output()
    attempt.end(names.OK, status=200)
    exchange.end(200, bytes_out=10)
    return exchange


def parent(flag: bytes = b"01") -> tuple[bytes, bytes]:
    return b"traceparent", b"00-%b-%b-%b" % (TRACE, SPAN, flag)


def fail_once(app: Telemetry) -> Exchange:
    """A request whose first attempt has failed."""
    exchange = begin(app)
    exchange.decided(record())
    exchange.attempt(ROUTE).end(names.CONNECT_ERROR)
    return exchange


def retry(app: Telemetry) -> None:
    """A request that another instance answers."""
    exchange = fail_once(app)
    exchange.decided(record(hits=(0, 0), loads=(1, 2)))
    exchange.attempt(ROUTE).end(names.OK, status=200)
    exchange.end(200)

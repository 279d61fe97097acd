from __future__ import annotations

from collections.abc import Callable

from structlog.testing import capture_logs

from smetric import names
from smetric.request.prompt import Prompt
from smetric.telemetry.decisions import brief, full
from smetric.telemetry.exchange import Telemetry
from tests.telemetry.otlp_receiver import Receiver
from tests.telemetry.samples import ROUTE, TRACE, begin, parent, record, retry, run_one, telemetry


class Canary(Prompt):
    def __repr__(self) -> str:
        return "canary-prompt"


async def test_decision_before_a_retry_names_the_next_one_and_has_ended(app: Telemetry, receiver: Receiver) -> None:
    retry(app)
    last, first = app.decisions.recent(2)
    assert (brief(first)["followed_by"], first.status) == (last.id, None)
    assert (brief(last)["followed_by"], last.status) == (None, 200)
    assert app.activity.take() == ([first, last], [first, last])
    assert await app.tracing.shutdown()


def test_off_passes_a_trusted_context_on_and_makes_none() -> None:
    app = telemetry()
    exchange = begin(app, parent(), (b"tracestate", b"a=1"))
    exchange.decided(record())
    assert exchange.attempt(ROUTE).headers == [parent(), (b"tracestate", b"a=1")]
    for headers, trusted in (([], True), ([parent()], False)):
        exchange = begin(app, *headers, trusted=trusted)
        exchange.decided(record())
        assert exchange.attempt(ROUTE).headers == []
        assert exchange.trace_id == ""


def test_ended_request_is_one_line_and_counts_once() -> None:
    with capture_logs() as lines:
        app = telemetry()
        exchange = begin(app, parent())
        made = record(model="m\r\n\x1b[31m" + "x" * 10_000)
        exchange.decided(made)
        attempt = exchange.attempt(ROUTE)
        attempt.first_output()
        attempt.end(names.OK, status=200)
        attempt.end(names.ABORTED)
        exchange.end(200, bytes_out=7)
        exchange.end(502, error_type="closed")
    (line,) = [each for each in lines if each["event"] == "request"]
    assert line["log_level"] == "info"
    assert line["decision_id"] == made.id
    assert line["trace_id"].encode() == TRACE
    assert (line["instance"], line["policy"], line["rule"]) == ("gpu-1", "sticky", "stick")
    assert (line["api"], line["status"], line["bytes"], line["outcome"]) == ("chat", 200, 7, "routed")
    assert line["ttft_s"] <= line["duration_s"]
    assert len(line["model"]) < 600
    assert line["model"].isprintable()
    read = app.metrics.registry.get_sample_value
    assert read("smetric_requests_total", {"route": ROUTE, "code": "200"}) == 1
    assert read("smetric_requests_in_progress") == 0
    assert read("smetric_upstream_attempts_total", {"instance": "gpu-1", "result": "ok"}) == 1
    assert read("smetric_upstream_attempts_total", {"instance": "gpu-1", "result": "aborted"}) is None


async def test_telemetry_shows_no_prompt_session_or_credential(
    traced: Callable[..., Telemetry], receiver: Receiver
) -> None:
    with capture_logs() as lines:
        app = traced()
        for outcome in (names.ROUTED, names.PINNED, names.REJECTED, names.NO_CANDIDATE, names.ERROR):
            made = record(outcome, session="canary-session", tenant="canary-tenant")
            made.request.prompt = Canary([b"canary-prompt"], 4.0)
            run_one(app, made, (b"authorization", b"Bearer canary-key"), (b"cookie", b"canary"))
        assert await app.tracing.shutdown()
    page, _ = await app.metrics.page()
    shown = [full(each) for each in app.decisions.recent(10)]
    assert len(receiver.named("route")) == len(shown) == 5
    told = str([(each.name, each.attributes) for each in receiver.spans]) + str(lines) + page.decode() + str(shown)
    assert "canary" not in told

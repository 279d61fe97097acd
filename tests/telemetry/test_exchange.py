from __future__ import annotations

from collections.abc import Callable, Iterator

import orjson
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from structlog.testing import capture_logs

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.exchange import Exchange
from smetric.fleet.record import DecisionRecord
from smetric.policy import Decision, Snapshot, load
from smetric.request.prompt import BlockKeys, Prompt
from smetric.request.request import Usage
from smetric.telemetry.decisions import brief, full
from smetric.telemetry.exchange import Telemetry
from tests.telemetry.otlp_receiver import Receiver, receiving
from tests.telemetry.samples import ROUTE, begin, fleet, record, request, run_one, scope, telemetry

TRACE, SPAN = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"


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


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def tracing_to(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Telemetry]:
    def build(**environ: str) -> Telemetry:
        given = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, **environ}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        return telemetry(given)

    return build


async def test_a_routed_request_leaves_server_route_and_client_spans(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to()
    exchange = begin(app, parent(), (b"tracestate", b"vendor=1"))
    made = record()
    exchange.decided(made)
    attempt = exchange.attempt(ROUTE)
    sent = dict(attempt.headers)
    attempt.first_byte()
    usage = Usage(1000, 20, 880)
    assert attempt.is_recorded
    attempt.end(names.OK, status=200, usage=usage, finish_reason="stop")
    exchange.end(200, bytes_out=99, usage=usage)
    assert await app.tracing.shutdown()

    server, route, client = (receiver.named(name)[0] for name in ("POST", "route", "chat"))
    assert len(receiver.spans) == 3
    assert server.name == "POST /v1/chat/completions"
    assert server.span.kind == Span.SPAN_KIND_SERVER
    assert server.span.trace_id.hex().encode() == TRACE
    assert server.span.parent_span_id.hex().encode() == SPAN
    assert server.span.trace_state == "vendor=1"
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["smetric.decision.outcome"] == "routed"
    assert server.span.status.code == Status.STATUS_CODE_UNSET
    assert route.name == "route sticky"
    assert route.span.parent_span_id == client.span.parent_span_id == server.span.span_id
    assert route.span.kind == Span.SPAN_KIND_INTERNAL
    assert client.name == "chat m"
    assert client.span.kind == Span.SPAN_KIND_CLIENT
    assert client.attributes["gen_ai.usage.cache_read.input_tokens"] == 880
    assert client.attributes["smetric.prefix.actual_hit_tokens"] == 880
    assert client.attributes["smetric.prefix.hit_tokens"] == 880
    assert [one.string_value for one in client.attributes["gen_ai.response.finish_reasons"].values] == ["stop"]
    assert client.attributes["server.port"] == 8000
    assert client.attributes["gen_ai.response.time_to_first_chunk"] >= 0
    assert server.span.start_time_unix_nano <= client.span.start_time_unix_nano <= client.span.end_time_unix_nano
    assert client.span.end_time_unix_nano <= server.span.end_time_unix_nano
    assert sent[b"traceparent"] == b"00-%b-%b-01" % (TRACE, client.span.span_id.hex().encode())
    assert sent[b"tracestate"] == b"vendor=1"
    assert made.trace_id.encode() == TRACE


async def test_the_route_span_says_why(tracing_to: Callable[..., Telemetry], receiver: Receiver) -> None:
    app = tracing_to()
    instances = fleet()
    instances += fleet(5)[3:]
    instances[3].draining = True
    instances[4].deprioritized = True
    app.spans.instances = lambda: instances
    made = record(loads=(2, 30, 1))
    run_one(app, made)
    assert await app.tracing.shutdown()
    about = receiver.named("route")[0].attributes
    assert about["smetric.decision.id"] == made.id
    assert about["smetric.decision.outcome"] == "routed"
    assert about["smetric.decision.reason"] == "policy"
    assert about["smetric.rule"] == "balance"
    assert about["smetric.instance.id"] == "gpu-2"
    assert "not_overloaded" in about["smetric.guard.failed"]
    assert about["smetric.policy.name"] == "sticky"
    assert about["smetric.policy.source"] == "sticky.policy"
    assert about["smetric.policy.generation"] == 2
    assert about["smetric.candidate.count"] == 5
    assert about["smetric.candidate.eligible_count"] == 3
    assert about["smetric.candidate.filter_reasons"] == "draining=1 spared=1"
    assert about["smetric.score.direction"] == "min"
    assert (about["smetric.score.chosen"], about["smetric.score.runner_up"]) == (1, 2)
    assert (about["smetric.score.margin"], about["smetric.score.worst"]) == (1, 30)
    assert about["smetric.prefix.hit_tokens"] == 0
    assert about["smetric.prefix.source"] == "prefix_index"
    assert about["smetric.load.requests"] == 1
    assert about["smetric.telemetry.max_age"] == about["smetric.telemetry.chosen_age"] == 0.5
    assert about["smetric.request.turn"] == 3
    assert about["smetric.request.est_hit"] == 900
    assert about["smetric.seed"] == 7
    assert about["smetric.cursor"].endswith("=gpu-2")
    assert about["openinference.span.kind"] == "CHAIN"
    assert about["output.value"].startswith(about["smetric.decision.summary"] + "\n\n")
    assert "s-1" not in str(about)
    assert len(about["smetric.session.id_hash"]) == 16


async def test_the_span_that_uis_open_first_says_the_same_as_the_last_decision(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to()
    retry(app)
    assert await app.tracing.shutdown()
    (server,), (_, last) = receiver.named("POST"), receiver.named("route")
    hints = ("openinference.span.kind", "output.value", "session.id")
    assert {name: server.attributes[name] for name in hints} == {name: last.attributes[name] for name in hints}


async def test_a_retry_makes_a_second_decision_and_a_second_attempt(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to()
    retry(app)
    assert await app.tracing.shutdown()
    assert [each.attributes["smetric.instance.rank"] for each in receiver.named("route")] == [0, 1]
    first, second = receiver.named("chat")
    assert first.span.status.code == Status.STATUS_CODE_ERROR
    assert first.attributes["error.type"] == "connect_error"
    assert "http.request.resend_count" not in first.attributes
    assert second.attributes["http.request.resend_count"] == 1
    assert second.attributes["smetric.upstream.attempt"] == 2
    assert len({each.span.trace_id for each in receiver.spans}) == 1


async def test_a_decision_that_another_one_follows_says_which_and_waits_for_no_end(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to()
    retry(app)
    last, first = app.decisions.recent(2)
    assert (brief(first)["followed_by"], first.status) == (last.id, None)
    assert (brief(last)["followed_by"], last.status) == (None, 200)
    assert app.activity.take() == ([first, last], [first, last])
    assert await app.tracing.shutdown()


async def test_an_attempt_that_is_not_made_elsewhere_is_told_with_the_reason(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to()
    exchange = fail_once(app)
    exchange.give_up(names.BUDGET)
    exchange.end(503, error_type=names.CONNECT_ERROR)
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert [each.attributes.get("smetric.upstream.gave_up") for each in receiver.named("POST")] == ["budget", None]


@pytest.mark.parametrize("outcome", [names.REJECTED, names.NO_CANDIDATE, names.ERROR])
@pytest.mark.parametrize("flag", [None, b"00"])
async def test_outcomes_out_of_the_ordinary_are_recorded_whatever_the_sampler_says(
    tracing_to: Callable[..., Telemetry], receiver: Receiver, outcome: str, flag: bytes | None
) -> None:
    app = tracing_to(OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0")
    headers = [] if flag is None else [parent(flag)]
    run_one(app, record(), *headers)
    run_one(app, record(names.PINNED), *headers)
    run_one(app, record(outcome), *headers)
    assert await app.tracing.shutdown()
    assert [each.attributes["smetric.decision.outcome"] for each in receiver.named("route")] == [outcome]
    assert len(receiver.spans) == 2


async def test_a_pinned_request_is_traced_without_a_policy(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to()
    run_one(app, record(names.PINNED))
    assert await app.tracing.shutdown()
    about = receiver.named("route")[0].attributes
    assert about["smetric.decision.outcome"] == about["smetric.decision.reason"] == "pinned"
    assert about["smetric.instance.id"] == "gpu-0"
    assert "smetric.rule" not in about


async def test_an_unrecorded_request_that_breaks_off_is_recorded_after_all(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to(OTEL_TRACES_SAMPLER="always_off")
    exchange = begin(app, parent(b"00"))
    made = record()
    exchange.decided(made)
    attempt = exchange.attempt(ROUTE)
    assert attempt.headers == [parent(b"00")]
    attempt.first_byte()
    attempt.end(names.CLOSED, status=200)
    was_traced = made.is_traced
    exchange.end(200, error_type="closed")
    assert (was_traced, made.is_traced) == (False, True)
    assert await app.tracing.shutdown()
    server = receiver.named("POST")[0]
    assert server.span.trace_id.hex().encode() == TRACE
    assert server.span.start_time_unix_nano == exchange.arrival_ns
    assert server.attributes["error.type"] == "closed"
    assert server.span.status.code == Status.STATUS_CODE_ERROR
    assert receiver.named("route")[0].span.parent_span_id == server.span.span_id


async def test_a_request_that_never_reached_a_decision_has_a_server_span_only(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to()
    begin(app).end(400, error_type="invalid_request_error")
    assert await app.tracing.shutdown()
    (server,) = receiver.spans
    assert server.attributes["http.response.status_code"] == 400
    assert server.span.status.code == Status.STATUS_CODE_UNSET


async def test_an_untrusted_peer_neither_joins_a_trace_nor_forces_one(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to(OTEL_TRACES_SAMPLER="parentbased_always_off")
    exchange = begin(app, parent(b"01"), (b"tracestate", b"a=1"), (b"baggage", b"k=" + b"v" * 60_000), trusted=False)
    exchange.decided(record())
    (sent,) = exchange.attempt(ROUTE).headers
    assert sent[0] == b"traceparent"
    assert TRACE not in sent[1]
    assert sent[1].endswith(b"-00")
    exchange.end(200)
    run_one(app, record(names.REJECTED), parent(b"01"), trusted=False)
    assert await app.tracing.shutdown()
    server = receiver.named("POST")[0]
    assert server.span.trace_id.hex().encode() != TRACE
    assert server.span.parent_span_id == b""
    assert server.span.links[0].trace_id.hex().encode() == TRACE


def test_with_tracing_off_a_trusted_context_passes_and_nothing_is_made_up() -> None:
    app = telemetry()
    exchange = begin(app, parent(), (b"tracestate", b"a=1"))
    exchange.decided(record())
    assert exchange.attempt(ROUTE).headers == [parent(), (b"tracestate", b"a=1")]
    for headers, trusted in (([], True), ([parent()], False)):
        exchange = begin(app, *headers, trusted=trusted)
        exchange.decided(record())
        assert exchange.attempt(ROUTE).headers == []
        assert exchange.trace_id == ""


def test_baggage_goes_along_when_asked_for() -> None:
    app = telemetry({"OTEL_PROPAGATORS": "tracecontext,baggage"})
    exchange = begin(app, (b"baggage", b"k=v"))
    exchange.decided(record())
    assert exchange.attempt(ROUTE).headers == [(b"baggage", b"k=v")]


def test_an_ended_request_is_one_line_and_counts_once() -> None:
    with capture_logs() as lines:
        app = telemetry()
        exchange = begin(app, parent())
        made = record(model="m\r\n\x1b[31m" + "x" * 10_000)
        exchange.decided(made)
        attempt = exchange.attempt(ROUTE)
        attempt.first_byte()
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


def test_the_prompt_is_let_go_and_the_result_kept_in_the_decision_log() -> None:
    app = telemetry()
    made = record()
    made.request.prompt = Prompt([b"how are you"], 4.0)
    made.request.block_keys = {16: BlockKeys([1] * 16, 16)}
    run_one(app, made)
    kept = app.decisions.get(made.id)
    assert kept is made
    assert kept.request.prompt is None
    assert not kept.request.block_keys
    assert kept.status == 200
    assert kept.ttft_s is not None


async def test_the_path_is_bounded_and_the_query_never_shown(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = tracing_to()
    about = scope(path="/v1/x\r\nset: 1" + "y" * 5000, method="BREW")
    app.begin(about, "/v1/{path}", trusted=True).end(404)
    assert await app.tracing.shutdown()
    (server,) = receiver.spans
    assert server.name == "_OTHER /v1/{path}"
    assert "\r" not in server.attributes["url.path"]
    assert len(server.attributes["url.path"]) < 600
    assert "secret" not in str(server.attributes)


class Canary(Prompt):
    def __repr__(self) -> str:
        return "canary-prompt"


async def test_no_prompt_session_or_credential_leaves_by_any_door(
    tracing_to: Callable[..., Telemetry], receiver: Receiver
) -> None:
    with capture_logs() as lines:
        app = tracing_to()
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


async def test_a_filter_that_leaves_nobody_is_named(tracing_to: Callable[..., Telemetry], receiver: Receiver) -> None:
    source = "policy strict\nkeep requests < 1 as idle\nroute rr_argmin(requests) as balance\n"
    strict = load(source, VOCABULARY, path="strict.policy")
    snapshot = Snapshot(["a", "b"], {"requests": [1.0, 2.0]})
    asked = request()
    decision = strict.decide(snapshot, asked, {}, 1)
    assert isinstance(decision, Decision)
    made = DecisionRecord(
        time_ns=1, outcome=names.NO_CANDIDATE, request=asked, policy=strict, generation=1, decision=decision
    )
    app = tracing_to()
    run_one(app, made)
    assert await app.tracing.shutdown()
    about = receiver.named("route strict")[0].attributes
    assert about["smetric.decision.reason"] == "all_filtered"
    assert about["smetric.rule"] == "idle"
    assert about["smetric.candidate.filtered_count"] == about["smetric.candidate.eligible_count"] == 2
    assert "smetric.instance.id" not in about
    assert "a" in full(made)["explanation"]


@pytest.mark.parametrize("limit", [150, 700])
async def test_no_json_is_cut_by_the_users_own_limit(
    tracing_to: Callable[..., Telemetry], receiver: Receiver, limit: int
) -> None:
    app = tracing_to(OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT=str(limit))
    run_one(app, record(hits=[0.0] * 32, loads=[2.0] * 32))
    assert await app.tracing.shutdown()
    about = receiver.named("route")[0].attributes
    assert len(about["smetric.candidates.json"]) <= limit
    assert orjson.loads(about["smetric.candidates.json"])
    assert len(about["output.value"]) <= limit

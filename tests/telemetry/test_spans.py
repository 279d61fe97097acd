from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from structlog.testing import capture_logs

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord, Forecast, Shadowed
from smetric.policy import Decision, Outcome, Snapshot, load
from smetric.request.request import Api, Usage
from smetric.telemetry.decisions import full
from smetric.telemetry.exchange import Telemetry
from smetric.telemetry.outcomes import migration_of
from smetric.telemetry.spans import of_attempt, of_decision, of_shadow, of_shadows, params_of
from tests.fakes import exchange_of
from tests.telemetry.otlp_receiver import Receiver
from tests.telemetry.samples import (
    ROUTE,
    SPAN,
    TRACE,
    begin,
    fail_once,
    fleet,
    parent,
    record,
    request,
    retry,
    run_one,
    scope,
)


async def test_spans_of_a_routed_request_are_server_route_and_client(app: Telemetry, receiver: Receiver) -> None:
    exchange = begin(app, parent(), (b"tracestate", b"vendor=1"))
    made = record()
    exchange.decided(made)
    attempt = exchange.attempt(ROUTE)
    sent = dict(attempt.headers)
    attempt.first_output()
    usage = Usage(1000, 20, 880)
    assert attempt.span is not None
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


async def test_route_span_has_the_decision_in_its_attributes(
    traced: Callable[..., Telemetry], receiver: Receiver
) -> None:
    instances = fleet()
    instances += fleet(5)[3:]
    instances[3].draining = True
    instances[4].deprioritized = True
    app = traced(lambda: instances)
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


async def test_server_span_repeats_the_hints_of_the_last_decision(app: Telemetry, receiver: Receiver) -> None:
    retry(app)
    assert await app.tracing.shutdown()
    (server,), (_, last) = receiver.named("POST"), receiver.named("route")
    hints = ("openinference.span.kind", "output.value", "session.id")
    assert {name: server.attributes[name] for name in hints} == {name: last.attributes[name] for name in hints}


async def test_retry_has_a_second_route_and_client_span(app: Telemetry, receiver: Receiver) -> None:
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


async def test_server_span_says_why_a_failed_attempt_was_not_retried(app: Telemetry, receiver: Receiver) -> None:
    exchange = fail_once(app)
    exchange.give_up(names.BUDGET)
    exchange.end(503, error_type=names.CONNECT_ERROR)
    run_one(app, record())
    assert await app.tracing.shutdown()
    assert [each.attributes.get("smetric.upstream.gave_up") for each in receiver.named("POST")] == ["budget", None]


@pytest.mark.parametrize("outcome", [names.REJECTED, names.NO_CANDIDATE, names.ERROR])
@pytest.mark.parametrize("flag", [None, b"00"])
async def test_trace_of_an_odd_outcome_is_kept_whatever_the_sampler_says(
    traced: Callable[..., Telemetry], receiver: Receiver, outcome: str, flag: bytes | None
) -> None:
    app = traced(TRACES_SAMPLER="parentbased_traceidratio", TRACES_SAMPLER_ARG="0")
    headers = [] if flag is None else [parent(flag)]
    run_one(app, record(), *headers)
    run_one(app, record(names.PINNED), *headers)
    run_one(app, record(outcome), *headers)
    assert await app.tracing.shutdown()
    assert [each.attributes["smetric.decision.outcome"] for each in receiver.named("route")] == [outcome]
    assert len(receiver.spans) == 2


async def test_route_span_of_a_pinned_request_names_no_rule(app: Telemetry, receiver: Receiver) -> None:
    run_one(app, record(names.PINNED))
    assert await app.tracing.shutdown()
    about = receiver.named("route")[0].attributes
    assert about["smetric.decision.outcome"] == about["smetric.decision.reason"] == "pinned"
    assert about["smetric.instance.id"] == "gpu-0"
    assert "smetric.rule" not in about


async def test_trace_of_a_request_that_breaks_off_is_kept_at_its_end(
    traced: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = traced(TRACES_SAMPLER="always_off")
    exchange = begin(app, parent(b"00"))
    made = record()
    exchange.decided(made)
    attempt = exchange.attempt(ROUTE)
    assert attempt.headers == [parent(b"00")]
    attempt.first_output()
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


async def test_undecided_request_has_a_server_span_only(app: Telemetry, receiver: Receiver) -> None:
    begin(app).end(400, error_type="invalid_request_error")
    assert await app.tracing.shutdown()
    (server,) = receiver.spans
    assert server.attributes["http.response.status_code"] == 400
    assert server.span.status.code == Status.STATUS_CODE_UNSET


async def test_untrusted_peer_neither_joins_a_trace_nor_forces_one(
    traced: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = traced(TRACES_SAMPLER="parentbased_always_off")
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


async def test_server_span_bounds_the_path_and_hides_the_query(app: Telemetry, receiver: Receiver) -> None:
    about = scope(path="/v1/x\r\nset: 1" + "y" * 5000, method="BREW")
    app.begin(about, "/v1/{path}", trusted=True).end(404)
    assert await app.tracing.shutdown()
    (server,) = receiver.spans
    assert server.name == "_OTHER /v1/{path}"
    assert "\r" not in server.attributes["url.path"]
    assert len(server.attributes["url.path"]) < 600
    assert "secret" not in str(server.attributes)


async def test_route_span_names_the_filter_that_left_no_candidate(app: Telemetry, receiver: Receiver) -> None:
    source = "policy strict\nkeep requests < 1 as idle\nroute rr_argmin(requests) as balance\n"
    strict = load(source, VOCABULARY, path="strict.policy")
    snapshot = Snapshot(["a", "b"], {"requests": [1.0, 2.0]})
    asked = request()
    decision = strict.decide(snapshot, asked, {}, 1)
    assert isinstance(decision, Decision)
    made = DecisionRecord(
        time_ns=1, outcome=names.NO_CANDIDATE, request=asked, policy=strict, generation=1, decision=decision
    )
    run_one(app, made)
    assert await app.tracing.shutdown()
    about = receiver.named("route strict")[0].attributes
    assert about["smetric.decision.reason"] == "all_filtered"
    assert about["smetric.rule"] == "idle"
    assert about["smetric.candidate.filtered_count"] == about["smetric.candidate.eligible_count"] == 2
    assert "smetric.instance.id" not in about
    assert "a" in full(made)["explanation"]


@pytest.mark.parametrize("limit", [150, 700])
async def test_json_is_whole_within_the_users_own_limit(
    traced: Callable[..., Telemetry], receiver: Receiver, limit: int
) -> None:
    app = traced(SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT=str(limit))
    run_one(app, record(hits=[0.0] * 32, loads=[2.0] * 32))
    assert await app.tracing.shutdown()
    about = receiver.named("route")[0].attributes
    assert len(about["smetric.candidates.json"]) <= limit
    assert orjson.loads(about["smetric.candidates.json"])
    assert len(about["output.value"]) <= limit


@pytest.mark.parametrize(
    ("api", "route", "operation"),
    [
        (Api.CHAT, "/v1/chat/completions", "chat"),
        (Api.MESSAGES, "/v1/messages", "chat"),
        (Api.RESPONSES, "/v1/responses", "chat"),
        (Api.COMPLETIONS, "/v1/completions", "text_completion"),
        (Api.OTHER, "/v1/embeddings", "embeddings"),
        (Api.OTHER, "/v1/rerank", "rerank"),
        (Api.OTHER, "/v1/audio/transcriptions", "audio/transcriptions"),
        (Api.OTHER, "/v1/messages/count_tokens", "messages/count_tokens"),
        (Api.OTHER, "/v1/responses/{id}", "responses/{id}"),
    ],
)
async def test_client_span_is_named_after_its_operation(
    app: Telemetry, receiver: Receiver, api: Api, route: str, operation: str
) -> None:
    exchange = app.begin(scope(), route, trusted=True)
    made = record()
    made.request.api = api
    exchange.decided(made)
    exchange.attempt(route.replace("{id}", "resp_1")).end("ok", status=200)
    exchange.end(200)
    assert await app.tracing.shutdown()
    (attempt,) = [span for span in receiver.spans if "gen_ai.operation.name" in span.attributes]
    assert attempt.attributes["gen_ai.operation.name"] == operation
    assert attempt.name == f"{operation} m"


HOLDING = load("policy holding\nhold for 2s when all(requests > 1) as full\nroute argmin(requests)\n", VOCABULARY)


@pytest.fixture
def seldom(traced: Callable[..., Telemetry]) -> Telemetry:
    """Telemetry that keeps only unusual requests."""
    return traced(TRACES_SAMPLER="parentbased_traceidratio", TRACES_SAMPLER_ARG="0")


def held(outcome: str = names.HELD) -> DecisionRecord:
    made = record()
    made.outcome, made.held_s = outcome, 0.25
    return made


async def test_trace_of_a_held_request_is_kept_with_its_wait(seldom: Telemetry, receiver: Receiver) -> None:
    run_one(seldom, record())
    run_one(seldom, held())
    assert await seldom.tracing.shutdown()
    (hold,), (route,), (server,) = (receiver.named(name) for name in ("hold", "route", "POST"))
    assert hold.span.end_time_unix_nano - hold.span.start_time_unix_nano == 250_000_000
    assert hold.span.end_time_unix_nano == route.span.start_time_unix_nano
    assert hold.span.parent_span_id == server.span.span_id
    assert route.attributes["smetric.hold.duration"] == 0.25
    assert route.attributes["smetric.decision.outcome"] == "held"


async def test_hold_span_says_what_the_request_waited_for(seldom: Telemetry, receiver: Receiver) -> None:
    decision = HOLDING.decide(Snapshot(["a"], {"requests": [5.0]}, {}, {}, {}, 0.0), request(), {}, 7)
    assert isinstance(decision, Decision)
    by_rule = held()
    by_rule.held_by = decision
    run_one(seldom, by_rule)
    run_one(seldom, held())
    assert await seldom.tracing.shutdown()
    first, second = (one.attributes for one in receiver.named("hold"))
    assert (first["smetric.hold.reason"], first["smetric.rule"]) == ("rule", "full")
    assert first["output.value"] == first["smetric.decision.summary"] == "full: held, for 2 s in all at most"
    assert second["smetric.hold.reason"] == "place"
    assert second["smetric.hold.duration"] == 0.25


async def test_trace_of_a_request_that_waited_for_a_place_is_ordinary(seldom: Telemetry, receiver: Receiver) -> None:
    run_one(seldom, held(names.ROUTED))
    assert await seldom.tracing.shutdown()
    assert receiver.spans == []


async def test_route_span_of_a_client_that_left_names_the_rule_that_held_it(
    seldom: Telemetry, receiver: Receiver
) -> None:
    decision = HOLDING.decide(Snapshot(["a"], {"requests": [5.0]}, {}, {}, {}, 0.0), request(), {}, 7)
    assert isinstance(decision, Decision)
    assert (decision.outcome, decision.wait_s) == (Outcome.HOLD, 2.0)
    exchange = begin(seldom)
    exchange.decided(
        DecisionRecord(
            time_ns=10**18,
            outcome=names.HELD,
            request=request(),
            policy=HOLDING,
            generation=1,
            decision=decision,
            held_s=0.5,
        )
    )
    exchange.end(499, error_type="client_gone")
    assert await seldom.tracing.shutdown()
    (route,) = receiver.named("route")
    assert route.attributes["smetric.rule"] == "full"
    assert route.attributes["smetric.hold.duration"] == 0.5
    assert "smetric.instance.id" not in route.attributes


async def test_trace_of_a_request_refused_for_overload_is_ordinary(seldom: Telemetry, receiver: Receiver) -> None:
    begin(seldom).end(503, error_type=names.OVERLOADED)
    assert await seldom.tracing.shutdown()
    assert receiver.spans == []


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://vllm", 80), ("https://vllm", 443), ("http://vllm:8000", 8000), ("https://[::1]:8443", 8443)],
)
def test_client_span_has_the_default_port_of_an_address(url: str, port: int) -> None:
    instances = fleet()
    for instance in instances:
        instance.url = url
    exchange = exchange_of(record(instances=instances))
    about, _ = of_attempt(exchange.attempt(ROUTE), "POST", ROUTE)
    assert about["server.port"] == port


POLICY = """
policy p
param OVERLOAD = 2.0 in 1.0..
param LOAD     = requests in {requests, unprefilled}
param STRICT   = true
route argmin(LOAD)  when STRICT and max(requests) > OVERLOAD * mean(requests)
route argmax(LOAD)
"""


#: Tempo cuts an attribute's value here.
MOST = 2048


#: Every feature that is read is a column of the table, and every guard a long line.
WIDE = """policy wide
keep   kv_usage < {kv:.3f} or healthy as {label}_filter
reject 429 "full" when min(requests) > 1e12 requests and min(waiting) >= 0 requests as {label}_full
route  argmax(hit_len) when req.turn != 0 and max(requests) <= {loads:.3f} * (mean(requests) + 1 request) and \
min(running) < {loads:.3f} * (mean(running) + 1 request) and max(hit_len) > 0.125 * req.prompt_len as {label}_stick
route  argmin(norm(requests) + norm(waiting) + norm(running) + norm(kv_usage) + norm(unprefilled)) as {label}
"""


FEATURES = ("hit_len", "requests", "waiting", "running", "kv_usage", "unprefilled", "healthy")


NUMBERS = st.floats(0, 1e15, allow_nan=False) | st.integers(0, 100).map(float)


def test_params_are_marked_where_configuration_set_one() -> None:
    policy = load(POLICY, VOCABULARY, settings={"OVERLOAD": 1.5})
    assert params_of(policy) == "OVERLOAD=1.5* LOAD=requests STRICT=true"


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    """With any ids, labels, values, unknown cells, ages and sources."""
    label = draw(st.sampled_from(["a", "a_label_" + "x" * 48]))
    source = WIDE.format(label=label, kv=draw(st.floats(0, 1)), loads=draw(st.floats(0.5, 9)))
    policy = load(source, VOCABULARY)
    texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=128)
    ids = draw(st.lists(texts, min_size=1, max_size=24, unique=True))
    count = len(ids)

    def column(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=count, max_size=count))

    columns = {name: column(st.booleans() if name == "healthy" else NUMBERS) for name in FEATURES}
    known = {name: column(st.booleans()) for name in draw(st.sets(st.sampled_from(FEATURES[:-1])))}
    stamps = {name: column(st.none() | st.floats(0, 1000)) for name in draw(st.sets(st.sampled_from(FEATURES[1:5])))}
    origins = {"hit_len": column(st.sampled_from(["", "prefix_index", "lmcache:" + "x" * 100]))}
    asked = request(turn=draw(st.sampled_from([0, 3])), model=draw(texts), session=draw(texts))
    snapshot = Snapshot(ids, columns, known, stamps, origins, 1000.0)  # type: ignore[arg-type]
    decision = policy.decide(snapshot, asked, {}, 7)
    assert isinstance(decision, Decision)
    return decision


@pytest.mark.slow
@given(decisions(), st.integers(0, 32), st.text(max_size=128))
@settings(max_examples=60)
def test_attribute_is_no_longer_than_collectors_keep(decision: Decision, top: int, id: str) -> None:
    made = DecisionRecord(
        time_ns=1,
        outcome=names.ROUTED,
        request=decision.request,
        policy=decision.policy,
        generation=1,
        decision=decision,
    )
    if decision.index >= 0:
        made.instance = Instance(decision.snapshot.ids[decision.index], "http://10.0.0.1:8000")
        made.migration = migration_of(made, id)
        made.forecast = Forecast(1.0, id, 2.0, 3)
    about = of_decision(made, configured=99, left_out="model=3 " * 9, top=top, limit=2000, ui_hints=True, salt=b"salt")
    for name, value in about.items():
        assert len(str(value).encode()) <= MOST, name
    rows = orjson.loads(about["smetric.candidates.json"])
    assert len(rows) <= top
    assert about["output.value"].startswith(about["smetric.decision.summary"])
    ranks = [row["rank"] for row in rows if "rank" in row]
    assert ranks == list(range(len(ranks)))
    assert all(row["filtered_by"] for row in rows if "rank" not in row)


MOST_LOADED = load("policy most\nroute argmax(requests) as most\n", VOCABULARY)


def shadowed(made: DecisionRecord, answer: str = names.DIFFERS, had_diverged: bool | None = None) -> Shadowed:
    assert made.decision is not None
    decided = MOST_LOADED.decide(made.decision.snapshot, made.request, {}, 7)
    assert isinstance(decided, Decision)
    return Shadowed(MOST_LOADED, 3, answer, decision=decided, regret=0.5, had_diverged=had_diverged)


UNKNOWN = Shadowed(MOST_LOADED, 3, names.UNANSWERED, missing=("kv_usage",))


async def test_shadow_has_a_span_beside_the_decision(app: Telemetry, receiver: Receiver) -> None:
    made = record(loads=(2, 1, 5))
    made.judge = lambda one: (shadowed(one), UNKNOWN)
    exchange = begin(app)
    exchange.decided(made)
    exchange.answering()
    exchange.end(200)
    await app.tracing.shutdown()
    (route,), shadows = receiver.named("route"), receiver.named("shadow")
    shown = route.attributes["output.value"].splitlines()
    assert "  shadow   most would choose gpu-2, regret 0.5" in shown
    assert "  shadow   most: not answerable: kv_usage not read" in shown
    assert [one.name for one in shadows] == ["shadow most"] * 2
    assert {one.span.parent_span_id for one in shadows} == {route.span.parent_span_id}
    assert route.attributes["smetric.decision.origin"] == "live"
    assert route.attributes["smetric.shadow.policy"] == "most, most"
    assert route.attributes["smetric.shadow.instance.id"] == "gpu-2, not answerable: kv_usage not read"
    assert route.attributes["smetric.shadow.regret"] == 0.5
    assert "smetric.shadow.agrees" not in route.attributes
    known, unknown = (one.attributes for one in shadows)
    assert known["smetric.decision.origin"] == unknown["smetric.decision.origin"] == "shadow"
    assert (known["smetric.instance.id"], known["smetric.shadow.agrees"]) == ("gpu-2", False)
    assert known["output.value"].startswith("most (shadow): ")
    assert "requests" in known["output.value"]
    assert unknown["output.value"] == "most (shadow): not answerable: kv_usage not read"
    assert "smetric.instance.id" not in unknown


def test_shadows_agree_if_all_of_them_do() -> None:
    made = record()
    alike = shadowed(made, answer=names.AGREES, had_diverged=False)
    other = shadowed(made, had_diverged=True)
    assert of_shadows(()) == {}
    assert of_shadows([alike])[names.SHADOW_AGREES] is True
    assert of_shadows([alike, other])[names.SHADOW_AGREES] is False
    assert of_shadows([alike])[names.SHADOW_DIVERGED] is False
    assert of_shadows([alike, other])[names.SHADOW_DIVERGED] is True


def test_texts_of_shadows_are_bounded() -> None:
    long = load(f"policy {'p' * 60}\nroute argmax(requests)\n", VOCABULARY)
    several = [Shadowed(long, 1, names.UNANSWERED, missing=("hit_len",))] * 8
    assert all(len(str(value)) <= 256 for value in of_shadows(several).values())
    about = of_shadow(shadowed(record(hits=[0] * 200, loads=[1] * 200)), top=32, limit=2000, ui_hints=True)
    assert all(len(str(value).encode()) <= 2000 for value in about.values())


def test_shadow_that_raised_has_an_error_as_its_choice() -> None:
    failed = Shadowed(MOST_LOADED, 1, names.SHADOW_FAILED)
    assert failed.choice == "error"
    assert of_shadow(failed, top=8, limit=2000, ui_hints=False)[names.SUMMARY] == "most (shadow): error"


async def test_keep_sampler_keeps_the_trace_of_a_migration(
    traced: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = traced(TRACES_SAMPLER="always_off")
    run_one(app, record())
    with capture_logs() as lines:
        run_one(app, record(loads=(2, 30, 1)))
    assert await app.tracing.shutdown()
    (route,) = receiver.named("route")
    about = route.attributes
    assert about["smetric.migration.from"] == "gpu-1"
    assert about["smetric.instance.id"] == "gpu-2"
    assert "not_overloaded" in about["smetric.migration.guard"]
    assert about["smetric.migration.left_tokens"] == 880
    assert "moved    from gpu-1, which keeps 880 tokens more: not_overloaded" in about["output.value"]
    (said,) = [line for line in lines if line["event"] == "smetric.migration"]
    assert (said["from"], said["to"], said["rule"], said["left_tokens"]) == ("gpu-1", "gpu-2", "balance", 880)
    assert said["trace_id"] == route.span.trace_id.hex()
    access = next(line for line in lines if line["event"] == "request")
    assert (access["migrated_from"], access["left_tokens"]) == ("gpu-1", 880)


async def test_keep_sampler_drops_migrations_where_they_are_not_to_be_kept(
    traced: Callable[..., Telemetry], receiver: Receiver
) -> None:
    app = traced(options={"keep": ("rejected",)}, TRACES_SAMPLER="always_off")
    run_one(app, record(loads=(2, 30, 1)))
    run_one(app, record(names.ERROR))
    run_one(app, record(names.REJECTED))
    assert await app.tracing.shutdown()
    assert [one.attributes["smetric.decision.outcome"] for one in receiver.named("route")] == ["rejected"]


@pytest.mark.parametrize(("over_parent", "outcomes"), [(True, ["routed", "rejected"]), (False, [])])
async def test_keep_sampler_keeps_traces_over_an_unsampled_parent_where_asked(
    traced: Callable[..., Telemetry], receiver: Receiver, over_parent: bool, outcomes: list[str]
) -> None:
    unsampled = (b"traceparent", b"00-%b-%b-00" % (b"4b" * 16, b"0f" * 8))
    app = traced(options={"keep_over_parent": over_parent}, TRACES_SAMPLER="always_off")
    run_one(app, record(loads=(2, 30, 1)), unsampled)
    run_one(app, record(names.REJECTED), unsampled)
    run_one(app, record(names.REJECTED))
    assert await app.tracing.shutdown()
    routes = receiver.named("route")
    continued = [one for one in routes if one.span.trace_id == b"\x4b" * 16]
    assert [one.attributes["smetric.decision.outcome"] for one in continued] == outcomes
    assert len(routes) == len(outcomes) + 1

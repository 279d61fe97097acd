from __future__ import annotations

from collections.abc import Iterator

import pytest

from smetric.request.request import Api
from smetric.telemetry.exchange import Telemetry
from tests.telemetry.otlp_receiver import Receiver, receiving
from tests.telemetry.samples import ROUTE, begin, record, scope, telemetry


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def app(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Telemetry:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    return telemetry({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url})


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
async def test_an_attempt_bears_the_name_of_what_it_does(
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


async def test_the_callers_random_flag_goes_on_to_the_instance(app: Telemetry) -> None:
    for came, trusted, sent in ((b"03", True, b"-03"), (b"01", True, b"-01"), (b"03", False, b"-01")):
        exchange = begin(app, (b"traceparent", b"00-%b-%b-%b" % (b"4b" * 16, b"0f" * 8, came)), trusted=trusted)
        exchange.decided(record())
        assert dict(exchange.attempt(ROUTE).headers)[b"traceparent"].endswith(sent)
        exchange.end(200)
    assert await app.tracing.shutdown()

from __future__ import annotations

import orjson
import pytest

from smetric.errors import HttpError, NoCandidate, RequestError, Shed, UpstreamError
from smetric.http.headers import Message
from smetric.proxy.error_response import error_body, error_event, send_error

BROKEN = UpstreamError("the instance broke off its answer", reason="closed")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_error_body_of_openai_apis(path: str) -> None:
    error = RequestError("no", param="messages")
    told = {"message": "no", "type": "invalid_request_error", "param": "messages", "code": 400}
    assert orjson.loads(error_body(path, error)) == {"error": told}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_error_body_of_the_messages_api(status: int, kind: str) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = orjson.loads(error_body(path, HttpError(status, "no", "any")))
        assert body == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_error_event_has_the_shape_of_its_api() -> None:
    chat = error_event("/v1/chat/completions", BROKEN)
    assert chat.startswith(b'data: {"error":')
    messages = error_event("/v1/messages", BROKEN)
    assert messages.startswith(b'event: error\ndata: {"type":"error","error":')
    responses = error_event("/v1/responses", BROKEN)
    assert responses.startswith(b'event: error\ndata: {"type":"error","code":"upstream_error"')
    for event in (chat, messages, responses):
        assert event.endswith(b"\n\n")
        assert event.count(b"\n\n") == 1
        orjson.loads(event.partition(b"data: ")[2])


async def sent(error: HttpError) -> tuple[int, dict[bytes, bytes], bytes]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await send_error(send, "/v1/chat/completions", error, [(b"x-smetric-rule", b"shed")])
    return messages[0]["status"], dict(messages[0]["headers"]), messages[1]["body"]


async def test_error_answer_has_length_retry_after_and_given_headers() -> None:
    status, headers, body = await sent(Shed(429, "busy", 2.6))
    assert status == 429
    assert headers[b"retry-after"] == b"3"
    assert headers[b"content-length"] == str(len(body)).encode()
    assert headers[b"x-smetric-rule"] == b"shed"
    assert (await sent(NoCandidate("nobody", retry_after_s=0.01)))[1][b"retry-after"] == b"1"
    assert b"retry-after" not in (await sent(RequestError("no")))[1]
    headers = (await sent(Shed(429, "full", -3.0)))[1]  # what a policy computed from how long it was held
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"1", b"0")

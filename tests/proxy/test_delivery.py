from __future__ import annotations

import pytest

from smetric.proxy.delivery import AnswerObserver
from smetric.request.request import Api, Usage
from tests.fakes import DONE, capture, delta


def body_of(name: str) -> bytes:
    """The body of a captured response, without chunk framing."""
    head, _, rest = capture(name)[1].partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


def observed(api: Api, body: bytes, size: int, *, is_stream: bool) -> AnswerObserver:
    observer = AnswerObserver(api, is_stream=is_stream)
    for at in range(0, len(body), size):
        observer.passed(body[at : at + size])
    return observer


ANSWERS: list[tuple[str, Api, Usage | None]] = [
    ("chat", Api.CHAT, Usage(413, 16, 0)),
    ("chat_cached", Api.CHAT, None),
    ("compl_text", Api.COMPLETIONS, None),
    ("messages", Api.MESSAGES, Usage(17, 4, 0)),
    ("messages_cached2", Api.MESSAGES, Usage(391, 2, 384)),
    ("responses", Api.RESPONSES, Usage(17, 4, 0)),
    ("responses_cached", Api.RESPONSES, Usage(391, 2, 384)),
]
STREAMS: list[tuple[str, Api, Usage | None]] = [
    ("chat_stream", Api.CHAT, Usage(413, 16, 384)),
    ("compl_stream", Api.COMPLETIONS, Usage(4, 4, 0)),
    ("messages_stream", Api.MESSAGES, Usage(28, 4, 0)),
    ("responses_stream", Api.RESPONSES, Usage(17, 4, 0)),
]


@pytest.mark.parametrize(("name", "api", "usage"), ANSWERS + STREAMS)
@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_observer_finds_usage_in_every_api_and_cut(name: str, api: Api, usage: Usage | None, size: int) -> None:
    body = body_of(name)
    observer = observed(api, body, size, is_stream=name.endswith("_stream"))
    found = observer.usage()
    assert found is not None
    assert found == usage or usage is None
    assert found.prompt_tokens
    assert observer.ended
    assert observer.size == len(body)


@pytest.mark.parametrize(("name", "api", "usage"), STREAMS)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_observer_sees_the_end_with_the_last_event(name: str, api: Api, usage: Usage | None, size: int) -> None:
    body = body_of(name)
    last = body.rstrip(b"\n").rfind(b"\n\n") + 2
    short = observed(api, body[:last], size, is_stream=True)
    assert not short.ended
    assert not short.is_engine_error


def test_observer_ignores_end_markers_in_the_text_of_a_model() -> None:
    text = r"data: [DONE]\n\ndata: [DONE]\n\nevent: message_stop response.completed \"error\""
    for api in (Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES):
        observer = observed(api, delta(text), 5, is_stream=True)
        assert not observer.ended
        assert not observer.is_engine_error


def test_observer_ignores_an_empty_error_field() -> None:
    event = b'event: response.created\ndata: {"response":{"id":"resp_1","error":null}}\n\n'
    observer = observed(Api.RESPONSES, event, 9, is_stream=True)
    assert not observer.ended
    assert not observer.is_engine_error


@pytest.mark.parametrize("end", [b"data: [DONE]\r\n\r\n", b"data:[DONE]\n\n", DONE])
def test_observer_knows_each_spelling_of_done(end: bytes) -> None:
    assert observed(Api.CHAT, b"data: {}\r\n\r\n" + end, 3, is_stream=True).ended
    assert observed(Api.CHAT, end, 3, is_stream=True).ended


def test_observer_sees_an_error_event_of_the_engine() -> None:
    assert observed(Api.CHAT, delta("a") + b'data: {"error": {"message": "x"}}\n\n', 4, is_stream=True).is_engine_error


def test_observer_finds_the_response_id() -> None:
    for name, stream in (("responses", False), ("responses_stream", True)):
        found = observed(Api.RESPONSES, body_of(name), 11, is_stream=stream).response_id()
        assert found.startswith("resp_")
        assert b'"id":"' + found.encode() + b'"' in body_of(name)
    assert observed(Api.CHAT, body_of("chat"), 11, is_stream=False).response_id() == ""


@pytest.mark.parametrize("count", ["-5", "2147483648", "1" + "0" * 30])
def test_observer_rejects_impossible_token_counts(count: str) -> None:
    for usage in (
        '{"prompt_tokens":%s,"completion_tokens":1}',
        '{"prompt_tokens":1,"completion_tokens":%s}',
        '{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":%s}}',
        '{"input_tokens":1,"output_tokens":1,"cache_read_input_tokens":%s}',
    ):
        body = ('{"usage":' + usage % count + "}").encode()
        assert observed(Api.CHAT, body, 100, is_stream=False).usage() is None


def test_observer_prefers_the_usage_of_the_answer_itself() -> None:
    body = b'{"usage":{"prompt_tokens":5,"completion_tokens":2},"metadata":{"usage":{"prompt_tokens":1}}}'
    assert observed(Api.CHAT, body, 20, is_stream=False).usage() == Usage(5, 2, None)


def test_observer_sees_an_abort_outside_texts_alone() -> None:
    for reason in (b'"finish_reason":"abort"', b'"finish_reason": "abort"'):
        assert observed(Api.CHAT, b'{"choices":[{%b}]}' % reason, 7, is_stream=False).is_aborted()
    said = b'{"choices":[{"text":"\\"finish_reason\\":\\"abort\\"","stop":"abort","finish_reason":"stop"}]}'
    assert not observed(Api.CHAT, said, 7, is_stream=False).is_aborted()


def test_observer_rejects_broken_usage() -> None:
    for body in (b'{"usage":', b'{"usage":{"prompt_tokens":"x"}}', b'{"usage":null}', b"", b'{"usage":{"prompt_tok'):
        assert observed(Api.CHAT, body, 100, is_stream=False).usage() is None


@pytest.mark.parametrize(
    ("name", "api", "reason"),
    [
        ("chat", Api.CHAT, "length"),
        ("compl_text", Api.COMPLETIONS, "length"),
        ("messages", Api.MESSAGES, "max_tokens"),
        ("responses", Api.RESPONSES, "incomplete"),
        ("chat_stream", Api.CHAT, "length"),
        ("compl_stream", Api.COMPLETIONS, "length"),
        ("messages_stream", Api.MESSAGES, "max_tokens"),
        ("responses_stream", Api.RESPONSES, "incomplete"),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_observer_finds_the_finish_reason_in_every_api(name: str, api: Api, reason: str, size: int) -> None:
    assert observed(api, body_of(name), size, is_stream=name.endswith("_stream")).finish_reason() == reason


def test_observer_ignores_a_finish_reason_in_a_text() -> None:
    body = b'{"choices":[{"text":"\\"finish_reason\\":\\"stop\\"","finish_reason":null}]}'
    assert observed(Api.COMPLETIONS, body, 1 << 20, is_stream=False).finish_reason() == ""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 20])
def test_observer_counts_events_in_every_cut(size: int) -> None:
    body = body_of("chat_stream")
    assert observed(Api.CHAT, body, size, is_stream=True).events == body.count(b"\n\n") > 10
    assert observed(Api.CHAT, body, size, is_stream=False).events == 0

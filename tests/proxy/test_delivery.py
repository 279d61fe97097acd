from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.proxy.delivery import KEPT_BYTES, AnswerObserver
from smetric.request.request import Api, Usage
from tests.fakes import DONE, USAGE, capture, delta


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


def observed(api: Api, body: bytes, size: int = 1 << 20, *, is_stream: bool = True) -> AnswerObserver:
    observer = AnswerObserver(api, is_stream=is_stream)
    for at in range(0, len(body), size):
        observer.passed(body[at : at + size])
    observer.finish()
    return observer


def event(type: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), orjson.dumps({"type": type, **fields}))


def found(observer: AnswerObserver) -> tuple[object, ...]:
    """All that was seen in an answer, however its bytes were cut."""
    return (
        *(observer.usage(), observer.finish_reason, observer.response_id, observer.events, observer.size),
        *(observer.ended, observer.has_output, observer.has_error, observer.is_refusal, observer.is_past_mark),
    )


ANSWERS: list[tuple[str, Api, Usage, str]] = [
    ("chat", Api.CHAT, Usage(413, 16, 0), "length"),
    ("chat_cached", Api.CHAT, Usage(413, 16, 384), "length"),
    ("compl_text", Api.COMPLETIONS, Usage(4, 4, 0), "length"),
    ("messages", Api.MESSAGES, Usage(17, 4, 0), "max_tokens"),
    ("messages_cached2", Api.MESSAGES, Usage(391, 2, 384), "max_tokens"),
    ("responses", Api.RESPONSES, Usage(17, 4, 0), "incomplete"),
    ("responses_cached", Api.RESPONSES, Usage(391, 2, 384), "incomplete"),
]
STREAMS: list[tuple[str, Api, Usage | None, str]] = [
    ("chat_stream", Api.CHAT, Usage(413, 16, 384), "length"),
    ("chat_stream_contusage", Api.CHAT, Usage(413, 4, 384), "length"),
    ("chat_stream_nousage", Api.CHAT, None, "length"),
    ("chat_tools_required_stream", Api.CHAT, Usage(108, 40, 96), "length"),
    ("compl_stream", Api.COMPLETIONS, Usage(4, 4, 0), "length"),
    ("messages_stream", Api.MESSAGES, Usage(28, 4, 0), "max_tokens"),
    ("responses_stream", Api.RESPONSES, Usage(17, 4, 0), "incomplete"),
]
#: Events of each captured stream before its first output, and from there to its last event, which is not among them.
PARTS = {
    "chat_stream": (1, 17),
    "chat_stream_contusage": (1, 5),
    "compl_stream": (0, 5),
    "messages_stream": (2, 6),
    "responses_stream": (4, 5),
}


@pytest.mark.parametrize(("name", "api", "usage", "reason"), [*ANSWERS, *STREAMS])
@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_observer_reads_answers_of_every_api_in_every_cut(
    name: str, api: Api, usage: Usage | None, reason: str, size: int
) -> None:
    body = body_of(name)
    observer = observed(api, body, size, is_stream="_stream" in name)
    assert (observer.usage(), observer.finish_reason) == (usage, reason)
    assert observer.ended
    assert observer.has_output
    assert not observer.has_error
    assert observer.size == len(body)
    assert observer.response_id.startswith("resp_") is (api is Api.RESPONSES)


@pytest.mark.parametrize("name", PARTS)
def test_observer_sees_output_and_end_with_the_events_that_hold_them(name: str) -> None:
    api = next(api for stream, api, *_ in STREAMS if stream == name)
    before, events = PARTS[name]
    observer = AnswerObserver(api, is_stream=True)
    seen = []
    for one in body_of(name).split(b"\n\n")[:-1]:
        observer.passed(one + b"\n\n")
        seen.append((observer.has_output, observer.ended))
    last = (True, True)
    assert seen == [*[(False, False)] * before, *[(True, False)] * events, last]
    assert observer.events == events


WITHOUT_OUTPUT = {
    Api.CHAT: [
        b": ping\n\n",
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"usage":null}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[{}]}\n\n',
    ],
    Api.COMPLETIONS: [b"event: x\nid: 1\n\n", b'data: {"choices":[{"index":0,"text":"","finish_reason":null}]}\n\n'],
    Api.MESSAGES: [
        event("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 1}}),
        event("ping"),
        event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    ],
    Api.RESPONSES: [
        event("response.created", response={"id": "resp_1", "status": "in_progress", "output": []}),
        event("response.queued", response={"id": "resp_1"}),
        event("response.in_progress", response={"id": "resp_1", "error": None, "instructions": "x" * 2 * KEPT_BYTES}),
        event("response.output_item.added", item={"type": "message", "content": []}),
        event("response.content_part.added", part={"type": "output_text", "text": ""}),
    ],
    Api.OTHER: [b": keep-alive\n\n", b"\n\n"],
}
OUTPUT = {
    Api.CHAT: [
        delta("a"),
        b'data: {"choices":[{"delta":{"reasoning_content":"a"}}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","content":null,"tool_calls":[{"index":0}]}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":""},"token_ids":[7]}]}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
        b"data: of an unknown shape\n\n",
    ],
    Api.COMPLETIONS: [b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'],
    Api.MESSAGES: [event("content_block_delta", delta={"type": "thinking_delta"}), event("content_block_stop")],
    Api.RESPONSES: [event("response.reasoning_text.delta", delta="a"), event("response.output_item.done")],
    Api.OTHER: [b'data: {"object":"transcription.chunk","choices":[{"delta":{"content":"a"}}]}\n\n', b"data: x\n\n"],
}


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("is_named", [True, False], ids=["with event lines", "without"])
@pytest.mark.parametrize("size", [5, 1 << 20])
def test_observer_takes_only_output_for_the_end_of_the_prefill(api: Api, is_named: bool, size: int) -> None:
    def lines(text: bytes) -> bytes:
        return text if is_named else b"\n".join(line for line in text.split(b"\n") if not line.startswith(b"event:"))

    before = lines(b"".join(WITHOUT_OUTPUT[api]))
    assert not observed(api, before, size).has_output
    assert [observed(api, lines(one), size).events for one in WITHOUT_OUTPUT[api]] == [0] * len(WITHOUT_OUTPUT[api])
    for output in OUTPUT[api]:
        assert observed(api, before + lines(output), size).has_output, output


@given(
    st.sampled_from(STREAMS),
    st.lists(st.integers(1, 400), min_size=1),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.sampled_from([b"", b": comment\n\n", b"id: 7\nretry: 10\n", b"\n", b":\n"]),
    st.booleans(),
)
def test_observer_reads_streams_of_any_cut_line_break_and_further_lines(
    stream: tuple[str, Api, Usage | None, str], cuts: list[int], line_break: bytes, further: bytes, has_bom: bool
) -> None:
    name, api, *_ = stream
    body = body_of(name)
    expected = found(observed(api, body))
    sent = b"".join(further + one + b"\n\n" for one in body.split(b"\n\n")[:-1]).replace(b"\n", line_break)
    sent = b"\xef\xbb\xbf" * has_bom + sent
    observer = AnswerObserver(api, is_stream=True)
    at = 0
    while at < len(sent):
        for cut in cuts:
            observer.passed(sent[at : at + cut])
            at += cut
    observer.finish()
    assert found(observer) == (*expected[:4], len(sent), *expected[5:])


def test_observer_joins_the_data_lines_of_an_event() -> None:
    lines = b'event: message_delta\ndata: {"type": "message_delta",\ndata: "usage": {"output_tokens":\ndata: 7}}\n\n'
    for size in (1, 1 << 20):
        observer = observed(Api.MESSAGES, lines, size)
        assert (observer.usage(), observer.events) == (Usage(None, 7, None), 1)


TOKEN_IDS = b'"prompt_token_ids":[%b]' % b",".join(b"%d" % n for n in range(100_000, 103_000))
LOGPROBS = b'"prompt_logprobs":[null%b]' % (b',{"1":{"logprob":-1.5,"decoded_token":"a"}}' * 900)
NESTED = USAGE.replace(b"}", b',"tiers":{"gpu":15}}') + b"}"


@pytest.mark.parametrize("text", [b"", b"y" * 40_000], ids=["a short text", "a long text"])
@pytest.mark.parametrize("usage", [USAGE + b"}", NESTED], ids=["details", "details of details"])
@pytest.mark.parametrize("behind", [b'"a":null', TOKEN_IDS, LOGPROBS], ids=["nothing", "token ids", "logprobs"])
@pytest.mark.parametrize("size", [333, 1 << 20])
def test_observer_finds_usage_wherever_it_stands(text: bytes, usage: bytes, behind: bytes, size: int) -> None:
    body = b'{"choices":[{"message":{"content":"%b"},"finish_reason":"stop"}],%b,%b}' % (text, usage, behind)
    for is_stream, sent in ((False, body), (True, b"data: %b\n\n" % body + DONE)):
        observer = observed(Api.CHAT, sent, size, is_stream=is_stream)
        assert (observer.usage(), observer.finish_reason) == (Usage(20, 2, 16), "stop")
        assert observer.ended


@pytest.mark.parametrize("is_named", [True, False], ids=["with an event line", "without"])
def test_observer_reads_a_last_event_of_any_length(is_named: bool) -> None:
    output, usage = [{"text": "y" * 200_000}], {"input_tokens": 9, "output_tokens": 4}
    tools = [{"type": "function", "name": "x" * 50_000}]
    done = {"id": "resp_9", "output": output, "status": "completed", "usage": usage, "tools": tools}
    data = orjson.dumps({"response": done, "type": "response.completed"})
    body = b"event: response.completed\n" * is_named + b"data: " + data
    for size in (1000, 1 << 20):
        observer = observed(Api.RESPONSES, body + b"\n\n", size)
        assert (observer.usage(), observer.response_id) == (Usage(9, 4, None), "resp_9")
        assert observer.finish_reason == "completed"
        assert observer.is_past_mark
        assert not observed(Api.RESPONSES, body, size).ended


@pytest.mark.parametrize(
    ("start", "end", "usage"),
    [
        (
            {"input_tokens": 0, "output_tokens": 0},
            {"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": 3},
            8,
        ),
        ({"input_tokens": 5, "output_tokens": 1, "cache_read_input_tokens": 3}, {"output_tokens": 7}, 8),
        (
            {"input_tokens": 5, "output_tokens": 1, "cache_read_input_tokens": 3},
            {"input_tokens": 5, "output_tokens": 7},
            8,
        ),
        (
            {"input_tokens": 5, "output_tokens": 1, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 2},
            {"output_tokens": 7, "cache_read_input_tokens": None},
            10,
        ),
    ],
)
def test_observer_adds_up_the_usage_of_messages(start: object, end: object, usage: int) -> None:
    body = event("message_start", message={"usage": start}) + event("content_block_delta", delta={}) * 200
    body += event("message_delta", usage=end) + event("message_stop")
    assert observed(Api.MESSAGES, body).usage() == Usage(usage, 7, 3)


LAST = [
    (Api.CHAT, b"data: [DONE]\n\n"),
    (Api.CHAT, b"data:[DONE]\r\n\r\n"),
    (Api.COMPLETIONS, b"data: [DONE]\n\n: bye\n\n"),
    (Api.MESSAGES, event("message_stop")),
    (Api.MESSAGES, b'data: {"type": "message_stop"}\n\n'),
    (Api.RESPONSES, event("response.completed", response={"id": "resp_1", "error": None})),
    (Api.RESPONSES, b'data: {"response":{},"type":"response.incomplete"}\n\n'),
]


@pytest.mark.parametrize(("api", "last"), LAST)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_observer_needs_the_whole_last_event(api: Api, last: bytes, size: int) -> None:
    begun = OUTPUT[api][0]
    assert observed(api, begun + last, size).is_past_mark
    whole = last.rindex(b"}" if b"}" in last else b"]") + 1
    assert not observed(api, begun + last[: whole - 1], size).ended
    # Behind [DONE] nothing can be missing. An event without its blank line is none, as clients read it.
    assert observed(api, begun + last[:whole], size).ended is (b"[DONE]" in last)


@pytest.mark.parametrize(
    ("api", "said", "is_refusal"),
    [
        (Api.CHAT, b'data: {"error": {"message": "x", "type": "InternalServerError", "code": 500}}\n\n', False),
        (Api.CHAT, b'data: {"error":"gone"}\n\n', False),
        (Api.COMPLETIONS, b'data: {"error":{"message":"x","type":"BadRequestError","code":400}}\n\n', True),
        (Api.MESSAGES, event("error", error={"type": "overloaded_error"}), False),
        (Api.MESSAGES, event("error", error={"type": "invalid_request_error"}), True),
        (Api.RESPONSES, event("error", code="server_error", message="x"), False),
        (Api.RESPONSES, event("response.failed", response={"error": {"code": "server_error"}}), False),
        (Api.RESPONSES, event("response.failed", response={"error": {"code": "invalid_prompt"}}), True),
        (Api.OTHER, b'data: {"error":{"message":"x"}}\n\n', False),
    ],
)
def test_observer_distinguishes_errors_of_the_engine_from_refusals(api: Api, said: bytes, is_refusal: bool) -> None:
    for begun in (b"", OUTPUT[api][0]):
        for size in (4, 1 << 20):
            observer = observed(api, begun + said + DONE, size)
            assert (observer.has_error, observer.is_refusal) == (True, is_refusal)
            assert observer.ended
            assert observer.has_output is bool(begun) or api is Api.OTHER
    plain = b'{"id":"resp_1","object":"response","status":"failed","error":{"code":"server_error"}}'
    assert observed(Api.RESPONSES, plain, is_stream=False).has_error


def test_observer_ignores_marks_in_the_text_of_a_model() -> None:
    text = r"data: [DONE]\n\nevent: message_stop response.completed \"error\":{} \"finish_reason\":\"abort\""
    for api in (Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES):
        observer = observed(api, delta("a") + delta(text) * 2, 5)
        assert (observer.ended, observer.has_error, observer.finish_reason) == (False, False, "")
    assert observed(Api.CHAT, b'{"choices":[{"text":"%b"}]}' % text.encode(), is_stream=False).finish_reason == ""


@pytest.mark.parametrize("reason", [b'"finish_reason":"abort"', b'"finish_reason": "abort"'])
def test_observer_finds_the_finish_reason_behind_output(reason: bytes) -> None:
    chunk = b'data: {"choices":[{"delta":{"content":"%b"},%b}]}\n\n'
    body = chunk % (b"a", b'"finish_reason":null') * 3 + chunk % (b"", reason) + DONE
    assert observed(Api.CHAT, body, 7).finish_reason == "abort"
    assert observed(Api.CHAT, b'{"choices":[{%b}]}' % reason, 7, is_stream=False).finish_reason == "abort"


IMPOSSIBLE = ("-5", "2147483648", "1" + "0" * 30)
USAGES = (
    '{"prompt_tokens":%s,"completion_tokens":1}',
    '{"prompt_tokens":1,"completion_tokens":%s}',
    '{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":%s}}',
    '{"input_tokens":1,"output_tokens":1,"cache_read_input_tokens":%s}',
)


@pytest.mark.parametrize(
    "usage",
    [*(usage % count for usage in USAGES for count in IMPOSSIBLE), "", '{"prompt_tokens":"x"}', "null", '{"prompt_tok'],
)
def test_observer_rejects_impossible_and_broken_usage(usage: str) -> None:
    body = '{"usage":' + usage + "}"
    assert observed(Api.CHAT, body.encode(), 100, is_stream=False).usage() is None


def test_observer_prefers_the_usage_of_the_answer_itself() -> None:
    body = b'{"usage":{"prompt_tokens":5,"completion_tokens":2},"metadata":{"usage":{"prompt_tokens":1}}}'
    assert observed(Api.CHAT, body, 20, is_stream=False).usage() == Usage(5, 2, None)

"""What agents send is read as they mean it: by the router, and by an engine whose cache is to be hit."""

import orjson
import pytest

from smetric.lab.demo.play import MODEL, Chat, Dialect, Messages, Reply, load_sessions
from smetric.lab.emulator.call import Call, Fields, Limits
from smetric.lab.emulator.chat import parse_chat
from smetric.lab.emulator.messages import parse_message
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio

SESSION = load_sessions()[0]
REPLIES = [" one two six", " ten new old", " big now and"]
DIALECTS = pytest.mark.parametrize(("dialect", "api"), [(Chat(), Api.CHAT), (Messages(), Api.MESSAGES)])


def as_engine(api: Api, body: bytes) -> Call:
    parse_call = parse_chat if api is Api.CHAT else parse_message
    return parse_call(Fields.of_body(body), Limits((MODEL,), 40_960))


def as_router(api: Api, body: bytes) -> InferenceRequest:
    return parse(api, body, [], TokenRatio(), ReaderSettings())


@DIALECTS
def test_each_turn_carries_the_whole_history(dialect: Dialect, api: Api) -> None:
    for number in range(len(REPLIES) + 1):
        request = as_router(api, dialect.body(SESSION, REPLIES[:number]))
        assert request.turn == number
        assert request.stream
        assert request.model == MODEL


@DIALECTS
def test_a_prompt_and_its_reply_are_the_beginning_of_the_next_prompt(dialect: Dialect, api: Api) -> None:
    prompts = [as_engine(api, dialect.body(SESSION, REPLIES[:number])).prompts[0] for number in range(4)]
    for before, reply, after in zip(prompts, REPLIES, prompts[1:], strict=False):
        assert after.startswith(before + reply.encode())


@DIALECTS
def test_a_prompt_has_about_the_recorded_length(dialect: Dialect, api: Api) -> None:
    recorded = SESSION.tools + SESSION.system + SESSION.turns[0].new
    call = as_engine(api, dialect.body(SESSION, []))
    assert len(call.prompts[0]) // 4 == pytest.approx(recorded, rel=0.05)
    assert call.limit == SESSION.turns[0].output
    assert call.exact


def test_the_billing_header_changes_with_every_request_and_cache_marks_move() -> None:
    bodies = [orjson.loads(Messages().body(SESSION, REPLIES[:number])) for number in range(2)]
    first, second = (body["system"][0]["text"] for body in bodies)
    assert first != second
    assert first.startswith("x-anthropic-billing-header:")
    marked = [["cache_control" in message["content"][0] for message in body["messages"]] for body in bodies]
    assert marked == [[True], [False, False, True]]


def test_a_reply_in_chunks_is_read_back() -> None:
    reply = Reply()
    for data in (
        b'{"choices":[{"delta":{"role":"assistant","content":""}}]}',
        b'{"choices":[{"delta":{"content":" one"}}]}',
        b'{"choices":[{"delta":{"content":" two"}}]}',
        b'{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}',
    ):
        Chat().read(data, reply)
    assert not reply.is_complete
    Chat().read(b"[DONE]", reply)
    assert reply == Reply(["", " one", " two"], 9, 4, is_complete=True)


def test_a_reply_in_events_is_read_back() -> None:
    reply = Reply()
    for data in (
        b'{"type":"message_start","message":{}}',
        b'{"type":"content_block_delta","delta":{"type":"text_delta","text":" one"}}',
        b'{"type":"message_delta","usage":{"input_tokens":3,"cache_creation_input_tokens":2,"cache_read_input_tokens":4}}',
    ):
        Messages().read(data, reply)
    assert not reply.is_complete
    Messages().read(b'{"type":"message_stop"}', reply)
    assert reply == Reply([" one"], 9, 4, is_complete=True)

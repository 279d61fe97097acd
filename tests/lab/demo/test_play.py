"""Plays of recorded sessions."""

import json

import orjson
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from smetric.lab.demo import play as stage
from smetric.lab.demo.play import (
    MODEL,
    AgentAnswer,
    Chat,
    Dialect,
    Messages,
    PlayFigures,
    Reply,
    Session,
    Turn,
    imbalance,
    load_sessions,
    play,
)
from smetric.lab.emulator.call import EmulatedCall, EngineLimits, Fields
from smetric.lab.emulator.completions import parse_chat
from smetric.lab.emulator.messages import parse_message
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio

RECORDED = load_sessions()


def test_sessions_are_thirty_of_six_turns() -> None:
    assert len({session.id for session in RECORDED}) == 30
    assert {len(session.turns) for session in RECORDED} == {6}


@pytest.mark.parametrize("session", RECORDED, ids=lambda session: session.id)
def test_session_has_lengths_of_readme(session: Session) -> None:
    first = session.tools + session.system + session.turns[0].new
    last = first + sum(before.output + turn.new for before, turn in zip(session.turns, session.turns[1:], strict=False))
    assert session.tools >= 100
    assert session.system >= 50
    assert session.turns[0].new >= 10
    assert first <= 5000
    # Dropped thinking leaves the sum above the recorded 10,000, by the reply that contained it.
    assert last <= 10_000 + sum(turn.output for turn in session.turns)
    for turn in session.turns:
        assert turn.new >= 1
        assert 1 <= turn.output <= 300
        assert 0 <= turn.gap_s <= 3


def test_sessions_share_tools_and_system_prompts() -> None:
    assert len({session.tools for session in RECORDED}) < 30
    assert len({(session.tools, session.system) for session in RECORDED}) < 30


def test_sessions_file_is_small_and_carries_its_attribution() -> None:

    folder = stage._FILE.parent
    assert stage._FILE.stat().st_size < 20_000
    notice = (folder / "README.md").read_text()
    for word in ("callanjfox/kv-cache-tester", "94f6046d", "WEKA", "Apache License, Version 2.0", "Changed"):
        assert word in notice
    shown = notice.partition('{"id"')[2].partition("…")[0].rstrip(", ")
    line = next(line for line in stage._FILE.read_text().splitlines() if line.startswith('{"id":"trace_0002"'))
    assert json.dumps(json.loads(line)).startswith('{"id"' + shown)


SPOKEN = load_sessions()[0]
REPLIES = [" one two six", " ten new old", " big now and"]
DIALECTS = pytest.mark.parametrize(("dialect", "api"), [(Chat(), Api.CHAT), (Messages(), Api.MESSAGES)])


def as_engine(api: Api, body: bytes) -> EmulatedCall:
    parse_call = parse_chat if api is Api.CHAT else parse_message
    return parse_call(Fields.of_body(body), EngineLimits((MODEL,), 40_960))


def as_router(api: Api, body: bytes) -> InferenceRequest:
    return parse(api, body, [], TokenRatio(), ReaderSettings())


@DIALECTS
def test_dialect_turn_carries_whole_history(dialect: Dialect, api: Api) -> None:
    for number in range(len(REPLIES) + 1):
        request = as_router(api, dialect.body(SPOKEN, REPLIES[:number]))
        assert request.turn == number
        assert request.stream
        assert request.model == MODEL


@DIALECTS
def test_dialect_prompt_and_reply_begin_next_prompt(dialect: Dialect, api: Api) -> None:
    prompts = [as_engine(api, dialect.body(SPOKEN, REPLIES[:number])).prompts[0] for number in range(4)]
    for before, reply, after in zip(prompts, REPLIES, prompts[1:], strict=False):
        assert after.startswith(before + reply.encode())


@DIALECTS
def test_dialect_prompt_has_about_recorded_length(dialect: Dialect, api: Api) -> None:
    recorded = SPOKEN.tools + SPOKEN.system + SPOKEN.turns[0].new
    call = as_engine(api, dialect.body(SPOKEN, []))
    assert len(call.prompts[0]) // 4 == pytest.approx(recorded, rel=0.05)
    assert call.limit == SPOKEN.turns[0].output
    assert call.exact


def test_dialect_messages_changes_billing_header_and_moves_cache_marks() -> None:
    bodies = [orjson.loads(Messages().body(SPOKEN, REPLIES[:number])) for number in range(2)]
    first, second = (body["system"][0]["text"] for body in bodies)
    assert first != second
    assert first.startswith("x-anthropic-billing-header:")
    marked = [["cache_control" in message["content"][0] for message in body["messages"]] for body in bodies]
    assert marked == [[True], [False, False, True]]


@pytest.mark.parametrize(
    ("dialect", "pieces", "end"),
    [
        (
            Chat(),
            (
                b'{"choices":[{"delta":{"role":"assistant","content":" one"}}]}',
                b'{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}',
            ),
            b"[DONE]",
        ),
        (
            Messages(),
            (
                b'{"type":"message_start","message":{}}',
                b'{"type":"content_block_delta","delta":{"type":"text_delta","text":" one"}}',
                b'{"type":"message_delta","usage":{"input_tokens":3,"cache_creation_input_tokens":2,"cache_read_input_tokens":4}}',
            ),
            b'{"type":"message_stop"}',
        ),
    ],
    ids=["chat", "messages"],
)
def test_dialect_reads_reply_in_pieces(dialect: Dialect, pieces: tuple[bytes, ...], end: bytes) -> None:
    reply = Reply()
    for data in pieces:
        dialect.read(data, reply)
    assert not reply.is_complete
    dialect.read(end, reply)
    assert reply == Reply([" one"], 9, 4, is_complete=True)


SESSION = Session("s", 120, 40, (Turn(10, 2, 0.0), Turn(10, 2, 0.0), Turn(10, 2, 0.0)))
CHUNK = b'data: {"choices":[{"delta":{"content":" one"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
WHOLE = CHUNK + USAGE + b"data: [DONE]\n\n"


async def answers_to(*bodies: web.Response) -> tuple[list[AgentAnswer], list[list[str]]]:
    """Return the answers that the agent reports, and the assistant messages of each of its requests."""
    noted: list[AgentAnswer] = []
    carried: list[list[str]] = []

    async def answer(request: web.Request) -> web.Response:
        messages = (await request.json())["messages"]
        carried.append([message["content"] for message in messages if message["role"] == "assistant"])
        return bodies[len(carried) - 1]

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server, ClientSession() as client:
        url = str(server.make_url("")).rstrip("/")
        await play(SESSION, Chat(), client, url, delay_s=0.0, speed=1.0, answered=noted.append)
    return noted, carried


def whole() -> web.Response:
    return web.Response(body=WHOLE, headers={"x-smetric-instance": "a", "x-smetric-decision-id": "D"})


async def test_agent_request_carries_previous_replies() -> None:
    noted, carried = await answers_to(whole(), whole(), whole())
    assert carried == [[], [" one"], [" one", " one"]]
    assert [(answer.turn, answer.is_whole) for answer in noted] == [(0, True), (1, True), (2, True)]
    last = noted[-1]
    assert (last.instance, last.decision, last.prompt_tokens, last.cached_tokens) == ("a", "D", 9, 4)
    assert last.sent_s <= last.first_byte_s <= last.ended_s


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, b'{"error":{}}'), (200, CHUNK), (200, CHUNK + b'data: {"error":{"type":"upstream_error"}}\n\n')],
    ids=["refused", "cut off", "failed"],
)
async def test_agent_ends_session_at_incomplete_answer(status: int, body: bytes) -> None:
    noted, carried = await answers_to(whole(), web.Response(status=status, body=body))
    assert len(carried) == 2
    assert [(answer.status, answer.is_whole) for answer in noted] == [(200, True), (status, False)]


async def test_agent_reports_unreachable_router_without_status() -> None:
    noted: list[AgentAnswer] = []
    async with ClientSession() as client:
        await play(SESSION, Chat(), client, "http://127.0.0.1:1", delay_s=0.0, speed=1.0, answered=noted.append)
    assert [(answer.status, answer.is_whole) for answer in noted] == [(0, False)]


def answer(
    session: str = "s",
    turn: int = 0,
    instance: str = "a",
    sent: float = 0.0,
    first: float = 0.1,
    ended: float = 1.0,
    prompt: int = 100,
    cached: int = 0,
    *,
    whole: bool = True,
) -> AgentAnswer:
    return AgentAnswer(session, turn, 200 if whole else 503, whole, "", instance, sent, first, ended, prompt, cached)


def test_figures_hit_rate_counts_tokens() -> None:
    figures = PlayFigures.of([answer(prompt=900, cached=900), answer(turn=1, prompt=100)], 4)
    assert figures.hit_rate == 0.9


def test_figures_returned_compares_with_previous_turn() -> None:
    answers = [
        answer("s", 0, "a"),
        answer("s", 1, "b"),
        answer("s", 2, "b"),
        answer("t", 0, "b"),
        answer("t", 1, "b"),
    ]
    figures = PlayFigures.of(answers, 4)
    assert (figures.returned, figures.followups) == (2, 3)


def test_figures_exclude_failed_answers_but_count_them() -> None:
    figures = PlayFigures.of([answer(first=0.2), answer(turn=1, first=9.0, whole=False)], 4)
    assert (figures.requests, figures.failed, figures.followups) == (2, 1, 0)
    assert figures.ttft_p90_s == 0.2


def test_figures_percentiles_are_measured_values() -> None:
    figures = PlayFigures.of([answer(f"s{n}", first=n / 10) for n in range(1, 11)], 4)
    assert (figures.ttft_p50_s, figures.ttft_p90_s) == (0.5, 0.9)


def test_figures_of_no_answers_are_zero() -> None:
    assert PlayFigures.of([], 4) == PlayFigures(0, 0, 0.0, 1.0, 0.0, 0.0, 0, 0)


def test_imbalance_of_one_busy_instance_is_instance_count() -> None:
    assert imbalance([answer(sent=0.5, ended=3.2), answer(sent=1.0, ended=2.0)], 4) == pytest.approx(4)


def test_imbalance_is_even_for_simultaneous_shares_alone() -> None:
    together = [answer(instance=name, sent=0.0, ended=0.9) for name in "abcd"]
    in_turn = [answer(instance=name, sent=2.0 * n, ended=2.0 * n + 0.9) for n, name in enumerate("abcd")]
    assert imbalance(together, 4) == pytest.approx(1)
    assert imbalance(in_turn, 4) == pytest.approx(4)


@given(
    st.lists(
        st.builds(
            lambda instance, sent, took: answer(instance=instance, sent=sent, ended=sent + took),
            st.sampled_from("abcd"),
            st.floats(0, 30),
            st.floats(0.001, 5),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_imbalance_lies_between_one_and_instance_count(answers: list[AgentAnswer]) -> None:
    assert 1 - 1e-9 <= imbalance(answers, 4) <= 4 + 1e-9

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from smetric.lab.demo.play import Answer, Chat, Session, Turn, play

SESSION = Session("s", 120, 40, (Turn(10, 2, 0.0), Turn(10, 2, 0.0), Turn(10, 2, 0.0)))
CHUNK = b'data: {"choices":[{"delta":{"content":" one"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
WHOLE = CHUNK + USAGE + b"data: [DONE]\n\n"


async def answers_to(*bodies: web.Response) -> tuple[list[Answer], list[list[str]]]:
    """What the agent notes of these answers, and the assistant messages each of its requests carried."""
    noted: list[Answer] = []
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


async def test_each_request_carries_the_replies_to_those_before() -> None:
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
async def test_a_session_ends_at_an_answer_that_is_not_whole(status: int, body: bytes) -> None:
    noted, carried = await answers_to(whole(), web.Response(status=status, body=body))
    assert len(carried) == 2
    assert [(answer.status, answer.is_whole) for answer in noted] == [(200, True), (status, False)]


async def test_a_router_that_is_gone_is_an_answer_without_status() -> None:
    noted: list[Answer] = []
    async with ClientSession() as client:
        await play(SESSION, Chat(), client, "http://127.0.0.1:1", delay_s=0.0, speed=1.0, answered=noted.append)
    assert [(answer.status, answer.is_whole) for answer in noted] == [(0, False)]

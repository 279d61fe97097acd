from __future__ import annotations

import asyncio
from math import inf

from smetric.proxy.asgi import Message
from smetric.proxy.asgi_client import AsgiClient
from smetric.proxy.limits import Limits
from smetric.proxy.watchdog import Timer
from tests.fakes import until


async def test_an_answer_goes_out_in_its_order_while_it_is_waited_for() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("there is no body")

    async def send(message: Message) -> None:
        sent.append(message)

    client = AsgiClient(receive, send, Limits(), Timer(), has_body=False)
    assert client.begin(201, [(b"a", b"b")], b"one")
    assert (sent, client.status) == ([], 0)
    await client.drained()
    assert client.status == 201
    assert client.pass_on(b"two", is_last=True)
    await client.drained()
    assert client.watchdog.at == inf
    client.close()
    assert sent == [
        {"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]},
        {"type": "http.response.body", "body": b"one", "more_body": True},
        {"type": "http.response.body", "body": b"two", "more_body": False},
    ]


async def test_a_watch_behind_an_answer_ends_by_itself_and_cancels_nobody() -> None:
    ended = asyncio.Event()

    async def receive() -> Message:
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None: ...

    task = asyncio.current_task()
    assert task is not None
    before = asyncio.all_tasks()
    client = AsgiClient(receive, send, Limits(), Timer(), has_body=False)
    client.watch()
    (watch,) = asyncio.all_tasks() - before
    client.answered = True
    client.close()
    ended.set()
    await until(watch.done)
    assert not watch.cancelled()
    assert task.cancelling() == 0

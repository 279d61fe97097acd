from __future__ import annotations

import asyncio
from math import inf

from smetric.http.headers import Message
from smetric.http.limits import HttpLimits
from smetric.http.transaction import Timer
from smetric.proxy.intake import AsgiClient
from tests.fakes import until


async def test_asgi_client_sends_its_answer_in_order_while_it_drains() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("there is no body")

    async def send(message: Message) -> None:
        sent.append(message)

    client = AsgiClient(receive, send, HttpLimits(), Timer(), has_body=False)
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


async def test_asgi_client_ends_its_watch_after_an_answer() -> None:
    ended = asyncio.Event()

    async def receive() -> Message:
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None: ...

    task = asyncio.current_task()
    assert task is not None
    before = asyncio.all_tasks()
    client = AsgiClient(receive, send, HttpLimits(), Timer(), has_body=False)
    client.watch()
    (watch,) = asyncio.all_tasks() - before
    client.answered = True
    client.close()
    ended.set()
    await until(watch.done)
    assert not watch.cancelled()
    assert task.cancelling() == 0


async def test_asgi_client_drops_the_rest_of_a_request_before_it_ends_its_answer() -> None:
    arriving: asyncio.Queue[Message] = asyncio.Queue()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    before = asyncio.all_tasks()
    client = AsgiClient(arriving.get, send, HttpLimits(), Timer(), has_body=True)
    await client.send({"type": "http.response.start", "status": 413, "headers": []})
    (reading,) = asyncio.all_tasks() - before
    ending = asyncio.create_task(client.send({"type": "http.response.body", "body": b"too large"}))
    arriving.put_nowait({"type": "http.request", "body": b"more", "more_body": True})
    await until(lambda: arriving.empty() and len(sent) == 2)
    assert sent == [
        {"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]},
        {"type": "http.response.body", "body": b"too large", "more_body": True},
    ]
    arriving.put_nowait({"type": "http.request", "body": b"the rest", "more_body": False})
    await ending
    assert sent[2:] == [{"type": "http.response.body", "body": b"", "more_body": False}]
    client.close()
    arriving.put_nowait({"type": "http.disconnect"})
    await until(reading.done)
    assert not reading.cancelled()

"""Streams of unusual shapes, as sent and as read."""

from __future__ import annotations

from tests.fakes import DONE, Call, Script, chunk, delta, head

SHAPES = ("one byte a chunk", "one event of 5 MB", "100,000 tiny events")


def events_of(shape: str) -> list[bytes]:
    """The chunks of a stream that ends well."""
    if shape == "one byte a chunk":
        text = b"".join(map(delta, "short")) + DONE
        return [text[i : i + 1] for i in range(len(text))]
    if shape == "one event of 5 MB":
        return [delta("x" * 5_000_000), DONE]
    return [delta(str(number)) for number in range(100_000)] + [DONE]


def streaming(events: list[bytes]) -> Script:
    """An engine that answers with *events*, a chunk each, 500 at a time."""

    async def script(call: Call) -> None:
        await call.send(head(200, (b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")))
        for first in range(0, len(events), 500):
            await call.send(b"".join(map(chunk, events[first : first + 500])))
        await call.send(b"0\r\n\r\n")

    return script

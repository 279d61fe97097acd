"""Requests by a grammar, then damaged: what clients that err, or mean harm, may send on one connection."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.fakes import request
from tests.faults.harness import chat

METHODS = ("POST",) * 20 + ("GET", "PUT", "OPTIONS", "post", "FOO")
TARGETS = ("/v1/chat/completions",) * 20 + ("/v1/chat/completions?a=b", "/", "*", "/v1/%63hat/completions", "//v1/chat")
VERSIONS = ("HTTP/1.1",) * 20 + ("HTTP/1.0", "HTTP/1.2", "HTTP/0.9", "http/1.1", "HTTP/11")
FIELDS = (
    "Accept: */*",
    "accept:text/event-stream",
    "X-A: ",
    "X-B:\tb\t",
    "Connection: keep-alive",
    "Connection: close",
    "Connection: x-a, Transfer-Encoding",
    "Expect: 100-continue",
    "Upgrade: h2c",
    "Cookie: a=b; c=d",
    "X-Long: " + "a" * 3000,
)
#: Put somewhere into a request.
TOKENS = (
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\n\n", b"\0", b" ", b"\t", b"\x0b", b":", b";", b",", b"\xff", b"0"),
    *(b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:\tchunked\r\n", b"Transfer-Encoding: identity\r\n"),
    *(b"Content-Length: 0\r\n", b"Content-Length: 5\r\n", b"content-length : 7\r\n", b"Content-Length: +1\r\n"),
    *(b" folded\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n", b"Host: other\r\n", b"GET / HTTP/1.1\r\n"),
)
#: Of 100 inputs, so many are left as the grammar made them.
WHOLE = 25


def body_of(number: str) -> bytes:
    """A chat request that is told from all others."""
    return chat(user=number)


def sentinel(number: str) -> bytes:
    """A request that is well, the last of its connection."""
    return request("POST", "/v1/chat/completions", body_of(number), [("Connection", "close")])


def generated(seed: int, number: int) -> bytes:
    """Input *number* of *seed*: one to three requests, most of them damaged, and a `sentinel` behind them."""
    rng = random.Random(f"{seed}:{number}")
    raw = b"".join(_request(rng, f"{number}.{i}") for i in range(rng.choice((1, 1, 2, 3))))
    if rng.randrange(100) >= WHOLE:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            raw = rng.choice(DAMAGES)(rng, raw)
    return raw + sentinel(f"{number}.last")


def _request(rng: random.Random, name: str) -> bytes:
    fields = ["Host: router", "Content-Type: application/json", *rng.sample(FIELDS, rng.choice((0, 0, 1, 2)))]
    body = body_of(name)
    if rng.random() < 0.5:
        fields.append(f"Content-Length: {len(body)}")
    else:
        fields.append("Transfer-Encoding: chunked")
        body = _chunked(rng, body)
    rng.shuffle(fields)
    line = f"{rng.choice(METHODS)} {rng.choice(TARGETS)} {rng.choice(VERSIONS)}"
    return "\r\n".join([line, *fields, "", ""]).encode() + body


def _chunked(rng: random.Random, body: bytes) -> bytes:
    out = b""
    while body:
        size = rng.randint(1, len(body))
        number = rng.choice(("%x", "%X", "0%x", "000%x")) % size
        out += f"{number}{rng.choice(('', '', ';a=b', ';a'))}\r\n".encode() + body[:size] + b"\r\n"
        body = body[size:]
    return out + b"0\r\n" + rng.choice((b"", b"", b"X-Trailer: t\r\n")) + b"\r\n"


def _flip(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]


def _insert(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + rng.choice(TOKENS) + raw[at:]


def _insert_line(rng: random.Random, raw: bytes) -> bytes:
    """A token at the beginning of a line, where it may be taken for a field."""
    ends = [i + 2 for i in range(len(raw) - 1) if raw[i : i + 2] == b"\r\n"] or [0]
    at = rng.choice(ends)
    return raw[:at] + rng.choice(TOKENS) + raw[at:]


def _cut(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + raw[at + rng.choice((1, 1, 2, 8, 64)) :] or b"\r\n"


def _repeat(rng: random.Random, raw: bytes) -> bytes:
    at, size = rng.randrange(len(raw)), rng.choice((1, 2, 20, 100))
    return raw[: at + size] + raw[at : at + size] + raw[at + size :]


def _lone_feed(rng: random.Random, raw: bytes) -> bytes:
    """A line that ends with LF, or all of them."""
    return raw.replace(b"\r\n", b"\n", rng.choice((1, -1)))


def _digit(rng: random.Random, raw: bytes) -> bytes:
    """A number becomes another one: lengths and chunk sizes are among them."""
    at = [i for i, byte in enumerate(raw) if 48 <= byte <= 57] or [0]
    i = rng.choice(at)
    return raw[:i] + rng.choice((b"0", b"1", b"9", b"f", b"-", b" ")) + raw[i + 1 :]


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_flip, _insert, _insert_line, _insert_line, _cut, _repeat, _lone_feed, _digit),
)

"""Requests written by hand that servers are known to read differently, by RFC 9112 and by what went wrong elsewhere.

A `sentinel` follows each of them and reveals a server that finds another end of the request. Upgrades are
not among them: uvicorn drops what follows one that it ignores.
"""

from __future__ import annotations

from tests.faults.generated import body_of, sentinel

TARGET = "/v1/chat/completions"
#: Chunked body of 13 bytes, so that `Content-Length: 13` may be right too.
CHUNKED = b"3\r\n{ }\r\n0\r\n\r\n"

#: Framing fields before the body `CHUNKED`.
FRAMINGS = (
    "Content-Length: 13\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 13",
    "Content-Length: 0\r\nTransfer-Encoding: chunked",
    "Content-Length: 13\r\nContent-Length: 13",
    "Content-Length: 13\r\nContent-Length: 0",
    "Content-Length: 13, 13",
    "Content-Length: 13,",
    "Content-Length: +13",
    "Content-Length: -13",
    "Content-Length: 0x0d",
    "Content-Length: 013",
    "Content-Length: 1_3",
    "Content-Length: 13.0",
    "Content-Length: 13 ",
    "Content-Length:13",
    "Content-Length:\t13",
    "Content-Length: 1 3",
    "Content-Length: 13;a=b",
    "Content-Length: \x0b13",
    "Content-Length: 18446744073709551629",
    f"Content-Length: {10**30}",
    "Content-Length:",
    "Content-Length : 13",
    "Content-Length\t: 13",
    " Content-Length: 13",
    "Content_Length: 13",
    "content-length: 13",
    "CONTENT-LENGTH: 13",
    "X: y\r\n Content-Length: 13",
    "X: y\nContent-Length: 13",
    "X: y\rContent-Length: 13",
    "X: y\0\r\nContent-Length: 13",
    "Transfer-Encoding: chunked",
    "transfer-encoding: Chunked",
    "Transfer-Encoding:chunked",
    "Transfer-Encoding:\tchunked",
    "Transfer-Encoding: chunked ",
    "Transfer-Encoding: \x0bchunked",
    "Transfer-Encoding: \x0cchunked",
    "Transfer-Encoding: \xa0chunked",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: chunkedx",
    'Transfer-Encoding: "chunked"',
    "Transfer-Encoding: chunked;a=b",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: identity, chunked",
    "Transfer-Encoding: gzip",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding: ,chunked",
    "Transfer-Encoding: chunked,",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding:",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding\x0b: chunked",
    "Transfer_Encoding: chunked",
    "Transfer-Encoding: chun\r\n ked",
    "X: y\r\n\tTransfer-Encoding: chunked",
    "X: y\nTransfer-Encoding: chunked",
    "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked",
    "Connection: Content-Length\r\nContent-Length: 13",
    "Expect: 100-continue\r\nContent-Length: 13",
    "Trailer: Content-Length\r\nTransfer-Encoding: chunked",
    ": empty name\r\nContent-Length: 13",
    "no colon\r\nContent-Length: 13",
    "X Y: z\r\nContent-Length: 13",
    "X: \xff\xfe\r\nContent-Length: 13",
    "",
)
#: Chunked bodies.
BODIES = (
    b"3\n{ }\n0\n\n",
    b"3\r\n{ }\n0\r\n\r\n",
    b"3\r\n{ }0\r\n\r\n",
    b"3 \r\n{ }\r\n0\r\n\r\n",
    b"3\t;a\r\n{ }\r\n0\r\n\r\n",
    b" 3\r\n{ }\r\n0\r\n\r\n",
    b"+3\r\n{ }\r\n0\r\n\r\n",
    b"0x3\r\n{ }\r\n0\r\n\r\n",
    b"0003\r\n{ }\r\n000\r\n\r\n",
    b"3;a=b;c\r\n{ }\r\n0;d\r\n\r\n",
    b'3;a="\r\n{ }\r\n0\r\n\r\n',
    b"3;\n{ }\r\n0\r\n\r\n",
    b"3\r\r\n{ }\r\n0\r\n\r\n",
    b"10000000000000003\r\n{ }\r\n0\r\n\r\n",
    b"-1\r\n{ }\r\n0\r\n\r\n",
    b"3\r\n{ }\r\n0\r\nX: y\r\n\r\n",
    b"3\r\n{ }\r\n0\r\nContent-Length: 3\r\n\r\n",
    b"3\r\n{ }\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"3\r\n{ }\r\n0\r\n folded\r\n\r\n",
    b"3\r\n{ }\r\n0\r\n\n",
    b"3\r\n{ }\r\n\r\n0\r\n\r\n",
    b"\r\n3\r\n{ }\r\n0\r\n\r\n",
)
#: Request lines; what follows is a whole request.
LINES = (
    f"POST {TARGET} HTTP/1.0",
    f"POST {TARGET} HTTP/1.2",
    f"POST {TARGET} HTTP/2.0",
    f"POST {TARGET} HTTP/0.9",
    f"POST {TARGET} HTTP/1.1 x",
    f"POST {TARGET} http/1.1",
    f"POST {TARGET} HTTP/1,1",
    f"POST {TARGET}",
    f"POST  {TARGET} HTTP/1.1",
    f"POST\t{TARGET}\tHTTP/1.1",
    f" POST {TARGET} HTTP/1.1",
    f"post {TARGET} HTTP/1.1",
    f"PO\0ST {TARGET} HTTP/1.1",
    f"\r\nPOST {TARGET} HTTP/1.1",
    f"\nPOST {TARGET} HTTP/1.1",
    f"\rPOST {TARGET} HTTP/1.1",
    f"POST {TARGET}#f HTTP/1.1",
    f"POST {TARGET}?a b HTTP/1.1",
    f"POST http://x{TARGET} HTTP/1.1",
    f"POST //x{TARGET} HTTP/1.1",
    "POST * HTTP/1.1",
    "CONNECT x:80 HTTP/1.1",
    "PRI * HTTP/2.0",
)


def corpus() -> dict[str, bytes]:
    """All inputs, by a name that stands in the bodies of their requests."""
    raws = [
        f"POST {TARGET} HTTP/1.1\r\nHost: x\r\n{framing}{'' if not framing else chr(13) + chr(10)}\r\n".encode(
            "latin-1"
        )
        + CHUNKED
        for framing in FRAMINGS
    ]
    raws += [
        f"POST {TARGET} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + body for body in BODIES
    ]
    found = {f"c{number}": raw for number, raw in enumerate(raws)}
    for number, line in enumerate(LINES):
        body = body_of(f"l{number}.0")
        head = f"{line}\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        found[f"l{number}"] = head.encode() + body
    return {name: raw + sentinel(f"{name}.last") for name, raw in found.items()}

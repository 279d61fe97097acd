"""The requests in what a client sends, told apart without doubt: each is handed on as soon as its head is whole.

Parsing is httptools' (llhttp, strict): what it refuses is refused, and what it lets pass is judged by `inspect_head`.
Whose turn it is, and what becomes of the connection, is `http1.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools
import structlog

from smetric.errors import RequestError
from smetric.proxy.intake import BODY_FIELDS, has_body, inspect_head
from smetric.proxy.limits import Limits
from smetric.proxy.refusal import explain, oddity
from smetric.proxy.transaction import HIGH_WATER, Transaction

if TYPE_CHECKING:
    from smetric.proxy.http1 import Http1

log = structlog.get_logger("smetric.server")


class Parser:
    """Reads the requests of one connection.

    Args:
        connection: told of them.
        scope: what each scope begins as.
        limits: bounds on one request.
        state: the lifespan's state, copied into each scope.
    """

    __slots__ = (
        "_body_bytes",
        "_connection",
        "_limits",
        "_overhead",
        "_parser",
        "_received",
        "_scope",
        "_state",
        "headers",
        "receiving",
        "url",
    )

    def __init__(self, connection: Http1, scope: dict[str, Any], limits: Limits, state: Mapping[str, Any]) -> None:
        self._connection = connection
        self._scope = scope
        self._limits = limits
        self._state = state
        self._parser = httptools.HttpRequestParser(self)
        #: Bytes of the request being read: those that are not of its body, and those that are.
        self._overhead = self._body_bytes = 0
        #: No head that ends in the last data is longer.
        self._received = 0.0
        #: The head being read; None between its end and the next request.
        self.headers: list[tuple[bytes, bytes]] | None = None
        self.url = b""
        #: Whose body is arriving.
        self.receiving: Transaction | None = None

    def read(self, data: bytes) -> int:
        """Take in *data*; how many bytes of it are of no body."""
        before = self._overhead
        self._overhead = before + len(data)
        if before:
            self._received += len(data)
        else:  # what had come of a head that began behind another request was not counted
            self._received = len(data) if self.headers is None else inf
        while data:
            data = self._parse(data)
        limits, overhead = self._limits, self._overhead
        if overhead > limits.header_bytes and overhead > limits.overhead_bytes(self._body_bytes):
            in_head = self.headers is not None
            status = (414 if len(self.url) > limits.target_bytes else 431) if in_head else 400
            problem = RequestError("the request takes more bytes around its body than allowed", status=status)
            self._connection.refuse(problem)
        return overhead - before

    def _parse(self, data: bytes) -> bytes:
        """Parse *data*; what is returned of it has not been parsed, and is to be."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return b"" if self._connection.is_deaf else data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            log.exception("smetric.connection.failed")
            self._connection.abort()
        except httptools.HttpParserError as error:
            self._connection.refuse(explain(error))
        return b""

    def _ignore_upgrade(self) -> None:
        """Go on with HTTP/1.1 behind a request to change to another protocol, with its body first if it has one."""
        self._parser = httptools.HttpRequestParser(self)
        if self.receiving is not None:  # a fresh parser is told of the same body
            framing = b"".join(
                b"%b: %b\r\n" % field for field in self.receiving.scope["headers"] if field[0] in BODY_FIELDS
            )
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)

    # From httptools

    def on_message_begin(self) -> None:
        """A request begins."""
        self.headers = []
        self.url = b""
        self._connection.deadline = 0.0

    def on_url(self, piece: bytes) -> None:
        """*piece* of the request target."""
        self.url += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field; those behind a body are dropped."""
        headers = self.headers
        if headers is not None:
            headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        headers, self.headers = self.headers, None
        connection = self._connection
        if headers is None or connection.is_deaf or self.receiving is not None:  # the last: behind an upgrade
            return
        parser = self._parser
        raw_path, _, query = self.url.partition(b"?")
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        scope = self._scope.copy()
        scope["http_version"] = version
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = raw_path
        scope["query_string"] = query
        scope["headers"] = headers
        scope["state"] = {**self._state}
        problem = oddity(scope) if version == "0.9" or parser.should_upgrade() else None
        if problem is None:
            problem = inspect_head(scope, self._limits, self._received)
        if problem is not None:
            connection.refuse(problem, scope)
            return
        keep_alive = version == "1.1" and parser.should_keep_alive()
        transaction = self.receiving = Transaction(connection, scope, self._limits, keep_alive)
        connection.begin(transaction)

    def on_body(self, piece: bytes) -> None:
        """*piece* of a body."""
        size = len(piece)
        self._overhead -= size
        self._body_bytes += size
        receiving = self.receiving
        if receiving is None:
            return
        receiving.feed(piece)
        if receiving.buffered > HIGH_WATER or self._connection.waiting:
            self._connection.set_reading()

    def on_message_complete(self) -> None:
        """A request is whole."""
        receiving = self.receiving
        if receiving is None:
            return
        if self._parser.should_upgrade() and has_body(receiving.scope):
            return  # the parser takes its body for another protocol
        self.receiving = None
        self._overhead = self._body_bytes = 0
        receiving.end_body()
        self._connection.complete(receiving)

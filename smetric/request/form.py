"""Multipart form of an upload: its `model` and `stream`.

Fields are read as strictly as clients write them. A form that an engine may read otherwise counts as unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from smetric.errors import RequestError
from smetric.request.request import FieldGivenTwice, InferenceRequest

#: Most parts of a form, as engines take, and bytes of one part's header.
MAX_PARTS = 1024
MAX_PART_HEADER = 8 * 1024
#: Longest name of a model, bytes.
MAX_MODEL = 16 * 1024
_BOUNDARY = re.compile(
    rb'multipart/form-data[ \t]*;[ \t]*boundary=(?:"([^"\\\r\n]{1,70})"|([^\s";,]{1,70}))[ \t]*', re.IGNORECASE
)
#: Name of a field, and what makes it a file.
_DISPOSITION = re.compile(
    rb'content-disposition:[ \t]*form-data[ \t]*;[ \t]*name=(?:"([^"\\\r\n]*)"|([^\s";]+))[ \t]*'
    rb'((?:;[ \t]*+filename\*?=(?:"(?:[^"\\\r\n]|\\.)*+"|[^";\r\n]*+))*+)[ \t]*+',
    re.IGNORECASE,
)
_READ = frozenset({b"model", b"stream"})
_TRUE = frozenset({b"true", b"1", b"yes", b"on", b"t", b"y"})


def form_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the Content-Type of a multipart body; None for other bodies. Names are in lower case."""
    for name, value in headers:
        if name == b"content-type":
            return value if value.lower().startswith(b"multipart/") else None
    return None


def read_form(request: InferenceRequest, content_type: bytes, body: bytes) -> None:
    """Fill the fields of *request* that come from the form *body*.

    Raises:
        FieldGivenTwice: it gives `model` or `stream` twice.
        RequestError: it is no form, one that engines may read otherwise, or its model is no name.
    """
    found = _fields(content_type, body)
    if (span := found.get(b"model")) is not None:
        text = body[span]
        if len(text) > MAX_MODEL:
            raise RequestError(f"`model` takes more than {MAX_MODEL} bytes; no name is that long", param="model")
        try:
            request.model = text.decode()
        except UnicodeDecodeError:
            raise RequestError("`model` is not valid UTF-8", param="model") from None
        request.model_span = span
    if (span := found.get(b"stream")) is not None:
        request.stream = body[span].strip().lower() in _TRUE


def _fields(content_type: bytes, body: bytes) -> dict[bytes, slice]:
    """Return the places of the texts of the fields that are read."""
    boundary = _BOUNDARY.fullmatch(content_type)
    if boundary is None:
        raise RequestError("the Content-Type must be multipart/form-data with a boundary")
    mark = b"--" + (boundary[1] or boundary[2])
    found: dict[bytes, slice] = {}
    seen: set[bytes] = set()
    at = len(mark) if body.startswith(mark) else -1
    for _ in range(MAX_PARTS + 1):
        if at < 0 or body[at : at + 2] == b"--":
            break
        start = body.find(b"\r\n\r\n", at, at + MAX_PART_HEADER) + 4
        end = body.find(b"\r\n" + mark, start)
        if body[at : at + 2] != b"\r\n" or start < 4 or end < 0:
            at = -1
            break
        name, is_file = _name(body[at + 2 : start - 4])
        if name in _READ:
            if name in seen:
                raise FieldGivenTwice(
                    f"the form gives `{name.decode()}` twice, and readers differ in which one counts; send it once",
                    param=name.decode(),
                )
            seen.add(name)
            if not is_file:
                found[name] = slice(start, end)
        at = end + 2 + len(mark)
    else:
        raise RequestError(f"the form has more than {MAX_PARTS} parts; send fewer")
    if at < 0:
        raise RequestError("the body is not a form with the boundary that its Content-Type names")
    return found


def _name(header: bytes) -> tuple[bytes, bool]:
    """Return the name of the part with *header*, and whether it is a file."""
    named = [
        _DISPOSITION.fullmatch(line)
        for line in header.split(b"\r\n")
        if line[:20].lower().startswith(b"content-disposition")
    ]
    if len(named) != 1 or named[0] is None:
        raise RequestError('each part of the form needs one `Content-Disposition: form-data; name="…"`')
    return named[0][1] if named[0][1] is not None else named[0][2], bool(named[0][3])

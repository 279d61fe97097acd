"""Form of an upload: its model, what counts as unread, and agreement with a parser that engines use."""

from __future__ import annotations

import contextlib
from email.message import Message
from email.parser import BytesParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.errors import RequestError
from smetric.request.form import MAX_PARTS
from smetric.request.reader import ReaderSettings, parse, patch_model
from smetric.request.request import Api, FieldGivenTwice, InferenceRequest, TokenRatio

TYPE = b"multipart/form-data; boundary=xYz"
FILE = b'name="file"; filename="a \\"b\\".wav"\r\nContent-Type: audio/wav', b"RIFF\r\n--x\0"


def form(*parts: tuple[bytes, bytes], mark: bytes = b"xYz") -> bytes:
    """A form of parts, each with what follows `form-data; ` in its header."""
    return (
        b"".join(
            b"--%b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % (mark, name, text) for name, text in parts
        )
        + b"--%b--\r\n" % mark
    )


def read(body: bytes, content_type: bytes = TYPE, api: Api = Api.OTHER) -> InferenceRequest:
    return parse(api, body, [(b"content-type", content_type)], TokenRatio(), ReaderSettings())


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form((b'name="model"', b"whisper"), FILE), TYPE),
        (form(FILE, (b'name="model"', b"whisper"), (b'name="stream"', b"True")), TYPE),
        (form((b"name=model", b"whisper"), FILE, mark=b"a b"), b'Multipart/Form-Data;boundary="a b"'),
        (form((b'name="model"\r\nContent-Type: text/plain; charset=utf-8', b"whisper")) + b"epilogue", TYPE),
    ],
    ids=["model first", "file first", "as .NET writes it", "typed"],
)
def test_form_gives_model_and_stream(body: bytes, content_type: bytes) -> None:
    request = read(body, content_type)
    assert (request.model, request.unread) == ("whisper", "")
    assert request.stream == (b"stream" in body)
    patched = patch_model(body, "tiny", request.model_span)
    assert patched == body.replace(b"whisper", b"tiny")


@given(st.lists(st.tuples(st.sampled_from(["model", "prompt", "x[]"]), st.binary(max_size=12)), max_size=4))
def test_form_is_read_as_by_a_general_parser(fields: list[tuple[str, bytes]]) -> None:
    body = form(*((b'name="%b"' % name.encode(), text) for name, text in fields))
    models = [text for name, text in fields if name == "model"]
    if len(models) > 1:
        with pytest.raises(FieldGivenTwice):
            read(body)
        return
    request = read(body)
    message: Message[str, str] = BytesParser().parsebytes(b"Content-Type: %b\r\n\r\n" % TYPE + body)
    parts: Any = message.get_payload() if message.is_multipart() else []
    assert len(parts) == len(fields)
    if not request.unread:
        assert request.model.encode() == (models[0] if models else b"")
    else:
        assert "UTF-8" in request.unread


@pytest.mark.parametrize(
    ("body", "content_type", "problem"),
    [
        (form(FILE), b"multipart/form-data", "boundary"),
        (form(FILE), b"multipart/mixed; boundary=xYz", "boundary"),
        (form(FILE), b"multipart/form-data; boundary=other", "boundary that"),
        (b"preamble\r\n" + form(FILE), TYPE, "boundary that"),
        (form(FILE)[:-8], TYPE, "boundary that"),
        (form(FILE).replace(b"--xYz--", b"--xYz0--"), TYPE, "boundary that"),
        (form((b"", b"x")), TYPE, "Content-Disposition"),
        (form((b'name="a"\r\nContent-Disposition: form-data; name="model"', b"x")), TYPE, "Content-Disposition"),
        (form(*[(b'name="a"', b"")] * (MAX_PARTS + 1)), TYPE, "parts"),
        (form((b'name="model"', b"\xff")), TYPE, "UTF-8"),
        (form((b'name="model"', b"m" * 20_000)), TYPE, "no name is that long"),
    ],
)
def test_form_that_may_be_read_otherwise_is_unread(body: bytes, content_type: bytes, problem: str) -> None:
    request = read(body, content_type)
    assert problem in request.unread
    assert not request.model


def test_form_refuses_model_given_twice() -> None:
    for second in (b'name="model"', b'name="model"; filename="m"'):
        with pytest.raises(FieldGivenTwice, match="`model` twice"):
            read(form((b'name="model"', b"one"), (second, b"two")))


def test_form_is_no_body_of_an_api_of_json() -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        read(form((b'name="model"', b"m")), api=Api.CHAT)


PIECES = [
    b"--xYz",
    b"\r\n",
    b"--",
    b'Content-Disposition: form-data; name="model"',
    b'; filename="',
    b"m",
    b"\xff",
    b":",
]


@given(st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join))
def test_form_of_any_bytes_is_read_or_unread_or_refused(body: bytes) -> None:
    with contextlib.suppress(FieldGivenTwice):
        request = read(body)
        assert (request.model_span is None) == (not request.model) or not request.unread

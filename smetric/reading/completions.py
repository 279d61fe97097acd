"""The prompts of a completions request: texts or token ids, one or several."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from smetric.errors import RequestError
from smetric.reading.body import is_null
from smetric.reading.json_text import text_of
from smetric.reading.prompt import Prompt
from smetric.request import InferenceRequest

#: A string, or a list and what comes first in it.
_START = re.compile(rb'"|\[[ \t\r\n]*+(.)')
_RAWS = msgspec.json.Decoder(list[Raw])


class _Ids(msgspec.Struct, array_like=True):
    """A list, of whatever; none of it is kept."""


#: What a list of prompts may hold, by how the first begins. Those were counted when the body was screened; of numbers
#: between them there may be millions.
_PROMPTS: dict[bytes, msgspec.json.Decoder[list[str]] | msgspec.json.Decoder[list[_Ids]]] = {
    b'"': msgspec.json.Decoder(list[str]),
    b"[": msgspec.json.Decoder(list[_Ids]),
}


def read_prompts(
    request: InferenceRequest, value: Raw | None, bytes_per_token: float, key: bytes, is_plain: bool
) -> int:
    """Fill prompt and prompt length from a completions `prompt`; returns how many prompts there are.

    A prompt is a string or a list of token ids; there may be a list of either.

    Args:
        request: to be filled.
        value: of the field `prompt`.
        bytes_per_token: of its model.
        key: what besides the text decides whether engines share the prompt.
        is_plain: whether there is no choice of escapes in *value*.

    Raises:
        RequestError: it is neither of these.
    """
    if value is None or is_null(value):
        return 1
    start = _START.match(value)
    if start is None:
        raise RequestError("`prompt` must be a string, a list of strings or lists of token ids", param="prompt")
    first = start[1]
    given = _several(value, _PROMPTS[first]) if first in _PROMPTS else [value]
    if first not in (None, b'"'):
        return _read_token_ids(request, list(map(bytes, given)), key)
    texts = [text_of(one, is_plain) for one in given]
    request.prompt = prompt = Prompt([texts[0]], bytes_per_token, key=key)
    request.prompt_len = sum(prompt.tokens(len(one)) or 1 for one in texts)
    return len(texts)


def _several(value: Raw, kind: msgspec.json.Decoder[list[str]] | msgspec.json.Decoder[list[_Ids]]) -> list[Raw]:
    try:
        kind.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(
            "`prompt` must be a list of strings only, or of lists of token ids only", param="prompt"
        ) from None
    return _RAWS.decode(value)


def _read_token_ids(request: InferenceRequest, prompts: list[bytes], key: bytes) -> int:
    """The same for lists of token ids: their JSON text stands for the rendering, their number is exact."""
    counts = [ids.count(b",") + 1 for ids in prompts]
    request.prompt = Prompt([prompts[0]], len(prompts[0]) / counts[0], key=key, counted=True)
    request.prompt_len = sum(counts)
    return len(prompts)

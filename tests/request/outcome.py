"""Everything that is read of a body, to compare two ways of reading it."""

from __future__ import annotations

from typing import Any

from smetric.errors import RequestError
from smetric.request.reader import ReaderSettings, parse
from smetric.request.request import Api, InferenceRequest, TokenRatio


def outcome(api: Api, body: bytes) -> Any:
    """All that is read of *body*, or why it is refused."""
    try:
        return all_of(parse(api, body, [], TokenRatio(), ReaderSettings()))
    except RequestError as error:
        return str(error), error.param


def all_of(request: InferenceRequest) -> Any:
    """All that was read of the body of *request*, whose answer begins with that."""
    prompt, template = request.prompt, request.template_args
    assert prompt is not None
    read = (request.model, request.turn, request.prompt_len, request.est_hit, request.cache_salt, request.prompts)
    lengths = (prompt.size, prompt.history_bytes, prompt.question_bytes)
    last, hashes = prompt.last_message(), prompt.hashes
    request.answering()
    return read, lengths, last, hashes, request.parts, template

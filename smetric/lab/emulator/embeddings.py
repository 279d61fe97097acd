"""OpenAI embeddings and transcriptions: /v1/embeddings, /v1/audio/transcriptions and /v1/audio/translations.

Both run as generations, so that they load the engine: an embedding as one of a single token, a transcription as a reply
to a prompt that stands for the file.
"""

from __future__ import annotations

import base64
from array import array
from email.parser import BytesParser
from email.policy import HTTP
from random import Random
from typing import Any

from xxhash import xxh3_64_hexdigest

from smetric.lab.emulator import prompt
from smetric.lab.emulator.call import (
    EmulatedCall,
    EngineLimits,
    Fields,
    InvalidBodyError,
    bad_request,
    check_model,
    parse_call,
)
from smetric.lab.emulator.completions import prompts_of
from smetric.lab.emulator.instance import EmulatedAnswer, digest

#: Numbers of an embedding, and most of them.
DIMENSIONS, MOST_DIMENSIONS = 64, 4096
#: Tokens of a transcription.
TRANSCRIBED = 16


def parse_embedding(fields: Fields, limits: EngineLimits) -> EmulatedCall:
    """Read an embeddings request.

    Raises:
        EngineError: it cannot be served.
    """
    prompts = prompts_of(fields.required("input"), "input")
    check_model(fields, limits)
    dimensions = fields.integer("dimensions")
    if dimensions is not None and not 1 <= dimensions <= MOST_DIMENSIONS:
        raise bad_request(
            f"dimensions must be from 1 to {MOST_DIMENSIONS}, got {dimensions}.", "dimensions", dimensions
        )
    encoding = fields.string("encoding_format")
    if encoding not in (None, "float", "base64"):
        message = "Input should be 'float' or 'base64'"
        raise InvalidBodyError("literal_error", "body.encoding_format", message, encoding)
    call = parse_call(fields, limits, prompts, 1)
    call.stream, call.dimensions, call.is_base64 = False, dimensions or DIMENSIONS, encoding == "base64"
    return call


class EmbeddingAnswer(EmulatedAnswer):
    """Embeddings of all inputs: vectors of length 1, the same for the same text."""

    def body(self) -> dict[str, Any]:
        """Return a `list` of embeddings."""
        call, tokens = self._call, self._generation.prompt_tokens
        return {
            "id": call.id,
            "object": "list",
            "created": call.created,
            "model": call.model,
            "data": [
                {"index": index, "object": "embedding", "embedding": self._vector(choice.prompt)}
                for index, choice in enumerate(self._generation.choices)
            ],
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": None,
            },
        }

    def _vector(self, text: bytes) -> list[float] | str:
        random = Random(digest(text, None, 0))
        numbers = [random.gauss(0, 1) for _ in range(self._call.dimensions)]
        length = sum(number * number for number in numbers) ** 0.5
        vector = array("f", (number / length for number in numbers))
        return base64.b64encode(vector.tobytes()).decode() if self._call.is_base64 else vector.tolist()


def form_of(content_type: bytes, body: bytes) -> Fields:
    """Return the fields of a multipart form; a file is the hash of its content.

    Raises:
        InvalidBodyError: it is not a form with a file.
    """
    message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + content_type + b"\r\n\r\n" + body)
    values: dict[str, Any] = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(content, bytes):
            values[name] = (
                content.decode(errors="replace") if part.get_filename() is None else xxh3_64_hexdigest(content)
            )
    fields = Fields(values)
    fields.required("file")
    return fields


def parse_transcription(fields: Fields, limits: EngineLimits) -> EmulatedCall:
    """Read the form of a transcription or translation.

    Raises:
        EngineError: it cannot be served.
    """
    if fields.string("stream") in ("true", "True", "1"):
        raise bad_request("The emulator streams no transcriptions", "stream")
    tokens = prompt.encode("<|transcribe|>" + (fields.string("file") or "") + (fields.string("prompt") or ""))
    shared = Fields({"model": fields.string("model")})
    return parse_call(shared, limits, [tokens], TRANSCRIBED)


class TranscriptionAnswer(EmulatedAnswer):
    """Transcription, as JSON."""

    def body(self) -> dict[str, Any]:
        """Return its text."""
        return {"text": self._generation.choices[0].produced, "usage": {"type": "duration", "seconds": 1}}

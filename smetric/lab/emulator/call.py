"""One request of an emulated engine."""

from __future__ import annotations

import json
import re
import time
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from smetric.lab.store import TOKEN_BYTES

# Errors of an emulated engine, in the words and shapes of vLLM.

BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
#: The type of an error of a body that does not validate.
INVALID = "Bad Request"


class EngineError(Exception):
    """An error that is answered to the client.

    Args:
        status: HTTP status.
        message: as vLLM words it; values of prompts are never repeated.
        kind: `error.type` of the body.
        param: the field at fault.
    """

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self, *, anthropic: bool) -> bytes:
        """The body of the answer, in Anthropic's shape or in OpenAI's; what does not validate always has OpenAI's."""
        if anthropic and self.kind != INVALID:
            return orjson.dumps({"type": "error", "error": {"type": self.kind, "message": self.message}})
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}
        )


class UnreadableBodyError(Exception):
    """The body is no text, or more deeply nested or longer in its numbers than the parser reads."""


class InvalidBodyError(EngineError):
    """The body does not have the shape the API asks for.

    Args:
        rule: the name of the rule that was broken, as pydantic gives it.
        at: the place, from `body`.
        message: what should be there.
        value: what is there; only its kind and size are told.
    """

    def __init__(self, rule: str, at: str, message: str, value: object, context: str | None = None) -> None:
        found = {"type": rule, "loc": at, "msg": message, "input": _kind_of(value)}
        details: dict[str, Any] = found if context is None else {**found, "ctx": {"error": context}}
        super().__init__(400, f"1 validation error:\n  {details}", INVALID, at)


def bad_request(message: str, param: str | None = None, value: object = None) -> EngineError:
    """A request that is well formed and cannot be served."""
    if param is not None:
        shown = "" if value is None else f", value={value}"
        message = f"{message} (parameter={param}{shown})"
    return EngineError(400, message, "BadRequestError", param)


def unknown_model(model: str, known: tuple[str, ...]) -> EngineError:
    """A model this engine does not serve."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(known)}."
    return EngineError(404, message, "NotFoundError", "model")


def busy() -> EngineError:
    """The queue is full."""
    return EngineError(503, BUSY, "Service Unavailable")


def no_such_response(response_id: str) -> EngineError:
    """Responses are not stored, as in vLLM unless it is told to."""
    return EngineError(404, f"Response with id '{response_id}' not found.", "invalid_request_error", "response_id")


def _kind_of(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, str):
        return f"<str of {len(value)} characters>"
    return str(value)


# Typed access to the fields of a JSON body; what is wrong is told as vLLM's validation tells it.


class Fields:
    """An object of the body.

    Args:
        values: the decoded object.
        at: where it stands, for errors.
    """

    __slots__ = ("at", "values")

    def __init__(self, values: dict[str, Any], at: str = "body") -> None:
        self.values = values
        self.at = at

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        """Decode a request body.

        Raises:
            InvalidBodyError: it is empty, no JSON, no object, or a string in it is no text.
            UnreadableBodyError: it is no UTF-8, or more than the parser reads.
        """
        if not body:
            raise InvalidBodyError("missing", "body", "Field required", None)
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError:
            # The slow parser is the one vLLM has: it is a little more lenient, and words and counts as vLLM does.
            try:
                values = json.loads(body)
            except json.JSONDecodeError as error:
                at = f"body.{error.pos}"
                raise InvalidBodyError("json_invalid", at, "JSON decode error", {}, error.msg) from None
            except (ValueError, RecursionError) as error:
                raise UnreadableBodyError from error
            # It also takes halves of surrogate pairs, which the validation after it does not.
            try:
                json.dumps(values, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                message = "Input should be a valid string, unable to parse raw data as a unicode string"
                raise InvalidBodyError("string_unicode", "body", message, {}) from None
        if not isinstance(values, dict):
            raise InvalidBodyError("model_attributes_type", "body", "Input should be a valid dictionary", values)
        return cls(values)

    def required(self, name: str) -> Any:
        """The value of a field that must be there."""
        if self.values.get(name) is None:
            raise InvalidBodyError("missing", f"{self.at}.{name}", "Field required", self.values)
        return self.values[name]

    def integer(self, name: str) -> int | None:
        """A whole number, None if the field is absent or null."""
        value = self.values.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, str):
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise InvalidBodyError("int_parsing", f"{self.at}.{name}", message, value)
        raise InvalidBodyError("int_type", f"{self.at}.{name}", "Input should be a valid integer", value)

    def number(self, name: str) -> float | None:
        """A number, None if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise InvalidBodyError("float_type", f"{self.at}.{name}", "Input should be a valid number", value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise InvalidBodyError("bool_type", f"{self.at}.{name}", "Input should be a valid boolean", value)

    def string(self, name: str) -> str | None:
        """A text, None if the field is absent or null."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise InvalidBodyError("string_type", f"{self.at}.{name}", "Input should be a valid string", value)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of objects, empty if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise InvalidBodyError("list_type", f"{self.at}.{name}", "Input should be a valid list", value)
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                message = "Input should be a valid dictionary"
                raise InvalidBodyError("model_attributes_type", f"{self.at}.{name}.{index}", message, item)
        return value

    def nested(self, name: str) -> Fields:
        """An object within, empty if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return Fields({}, f"{self.at}.{name}")
        if not isinstance(value, dict):
            message = "Input should be a valid dictionary"
            raise InvalidBodyError("model_attributes_type", f"{self.at}.{name}", message, value)
        return Fields(value, f"{self.at}.{name}")


# The emulated tokenizer: every four bytes of text are one token, so that it is cheap and can be undone.
#
# Token ids are the four bytes themselves, read as an unsigned integer; a text whose length is no multiple of four ends
# in a padded token. The markers of the chat template are tokens no text can produce, since 0xFF never occurs in UTF-8.
# Packed tokens are their bytes, one after the other.

#: Ids are below this.
VOCABULARY = 1 << 32

MARKERS = {
    b"\xff\xff\xff\x01": "<|im_start|>",
    b"\xff\xff\xff\x02": "<|im_end|>",
}
START, END = MARKERS

_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")


def encode(text: str) -> bytes:
    """Packed tokens of *text*, which starts on a token of its own wherever it stands in a prompt."""
    data = text.encode()
    return data + _PADDING[len(data) % TOKEN_BYTES]


def count(tokens: bytes) -> int:
    """How many tokens are packed here."""
    return len(tokens) // TOKEN_BYTES


def to_ids(tokens: bytes) -> list[int]:
    """The ids of packed tokens."""
    return array("I", tokens).tolist()


def from_ids(ids: Sequence[int]) -> bytes:
    """Packed tokens of *ids*, each below `VOCABULARY`."""
    return array("I", ids).tobytes()


def strings(tokens: bytes) -> list[str]:
    """The text of each token; bytes that are no text of their own are shown as U+FFFD."""
    return [_text(tokens[at : at + TOKEN_BYTES]) for at in range(0, len(tokens), TOKEN_BYTES)]


def decode(tokens: bytes) -> str:
    """The text packed tokens stand for, markers written out."""
    pieces = re.split(b"(\xff\xff\xff[\x01\x02])", tokens)
    return "".join(_text(piece) for piece in pieces)


def _text(piece: bytes) -> str:
    marker = MARKERS.get(piece)
    return marker if marker is not None else piece.replace(b"\0", b"").decode(errors="replace")


# One request as the emulated engine serves it, whichever API it came by.

#: Sequences one request may ask for, n × prompts.
MAX_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine serves: names (the first one answers), and the longest prompt and output together, in tokens."""

    names: tuple[str, ...]
    max_model_len: int


@dataclass(slots=True, kw_only=True)
class EmulatedCall:
    """What is to be generated and how it is to be told.

    `prompts` are packed tokens; `limit` is the most output tokens, None for as many as the reply has; `exact` means
    that the reply does not end before the limit (`ignore_eos`).
    """

    prompts: Sequence[bytes]
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    n: int = 1
    limit: int | None = None
    shortest: int = 0
    exact: bool = False
    seed: int | None = None
    salt: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    #: Completions: the prompt is repeated before the reply.
    echo: bool = False
    temperature: float | None = None


def parse_call(
    fields: Fields, limits: EngineLimits, prompts: Sequence[bytes], limit: int | None, n: int = 1
) -> EmulatedCall:
    """The fields all APIs share, with *prompts* rendered already.

    Raises:
        EngineError: in vLLM's words, if a value or a length cannot be served.
    """
    check_model(fields, limits)
    call = EmulatedCall(
        prompts=prompts,
        model=limits.names[0],
        n=n,
        limit=limit,
        shortest=_at_least(fields, "min_tokens", 0) or 0,
        exact=fields.boolean("ignore_eos"),
        seed=fields.integer("seed"),
        salt=_salt(fields),
        stream=fields.boolean("stream"),
        return_token_ids=fields.boolean("return_token_ids"),
        temperature=fields.number("temperature"),
    )
    if call.stream:
        options = fields.nested("stream_options")
        call.include_usage = options.boolean("include_usage")
        call.continuous_usage = call.include_usage and options.boolean("continuous_usage_stats")
    if call.temperature is not None and call.temperature < 0:
        message = f"temperature must be non-negative, got {call.temperature}."
        raise bad_request(message, "temperature", call.temperature)
    fields.integer("priority")
    if len(prompts) * call.n > MAX_SEQUENCES:
        raise bad_request(f"A request may ask for {MAX_SEQUENCES} sequences at most.", "n", call.n)
    _check_lengths(call, limits)
    return call


def check_model(fields: Fields, limits: EngineLimits) -> None:
    """No model means the one that is served.

    Raises:
        EngineError: another model is asked for.
    """
    model = fields.string("model")
    if model and model not in limits.names:
        raise unknown_model(model, limits.names)


def new_id(prefix: str) -> str:
    """An id in the form vLLM gives: 16 hexadecimal digits after *prefix*."""
    return f"{prefix}{uuid.uuid4().hex[:16]}"


def replies(fields: Fields) -> int:
    """How many replies to each prompt are asked for, in the APIs that have `n`."""
    return _at_least(fields, "n", 1) or 1


def _at_least(fields: Fields, name: str, least: int) -> int | None:
    value = fields.integer(name)
    if value is not None and value < least:
        raise bad_request(f"{name} must be at least {least}, got {value}.", name, value)
    return value


def _salt(fields: Fields) -> str:
    salt = fields.string("cache_salt")
    if salt == "":
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    return salt or ""


def _check_lengths(call: EmulatedCall, limits: EngineLimits) -> None:
    longest = limits.max_model_len
    limit = call.limit
    if limit is not None:
        if limit < 1:
            raise bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
        if limit > longest:
            message = f"max_tokens={limit} cannot be greater than max_model_len={longest}."
            raise bad_request(f"{message} Please request fewer output tokens.", "max_tokens", limit)
    for prompt in call.prompts:
        length = count(prompt)
        start = f"This model's maximum context length is {longest} tokens. However, "
        if length >= longest:
            message = (
                f"{start}your prompt contains at least {longest + 1} input tokens, which exceeds this limit even "
                "without any output tokens. Please reduce the length of the input prompt."
            )
            raise bad_request(message, "input_tokens", longest + 1)
        if limit is not None and length + limit > longest:
            message = (
                f"{start}you requested {limit} output tokens and your prompt contains at least {length} input "
                f"tokens, for a total of at least {length + limit} tokens. Please reduce the length of the input "
                "prompt or the number of requested output tokens."
            )
            raise bad_request(message, "input_tokens", length)

"""One request as the emulated engine serves it, whichever API it came by."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from smetric.emulator import tokenizer
from smetric.emulator.error import bad_request, unknown_model
from smetric.emulator.fields import Fields

#: Sequences one request may ask for, n × prompts.
MAX_SEQUENCES = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine serves: names (the first one answers), and the longest prompt and output together, in tokens."""

    names: tuple[str, ...]
    max_model_len: int


@dataclass(slots=True, kw_only=True)
class Call:
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


def parse_call(fields: Fields, limits: Limits, prompts: Sequence[bytes], limit: int | None, n: int = 1) -> Call:
    """The fields all APIs share, with *prompts* rendered already.

    Raises:
        EngineError: in vLLM's words, if a value or a length cannot be served.
    """
    check_model(fields, limits)
    call = Call(
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


def check_model(fields: Fields, limits: Limits) -> None:
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


def _check_lengths(call: Call, limits: Limits) -> None:
    longest = limits.max_model_len
    limit = call.limit
    if limit is not None:
        if limit < 1:
            raise bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
        if limit > longest:
            message = f"max_tokens={limit} cannot be greater than max_model_len={longest}."
            raise bad_request(f"{message} Please request fewer output tokens.", "max_tokens", limit)
    for prompt in call.prompts:
        length = tokenizer.count(prompt)
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

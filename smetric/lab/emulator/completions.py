"""/v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smetric.lab.emulator import call as tokenizer
from smetric.lab.emulator.call import (
    EmulatedCall,
    EngineLimits,
    Fields,
    InvalidBodyError,
    bad_request,
    check_model,
    parse_call,
    replies,
)
from smetric.lab.emulator.instance import DONE, FINGERPRINT, Choice, EmulatedGeneration, counts, data_event

#: Output tokens if the request sets no limit.
DEFAULT_LIMIT = 16


def parse_completion(fields: Fields, limits: EngineLimits) -> EmulatedCall:
    """A completion request.

    Raises:
        EngineError: it cannot be served.
    """
    prompts = _prompts(fields.required("prompt"))
    check_model(fields, limits)
    limit = fields.integer("max_tokens")
    call = parse_call(fields, limits, prompts, DEFAULT_LIMIT if limit is None else limit, replies(fields))
    call.echo = fields.boolean("echo")
    return call


def _prompts(prompt: Any) -> list[bytes]:
    if isinstance(prompt, str):
        prompts = [tokenizer.encode(prompt)]
    elif not isinstance(prompt, list):
        raise InvalidBodyError("string_type", "body.prompt", "Input should be a valid string", prompt)
    elif prompt and isinstance(prompt[0], int):
        prompts = [_from_ids(prompt)]
    else:
        prompts = [tokenizer.encode(item) if isinstance(item, str) else _from_ids(item) for item in prompt]
    if not all(prompts) or not prompts:
        raise bad_request("You must pass at least one prompt")
    return prompts


def _from_ids(ids: Any) -> bytes:
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise InvalidBodyError("list_type", "body.prompt", "Input should be a valid list of token ids", ids)
    for item in ids:
        if not 0 <= item < tokenizer.VOCABULARY:
            raise bad_request(f"Token id {item} is out of vocabulary")
    return tokenizer.from_ids(ids)


class CompletionAnswer:
    """A text completion, whole or in chunks."""

    eager = False

    def __init__(self, generation: EmulatedGeneration) -> None:
        self._generation = generation
        self._call = generation.call

    def body(self) -> dict[str, Any]:
        """One `text_completion`."""
        usage = {
            **counts(self._generation),
            "prompt_tokens_details": {
                "cached_tokens": self._generation.cached_tokens,
                "created_cache_tokens": None,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }
        return {
            **self._head([self._choice(choice) for choice in self._generation.choices]),
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self) -> Iterator[bytes]:
        """Nothing comes before the first token."""
        return iter(())

    def news(self, choice: Choice) -> Iterator[bytes]:
        """New text, with the reason if it is the last."""
        start = choice.sent
        text = choice.take()
        first = start == 0
        told = {
            "index": choice.index,
            "text": tokenizer.decode(choice.prompt) + text if first and self._call.echo else text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": self._prompt_ids(choice) if first else None,
            "token_ids": choice.token_ids(start) if self._call.return_token_ids else None,
        }
        extra = {}
        if self._call.continuous_usage:
            extra["usage"] = counts(self._generation)
        yield data_event({**self._head([told]), **extra})

    def closing(self) -> Iterator[bytes]:
        """Usage, if it was asked for, and the end."""
        if self._call.include_usage:
            usage = {
                **counts(self._generation),
                "prompt_tokens_details": {"cached_tokens": self._generation.cached_tokens},
            }
            yield data_event({**self._head([]), "usage": usage, "system_fingerprint": FINGERPRINT})
        yield DONE

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        call = self._call
        head = {"id": call.id, "object": "text_completion", "created": call.created, "model": call.model}
        return {**head, "choices": choices}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        echoed = tokenizer.decode(choice.prompt) if self._call.echo else ""
        return {
            "index": choice.index,
            "text": echoed + choice.produced,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": choice.token_ids() if self._call.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": self._prompt_ids(choice),
            "routed_experts": None,
        }

    def _prompt_ids(self, choice: Choice) -> list[int] | None:
        return tokenizer.to_ids(choice.prompt) if self._call.return_token_ids else None

"""OpenAI completions: /v1/chat/completions and /v1/completions. Logprobs are never generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from smetric.lab.emulator import prompt as tokenizer
from smetric.lab.emulator.call import (
    EmulatedCall,
    EngineLimits,
    Fields,
    InvalidBodyError,
    bad_request,
    check_model,
    parse_call,
    replies,
    tool_call,
)
from smetric.lab.emulator.instance import Choice, EmulatedAnswer, EmulatedGeneration

#: Output tokens of a completion without a limit.
DEFAULT_LIMIT = 16
#: The fingerprint of vLLM 0.32.0.
FINGERPRINT = "vllm-0.32.0-emulated"
#: End of a stream.
DONE = b"data: [DONE]\n\n"


def parse_chat(fields: Fields, limits: EngineLimits) -> EmulatedCall:
    """Read a chat request.

    Raises:
        EngineError: it cannot be served.
    """
    fields.required("messages")
    messages, tools = fields.objects("messages"), fields.objects("tools")
    check_model(fields, limits)
    limit = fields.integer("max_completion_tokens")
    if limit is None:
        limit = fields.integer("max_tokens")
    reply, is_open = fields.boolean("add_generation_prompt", default=True), fields.boolean("continue_final_message")
    prompt = tokenizer.render(messages, tools, reply, is_open)
    call = parse_call(fields, limits, [prompt], limit, replies(fields))
    call.tool = tool_call(tools, fields.values.get("tool_choice"), "chatcmpl-tool-")
    return call


def parse_completion(fields: Fields, limits: EngineLimits) -> EmulatedCall:
    """Read a completion request.

    Raises:
        EngineError: it cannot be served.
    """
    prompts = prompts_of(fields.required("prompt"), "prompt")
    check_model(fields, limits)
    limit = fields.integer("max_tokens")
    call = parse_call(fields, limits, prompts, DEFAULT_LIMIT if limit is None else limit, replies(fields))
    call.echo = fields.boolean("echo")
    return call


def prompts_of(prompt: Any, name: str) -> list[bytes]:
    """Return the packed tokens of the field *name*: a text, token ids, or a list of these.

    Raises:
        EngineError: it is none of them, or empty.
    """
    if isinstance(prompt, str):
        prompts = [tokenizer.encode(prompt)]
    elif not isinstance(prompt, list):
        raise InvalidBodyError("string_type", f"body.{name}", "Input should be a valid string", prompt)
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


class ChatAnswer(EmulatedAnswer):
    """Chat completion, whole or in chunks."""

    def __init__(self, generation: EmulatedGeneration) -> None:
        super().__init__(generation)
        self._unfinished = len(generation.choices)

    def body(self) -> dict[str, Any]:
        """Return a `chat.completion`."""
        call = self._call
        return {
            **_head(call, "chat.completion", [self._choice(choice) for choice in self._generation.choices]),
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                **_usage(self._generation),
                "prompt_tokens_details": {**self._details(), "multimodal_tokens": None},
                "completion_tokens_details": None,
            },
            "prompt_logprobs": None,
            "prompt_token_ids": _prompt_ids(call, call.prompts[0]),
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self) -> Iterator[bytes]:
        """Return the role of each choice."""
        for choice in self._generation.choices:
            delta = {"role": "assistant", "content": ""}
            opened = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = _prompt_ids(self._call, self._call.prompts[0])
            yield self._chunk([opened], {**self._continuous(0), "prompt_token_ids": ids, "prompt_text": None})

    def news(self, choice: Choice) -> Iterator[bytes]:
        """Return new text; the last chunk has the finish reason."""
        start, reason = choice.sent, choice.finish_reason
        news: dict[str, Any] = {
            "index": choice.index,
            "delta": self._delta(choice),
            "logprobs": None,
            "finish_reason": self._reason(choice),
        }
        if reason is not None:
            news["stop_reason"] = None
            self._unfinished -= 1
        news["token_ids"] = choice.token_ids(start) if self._call.return_token_ids else None
        extra = self._continuous(self._generation.output_tokens)
        if self._unfinished == 0 and not self._call.include_usage:
            extra = {"system_fingerprint": FINGERPRINT}
        yield self._chunk([news], extra)

    def closing(self) -> Iterator[bytes]:
        """Return usage if the request asked for it, and the end."""
        if self._call.include_usage:
            usage = {**_usage(self._generation), "prompt_tokens_details": self._details()}
            yield self._chunk([], {"usage": usage, "system_fingerprint": FINGERPRINT})
        yield DONE

    def _delta(self, choice: Choice) -> dict[str, Any]:
        """Return the new text, or the new part of a tool call: its name comes first."""
        tool, is_first = self._call.tool, choice.sent == 0
        if tool is None:
            return {"content": choice.take()}
        arguments = (tool.before if is_first else "") + tool.escaped(choice.take())
        part: dict[str, Any] = {
            "index": 0,
            "function": {"arguments": arguments + (tool.after if choice.sequence.ended else "")},
        }
        if is_first:
            part = {"id": tool.id, "type": "function", **part, "function": {"name": tool.name, **part["function"]}}
        return {"tool_calls": [part]}

    def _reason(self, choice: Choice) -> str | None:
        return "tool_calls" if self._call.tool is not None and choice.finish_reason == "stop" else choice.finish_reason

    def _choice(self, choice: Choice) -> dict[str, Any]:
        tool = self._call.tool
        calls: dict[str, Any] = {}
        if tool is not None:
            function = {"name": tool.name, "arguments": tool.arguments(choice.produced)}
            calls["tool_calls"] = [{"id": tool.id, "type": "function", "function": function}]
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": choice.produced if tool is None else None,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
                **calls,
            },
            "logprobs": None,
            "finish_reason": self._reason(choice),
            "stop_reason": None,
            "token_ids": choice.token_ids() if self._call.return_token_ids else None,
            "routed_experts": None,
        }

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        return _event({**_head(self._call, "chat.completion.chunk", choices), **extra})

    def _continuous(self, output_tokens: int) -> dict[str, Any]:
        if not self._call.continuous_usage:
            return {}
        prompt_tokens = self._generation.prompt_tokens
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + output_tokens}
        return {"usage": {**usage, "completion_tokens": output_tokens, "completion_tokens_details": None}}

    def _details(self) -> dict[str, int]:
        generation = self._generation
        return {"cached_tokens": generation.cached_tokens, "created_cache_tokens": generation.created_tokens}


class CompletionAnswer(EmulatedAnswer):
    """Text completion, whole or in chunks."""

    def body(self) -> dict[str, Any]:
        """Return a `text_completion`."""
        usage = {
            **_usage(self._generation),
            "prompt_tokens_details": {
                "cached_tokens": self._generation.cached_tokens,
                "created_cache_tokens": None,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }
        return {
            **_head(self._call, "text_completion", [self._choice(choice) for choice in self._generation.choices]),
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": usage,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self) -> Iterator[bytes]:
        """Return no events."""
        return iter(())

    def news(self, choice: Choice) -> Iterator[bytes]:
        """Return new text; the last chunk has the finish reason."""
        start = choice.sent
        text = choice.take()
        first = start == 0
        news = {
            "index": choice.index,
            "text": tokenizer.decode(choice.prompt) + text if first and self._call.echo else text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "prompt_token_ids": _prompt_ids(self._call, choice.prompt) if first else None,
            "token_ids": choice.token_ids(start) if self._call.return_token_ids else None,
        }
        yield self._chunk([news], {"usage": _usage(self._generation)} if self._call.continuous_usage else {})

    def closing(self) -> Iterator[bytes]:
        """Return usage if the request asked for it, and the end."""
        if self._call.include_usage:
            details = {"prompt_tokens_details": {"cached_tokens": self._generation.cached_tokens}}
            usage = {**_usage(self._generation), **details}
            yield self._chunk([], {"usage": usage, "system_fingerprint": FINGERPRINT})
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        return _event({**_head(self._call, "text_completion", choices), **extra})

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
            "prompt_token_ids": _prompt_ids(self._call, choice.prompt),
            "routed_experts": None,
        }


def _head(call: EmulatedCall, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": call.model, "choices": choices}


def _usage(generation: EmulatedGeneration) -> dict[str, int]:
    prompt_tokens, output_tokens = generation.prompt_tokens, generation.output_tokens
    total = prompt_tokens + output_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": output_tokens}


def _prompt_ids(call: EmulatedCall, prompt: bytes) -> list[int] | None:
    return tokenizer.to_ids(prompt) if call.return_token_ids else None


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"

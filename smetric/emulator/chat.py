"""`/v1/chat/completions` of an emulated instance. Tool calls and log probabilities are never generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smetric.emulator import template, tokenizer
from smetric.emulator.answer import DONE, FINGERPRINT, counts, data_event
from smetric.emulator.call import Call, Limits, check_model, parse_call, replies
from smetric.emulator.fields import Fields
from smetric.emulator.generation import Choice, Generation


def parse_chat(fields: Fields, limits: Limits) -> Call:
    """A chat request.

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
    prompt = template.render(messages, tools, reply, is_open)
    return parse_call(fields, limits, [prompt], limit, replies(fields))


class ChatAnswer:
    """A chat completion, whole or in chunks."""

    eager = False

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._call = generation.call
        self._unfinished = len(generation.choices)

    def body(self) -> dict[str, Any]:
        """One `chat.completion`."""
        call, generation = self._call, self._generation
        return {
            "id": call.id,
            "object": "chat.completion",
            "created": call.created,
            "model": call.model,
            "choices": [self._choice(choice) for choice in generation.choices],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": {
                **counts(self._generation),
                "prompt_tokens_details": {**self._details(), "multimodal_tokens": None},
                "completion_tokens_details": None,
            },
            "prompt_logprobs": None,
            "prompt_token_ids": tokenizer.to_ids(call.prompts[0]) if call.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def opening(self) -> Iterator[bytes]:
        """The role of each choice."""
        for choice in self._generation.choices:
            delta = {"role": "assistant", "content": ""}
            told = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = tokenizer.to_ids(self._call.prompts[0]) if self._call.return_token_ids else None
            chunk = self._chunk([told], self._continuous(0))
            yield data_event({**chunk, "prompt_token_ids": ids, "prompt_text": None})

    def news(self, choice: Choice) -> Iterator[bytes]:
        """New text, with the reason if it is the last."""
        start, reason = choice.sent, choice.finish_reason
        told: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": choice.take()},
            "logprobs": None,
            "finish_reason": reason,
        }
        if reason is not None:
            told["stop_reason"] = None
            self._unfinished -= 1
        told["token_ids"] = choice.token_ids(start) if self._call.return_token_ids else None
        extra = self._continuous(self._generation.output_tokens)
        if self._unfinished == 0 and not self._call.include_usage:
            extra = {"system_fingerprint": FINGERPRINT}
        yield data_event(self._chunk([told], extra))

    def closing(self) -> Iterator[bytes]:
        """Usage, if it was asked for, and the end."""
        if self._call.include_usage:
            usage = {**counts(self._generation), "prompt_tokens_details": self._details()}
            yield data_event(self._chunk([], {"usage": usage, "system_fingerprint": FINGERPRINT}))
        yield DONE

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {
                "role": "assistant",
                "content": choice.produced,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": choice.token_ids() if self._call.return_token_ids else None,
            "routed_experts": None,
        }

    def _chunk(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> dict[str, Any]:
        call = self._call
        head = {"id": call.id, "object": "chat.completion.chunk", "created": call.created, "model": call.model}
        return {**head, "choices": choices, **extra}

    def _continuous(self, output_tokens: int) -> dict[str, Any]:
        if not self._call.continuous_usage:
            return {}
        prompt_tokens = self._generation.prompt_tokens
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + output_tokens}
        return {"usage": {**usage, "completion_tokens": output_tokens, "completion_tokens_details": None}}

    def _details(self) -> dict[str, int]:
        generation = self._generation
        return {
            "cached_tokens": generation.cached_tokens,
            "created_cache_tokens": generation.created_tokens,
        }

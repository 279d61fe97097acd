"""`/v1/messages` and `/v1/messages/count_tokens` of an emulated instance.

Requests are brought into chat form first, which is in `messages_chat.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smetric.emulator import template, tokenizer
from smetric.emulator.answer import named_event
from smetric.emulator.call import Call, Limits, check_model, parse_call
from smetric.emulator.fields import Fields
from smetric.emulator.generation import Choice, Generation
from smetric.emulator.messages_chat import chat_of

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}


def parse_message(fields: Fields, limits: Limits) -> Call:
    """A Messages request.

    Raises:
        EngineError: it cannot be served.
    """
    fields.required("messages")
    fields.required("max_tokens")
    prompt = _render(fields)
    check_model(fields, limits)
    return parse_call(fields, limits, [prompt], fields.integer("max_tokens"))


def count_tokens(fields: Fields, limits: Limits) -> dict[str, Any]:
    """The tokens of a Messages request.

    Raises:
        EngineError: it could not be served.
    """
    fields.required("messages")
    check_model(fields, limits)
    count = tokenizer.count(_render(fields))
    return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


def _render(fields: Fields) -> bytes:
    return template.render(*chat_of(fields))


class MessageAnswer:
    """A message, whole or in events."""

    eager = False

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._call = generation.call

    def body(self) -> dict[str, Any]:
        """One `message`."""
        content = [{"type": "text", "text": self._generation.choices[0].produced}]
        head = {"id": self._call.id, "type": "message", "role": "assistant", "content": content}
        return {**head, "model": self._call.model, "stop_reason": self._stop_reason(), "usage": self._usage()}

    def opening(self) -> Iterator[bytes]:
        """The head of the message, and of its only block."""
        message: dict[str, Any] = {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._call.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": self._generation.prompt_tokens, "output_tokens": 0},
        }
        yield named_event({"type": "message_start", "message": message})
        block = {"type": "text", "text": ""}
        yield named_event({"type": "content_block_start", "content_block": block, "index": 0})

    def news(self, choice: Choice) -> Iterator[bytes]:
        """New text of the one choice this API has."""
        text = choice.take()
        if text:
            delta = {"type": "text_delta", "text": text}
            yield named_event({"type": "content_block_delta", "delta": delta, "index": 0})

    def closing(self) -> Iterator[bytes]:
        """The end of the block, the reason with usage, the end."""
        yield named_event({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        yield named_event({"type": "message_delta", "delta": delta, "usage": self._usage()})
        yield named_event({"type": "message_stop"})

    def _stop_reason(self) -> str | None:
        return _STOP_REASONS.get(self._generation.choices[0].finish_reason or "")

    def _usage(self) -> dict[str, int]:
        generation = self._generation
        cached, created = generation.cached_tokens, generation.created_tokens
        return {
            "input_tokens": generation.prompt_tokens - cached - created,
            "output_tokens": generation.output_tokens,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": cached,
        }

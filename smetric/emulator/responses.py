"""`/v1/responses` of an emulated instance. Responses are not stored, so nothing can be continued by an id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smetric.emulator import template
from smetric.emulator.answer import named_event
from smetric.emulator.call import Call, Limits, check_model, new_id, parse_call
from smetric.emulator.error import no_such_response
from smetric.emulator.fields import Fields
from smetric.emulator.generation import Choice, Generation
from smetric.emulator.responses_chat import chat_of

_STATUS = {"length": "incomplete", "stop": "completed", "abort": "cancelled"}


def parse_response(fields: Fields, limits: Limits) -> Call:
    """A Responses request.

    Raises:
        EngineError: it cannot be served.
    """
    fields.required("input")
    check_model(fields, limits)
    previous = fields.string("previous_response_id")
    if previous is not None:
        raise no_such_response(previous)
    messages, tools, is_open = chat_of(fields)
    prompt = template.render(messages, tools, is_open=is_open)
    return parse_call(fields, limits, [prompt], fields.integer("max_output_tokens"))


class ResponseAnswer:
    """A response, whole or in events."""

    eager = True

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._call = generation.call
        self._choice = generation.choices[0]
        self._item_id = new_id("msg_")
        self._events = 0

    def body(self) -> dict[str, Any]:
        """One `response`, ended."""
        reason = self._choice.finish_reason or "abort"
        return self._response(
            _STATUS[reason],
            [self._item("completed", [self._part(self._choice.produced, None)])],
            self._usage(),
            {"reason": "max_output_tokens"} if reason == "length" else None,
        )

    def opening(self) -> Iterator[bytes]:
        """The response and its only item, under way."""
        response = self._response("in_progress", [], None, None)
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})
        item = self._item("in_progress", [])
        yield self._event("response.output_item.added", {"item": item, "output_index": 0})
        yield self._event("response.content_part.added", {**self._place(), "part": self._part("", [])})

    def news(self, choice: Choice) -> Iterator[bytes]:
        """New text of the one choice this API has."""
        text = choice.take()
        if text:
            yield self._event("response.output_text.delta", {**self._place(), "delta": text, "logprobs": []})

    def closing(self) -> Iterator[bytes]:
        """The whole text, part, item and response."""
        text = self._choice.produced
        part = self._part(text, None)
        yield self._event("response.output_text.done", {**self._place(), "logprobs": [], "text": text})
        yield self._event("response.content_part.done", {**self._place(), "part": part})
        item = self._item("completed", [part])
        yield self._event("response.output_item.done", {"item": item, "output_index": 0})
        yield self._event("response.completed", {"response": self.body()})

    def _event(self, kind: str, values: dict[str, Any]) -> bytes:
        number = self._events
        self._events += 1
        # vLLM sorts the fields of an event, and of nothing within it.
        return named_event(dict(sorted({**values, "sequence_number": number, "type": kind}.items())))

    def _place(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}

    def _part(self, text: str, logprobs: list[Any] | None) -> dict[str, Any]:
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "content": content,
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _usage(self) -> dict[str, Any]:
        generation = self._generation
        prompt_tokens, output_tokens = generation.prompt_tokens, generation.output_tokens
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": generation.cached_tokens,
                "cache_write_tokens": generation.created_tokens,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": output_tokens,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt_tokens + output_tokens,
        }

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: dict[str, Any] | None,
        incomplete: dict[str, str] | None,
    ) -> dict[str, Any]:
        call = self._call
        return {
            "id": call.id,
            "created_at": call.created,
            "incomplete_details": incomplete,
            "instructions": None,
            "metadata": None,
            "model": call.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0 if call.temperature is None else call.temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": self._choice.sequence.output_len if call.limit is None else call.limit,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

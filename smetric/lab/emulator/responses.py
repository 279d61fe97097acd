"""OpenAI Responses: /v1/responses, converted to chat form as vLLM does, and the responses that are stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from smetric.lab.emulator.call import (
    EmulatedCall,
    EngineError,
    EngineLimits,
    Fields,
    InvalidBodyError,
    bad_request,
    check_model,
    new_id,
    not_an_object,
    parse_call,
    tool_call,
)
from smetric.lab.emulator.instance import Choice, EmulatedAnswer, EmulatedGeneration, named_event
from smetric.lab.emulator.prompt import function_tool, render

#: Responses that an instance stores at most.
MOST_STORED = 1000
#: States of a last item that the reply continues.
_OPEN = ("in_progress", "incomplete")
_STATUS = {"length": "incomplete", "stop": "completed", "abort": "cancelled"}
#: Parameters of a custom tool.
_FREEFORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def chat_of(fields: Fields) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Return messages and tools in the form of the chat API, and whether the last message is left open.

    Raises:
        InvalidBodyError: an item has another form.
    """
    chat: list[dict[str, Any]] = []
    if instructions := fields.string("instructions"):
        chat.append({"role": "system", "content": instructions})
    items = fields.required("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise InvalidBodyError("string_type", "body.input", "Input should be a valid string", items)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise not_an_object(f"body.input.{index}", item)
        _add(item, chat)
    is_open = bool(items) and items[-1].get("type", "message") in ("message", "reasoning")
    return chat, _tools(fields.objects("tools")), is_open and items[-1].get("status") in _OPEN


def _add(item: dict[str, Any], chat: list[dict[str, Any]]) -> None:
    """Append the message of *item*, or add it to the assistant message before it."""
    kind = item.get("type")
    last = chat[-1] if chat and chat[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        if last is None:
            last = {"role": "assistant"}
            chat.append(last)
        last.setdefault("tool_calls", []).append(_call(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        chat.append({"role": "tool", "content": item.get("output")})
    elif kind == "reasoning":
        # The template leaves it out, but it begins a message.
        _put("reasoning", "", last, chat)
    elif item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
        _put("content", text, last, chat)
    else:
        chat.append({"role": item.get("role"), "content": item.get("content")})


def _put(name: str, text: str, last: dict[str, Any] | None, chat: list[dict[str, Any]]) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        chat.append({"role": "assistant", name: text})


def _call(item: dict[str, Any]) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    elif item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    return {"function": {"name": name, "arguments": arguments}}


def _first_text(content: Any) -> str | None:
    """Return the text of an assistant message: vLLM takes the first part alone."""
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def _tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return functions, also of namespaces, and custom tools as functions of one text; vLLM drops all others."""
    made: list[dict[str, Any]] = []
    for tool in tools:
        kind = tool.get("type")
        if kind == "function":
            made.append(function_tool(tool, tool.get("name"), tool.get("parameters")))
        elif kind == "custom":
            made.append(function_tool(tool, tool.get("name"), _FREEFORM))
        elif kind == "namespace":
            inner = [each for each in Fields(tool, "body.tools").objects("tools") if each.get("type") == "function"]
            made += [
                function_tool(each, f"{tool.get('name')}__{each.get('name')}", each.get("parameters")) for each in inner
            ]
    return made


def no_such_response(response_id: str) -> EngineError:
    """Return the error for a response that is not stored."""
    return EngineError(404, f"Response with id '{response_id}' not found.", "invalid_request_error", "response_id")


class StoredResponse:
    """Stored response: its answer so far, and its events if it is generated in the background as a stream."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self.answer = answer
        self.events: list[bytes] = []
        self.is_over = False
        self._news = asyncio.Event()

    async def record(self, events: AsyncIterator[bytes]) -> None:
        """Keep *events* until their end."""
        async for event in events:
            self.events.append(event)
            self._news.set()
        self.is_over = True
        self._news.set()

    async def replay(self, start: int) -> AsyncIterator[bytes]:
        """Yield the events from number *start* on, also those to come."""
        while True:
            for event in self.events[start:]:
                yield event
                start += 1
            if self.is_over:
                return
            self._news.clear()
            await self._news.wait()


class ResponseStore:
    """The last `MOST_STORED` responses of an instance, in memory. A response is stored unless `store` is false."""

    def __init__(self) -> None:
        self._stored: dict[str, StoredResponse] = {}

    def keep(self, answer: ResponseAnswer) -> StoredResponse:
        """Store a response."""
        if len(self._stored) >= MOST_STORED:
            del self._stored[next(iter(self._stored))]
        stored = self._stored[answer.id] = StoredResponse(answer)
        return stored

    def get(self, response_id: str) -> StoredResponse:
        """Return a stored response.

        Raises:
            EngineError: it is not stored.
        """
        if (stored := self._stored.get(response_id)) is None:
            raise no_such_response(response_id)
        return stored

    def parse(self, fields: Fields, limits: EngineLimits) -> EmulatedCall:
        """Read a Responses request; the conversation of a previous response comes before its own.

        Raises:
            EngineError: it cannot be served.
        """
        fields.required("input")
        check_model(fields, limits)
        messages, tools, is_open = chat_of(fields)
        system = messages[:1] if messages[0]["role"] == "system" else []
        chat = messages[len(system) :]
        previous = fields.string("previous_response_id")
        if previous is not None:
            chat = [*self.get(previous).answer.conversation(), *chat]
        prompt = render([*system, *chat], tools, is_open=is_open)
        call = parse_call(fields, limits, [prompt], fields.integer("max_output_tokens"))
        call.tool = tool_call(tools, fields.values.get("tool_choice"), "call_")
        call.chat, call.previous = chat, previous
        call.store, call.background = fields.boolean("store", default=True), fields.boolean("background")
        if call.background and not call.store:
            raise bad_request("background can only be used when `store` is true", "background")
        return call


class ResponseAnswer(EmulatedAnswer):
    """Response, whole or in events."""

    eager = True

    def __init__(self, generation: EmulatedGeneration) -> None:
        super().__init__(generation)
        self._choice = generation.choices[0]
        self._item_id = new_id("msg_" if self._call.tool is None else "fc_")
        self._events = 0

    @property
    def id(self) -> str:
        """Id of the response."""
        return self._call.id

    @property
    def generation(self) -> EmulatedGeneration:
        """Generation that answers it."""
        return self._generation

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages that a following response begins with."""
        tool, text = self._call.tool, self._choice.produced
        reply: dict[str, Any] = {"role": "assistant", "content": text}
        if tool is not None:
            function = {"name": tool.name, "arguments": tool.arguments(text)}
            reply = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
        return [*self._call.chat, reply]

    def body(self) -> dict[str, Any]:
        """Return a `response` as it is now."""
        reason = self._choice.finish_reason
        if reason is None:
            return self._response("in_progress" if self._choice.sequence.emitted else "queued", [], None, None)
        return self._response(
            _STATUS[reason],
            [self._done()],
            self._usage(),
            {"reason": "max_output_tokens"} if reason == "length" else None,
        )

    def opening(self) -> Iterator[bytes]:
        """Return the response and its only item, in progress."""
        response = self._response("in_progress", [], None, None)
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})
        item = self._item("in_progress", []) if self._call.tool is None else self._function_call("in_progress", "")
        yield self._event("response.output_item.added", {"item": item, "output_index": 0})
        if self._call.tool is None:
            yield self._event("response.content_part.added", {**self._place(), "part": self._part("", [])})

    def news(self, choice: Choice) -> Iterator[bytes]:
        """Return new text."""
        tool, is_first, text = self._call.tool, choice.sent == 0, choice.take()
        if tool is not None:
            part = (
                (tool.before if is_first else "") + tool.escaped(text) + (tool.after if choice.sequence.ended else "")
            )
            place = {"item_id": self._item_id, "output_index": 0}
            yield self._event("response.function_call_arguments.delta", {**place, "delta": part})
        elif text:
            yield self._event("response.output_text.delta", {**self._place(), "delta": text, "logprobs": []})

    def closing(self) -> Iterator[bytes]:
        """Return the whole text, part, item and response."""
        text, tool, item = self._choice.produced, self._call.tool, self._done()
        if tool is None:
            yield self._event("response.output_text.done", {**self._place(), "logprobs": [], "text": text})
            yield self._event("response.content_part.done", {**self._place(), "part": self._part(text, None)})
        else:
            done = {"item_id": self._item_id, "output_index": 0, "name": tool.name, "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", done)
        yield self._event("response.output_item.done", {"item": item, "output_index": 0})
        yield self._event("response.completed", {"response": self.body()})

    def _done(self) -> dict[str, Any]:
        """Return the only item of the output, complete."""
        text, tool = self._choice.produced, self._call.tool
        if tool is None:
            return self._item("completed", [self._part(text, None)])
        return self._function_call("completed", tool.arguments(text))

    def _function_call(self, status: str, arguments: str) -> dict[str, Any]:
        tool = self._call.tool
        assert tool is not None
        made = {"id": self._item_id, "call_id": tool.id, "name": tool.name, "arguments": arguments}
        return {**made, "status": status, "type": "function_call"}

    def _event(self, kind: str, values: dict[str, Any]) -> bytes:
        number = self._events
        self._events += 1
        # vLLM sorts the fields of an event, but not those of inner objects.
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
            "tool_choice": "none" if call.tool is None else "required",
            "tools": [],
            "top_p": 1.0,
            "background": call.background,
            "max_output_tokens": self._choice.sequence.output_len if call.limit is None else call.limit,
            "max_tool_calls": None,
            "previous_response_id": call.previous,
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

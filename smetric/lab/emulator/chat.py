"""/v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from xxhash import xxh3_64_digest

from smetric.lab.emulator import call as tokenizer
from smetric.lab.emulator.call import (
    END,
    START,
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

# The emulated chat template: tools, then messages in their order, each between markers, in packed tokens.
#
# It is the plain ChatML template that the recorded prompts of a real engine were made with, after what vLLM does to
# messages first: contents are joined, arguments of calls decoded, developers' messages moved to the system's. What
# follows another text always starts on a token of its own, so that a prompt stays a prefix of the next turn's prompt,
# the generated reply included. Names and ids of messages and calls, and reasoning, are left out, as common templates
# do.

#: Tokens an image takes.
IMAGE_TOKENS = 1024
#: What Claude Code's system block begins with that changes with each request; vLLM drops it.
BILLING = "x-anthropic-billing-header"

_NEWLINE = tokenizer.encode("\n")
_REPLY = START + tokenizer.encode("assistant\n")
#: Parts that are text, and the field it is in.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
#: Parts of which the template shows nothing.
_SILENT_PARTS = ("tool_reference",)


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    reply: bool = True,
    is_open: bool = False,
) -> bytes:
    """The prompt of a conversation in Chat Completions form, as packed tokens.

    Args:
        messages: at least one message, each with `role` and `content` (a string, parts, or null).
        tools: the tools on offer, as they came.
        reply: end with the head of the reply that is asked for.
        is_open: the last message is left open, to be continued.

    Raises:
        EngineError: there is no message.
        InvalidBodyError: a message has no role or its content has another form, or a tool is none.
    """
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    out = bytearray()
    if tools:
        out += START + tokenizer.encode("system\n# Tools\n")
        for index, tool in enumerate(tools):
            out += tokenizer.encode(_json(_tool(tool, f"body.tools.{index}")) + "\n")
        out += END + _NEWLINE
    for role, content, calls in _system_first([_prepared(message, at) for at, message in enumerate(messages)]):
        out += START + tokenizer.encode(role + "\n")
        for piece in content:
            out += tokenizer.encode(piece) if isinstance(piece, str) else piece
        for call in calls:
            out += tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>")
        out += END + _NEWLINE
    if is_open:
        del out[-len(END + _NEWLINE) :]
    elif reply:
        out += _REPLY
    return bytes(out)


#: A message: its role, its content as texts and packed tokens of media, and its calls.
_Prepared = tuple[str, list[str | bytes], list[str]]


def _prepared(message: dict[str, Any], index: int) -> _Prepared:
    role = message.get("role")
    if not isinstance(role, str):
        raise InvalidBodyError("missing", f"body.messages.{index}.role", "Field required", message)
    content = _content(message.get("content"), role, f"body.messages.{index}.content")
    calls = Fields(message, f"body.messages.{index}").objects("tool_calls") if role == "assistant" else []
    return role, content, [_call(call) for call in calls]


def _content(content: Any, role: str, at: str) -> list[str | bytes]:
    """Neighbouring texts as one, and what is no text as the packed tokens it takes."""
    if content is None:
        return []
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise InvalidBodyError("string_type", at, "Input should be a valid string", content)
    between = "\n" if role == "tool" else ""
    pieces: list[str | bytes] = []
    for part in content:
        piece = _piece(part, at)
        if role == "system" and isinstance(piece, str) and piece.startswith(BILLING):
            piece = piece.partition("\n")[2] or None
        if piece is None:
            continue
        if pieces and isinstance(piece, str) and isinstance(last := pieces[-1], str):
            pieces[-1] = last + between + piece
        else:
            pieces.append(piece)
    return pieces


def _piece(part: Any, at: str) -> str | bytes | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidBodyError("model_attributes_type", at, "Input should be a valid dictionary", part)
    kind = part.get("type", "text")
    if not isinstance(kind, str):
        raise InvalidBodyError("string_type", at, "Input should be a valid string", kind)
    if kind in _SILENT_PARTS:
        return None
    text = part.get(_TEXT_PARTS.get(kind, ""))
    if kind in _TEXT_PARTS:
        return text if isinstance(text, str) else None
    # Anything that is no text takes an image's room, named by what it holds.
    named = {key: value for key, value in part.items() if key != "cache_control"}
    return xxh3_64_digest(_json(named).encode()) * (IMAGE_TOKENS // 2)


def _call(call: dict[str, Any]) -> str:
    """Name and arguments; arguments that are no object become an empty one."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad_request("A tool call has no function.", "tool_calls")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    return _json({"name": function.get("name"), "arguments": arguments if isinstance(arguments, dict) else {}})


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    """A tool with the fields, and in the order, in which vLLM writes it out again."""
    given = tool.get("function")
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise InvalidBodyError("missing", f"{at}.function.name", "Field required", tool)
    function = {name: given.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    if (loading := given.get("defer_loading")) is not None or (loading := deferred) is not None:
        function["defer_loading"] = loading
    made = {"type": "function", "function": function}
    return made if deferred is None else {**made, "defer_loading": deferred}


def _system_first(messages: list[_Prepared]) -> list[_Prepared]:
    """*messages*, with developers' as the system's, and all of these as one at the beginning if there are any."""
    if not any(role == "developer" for role, _, _ in messages):
        return messages
    system = [content for role, content, _ in messages if role in ("developer", "system")]
    if len(system) == 1 and messages[0][0] == "developer":
        return [("system", *messages[0][1:]), *messages[1:]]
    text = "\n\n".join(text for content in system if (text := "\n".join(p for p in content if isinstance(p, str))))
    return [("system", [text], []), *(message for message in messages if message[0] not in ("developer", "system"))]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# `/v1/chat/completions` of an emulated instance. Tool calls and log probabilities are never generated.


def parse_chat(fields: Fields, limits: EngineLimits) -> EmulatedCall:
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
    prompt = render(messages, tools, reply, is_open)
    return parse_call(fields, limits, [prompt], limit, replies(fields))


class ChatAnswer:
    """A chat completion, whole or in chunks."""

    eager = False

    def __init__(self, generation: EmulatedGeneration) -> None:
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

"""Chat templates, rendered as vLLM 0.32 and transformers do; needs the extra `tokenizers`.

The environment is that of transformers' `chat_template_utils`. The preparation of messages is that of vLLM's
`renderers/chat_utils.py` and `renderers/hf.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from smetric.sources.tokens.chat import BILLING, TEXT_PARTS, ChatPrompt, Refused, Unsupported

#: Arguments of the rendering itself, which those of a request do not replace.
_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
    }
)


def takes_parts(root: nodes.Template) -> bool:
    """Return whether the template *root* reads the content of a message as a list of parts instead of one text.

    As in vLLM (`--chat-template-content-format auto`), it does so if it loops over the content of a message: directly,
    through a variable, or through an argument of a macro.
    """
    messages = set(_messages(root))
    arguments = {id(loop): names for loop, names in _macro_loops(root, messages)}
    for loop in root.find_all(nodes.For):
        if any(_reaches(loop.iter, message, "content") for message in messages):
            return True
        if isinstance(loop.iter, nodes.Name):
            taken = arguments.get(id(loop))
            if loop.iter.name in taken if taken is not None else loop.iter.name == "content":
                return True
    return False


def _messages(root: nodes.Template) -> Iterator[str]:
    """Yield the loop variables of loops over the messages."""
    lists = ["messages"]
    for known in lists:  # grows while it is walked
        for assigned in root.find_all(nodes.Assign):
            target = assigned.target
            if isinstance(target, nodes.Name) and target.name not in lists and _reaches(assigned.node, known):
                lists.append(target.name)
    for loop in root.find_all(nodes.For):
        if isinstance(loop.target, nodes.Name) and any(_reaches(loop.iter, name) for name in lists):
            yield loop.target.name


def _macro_loops(root: nodes.Template, messages: set[str]) -> Iterator[tuple[nodes.For, set[str]]]:
    """Yield each loop in a macro with those arguments of the macro that are a message's content in some call."""
    for macro in root.find_all(nodes.Macro):
        names: list[str] = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in root.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            passed = [*zip(names, call.args, strict=False)]
            passed += [(keyword.key, keyword.value) for keyword in call.kwargs if isinstance(keyword, nodes.Keyword)]
            given |= {
                name
                for name, value in passed
                if name in names and any(_reaches(value, message, "content") for message in messages)
            }
        for loop in macro.find_all(nodes.For):
            yield loop, given


def _reaches(node: nodes.Node | None, variable: str, key: str = "") -> bool:
    """Return whether *node* is *variable*, or its item *key*, below any filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key:
        if isinstance(node, nodes.Getitem):
            found = isinstance(node.arg, nodes.Const) and node.arg.value == key
        else:
            found = isinstance(node, nodes.Getattr) and node.attr == key
        if not found:
            return False
        assert isinstance(node, nodes.Getitem | nodes.Getattr)
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable


class _Generation(Extension):
    """`{% generation %}` blocks, which mark a model's own text in training data; rendered as they are."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return str(caller())


class ChatTemplate:
    """A model's chat template.

    Args:
        source: Jinja source.
        special_tokens: names and texts of special tokens, such as `bos_token`.

    Raises:
        jinja2.TemplateError: *source* is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # the engine's local time too
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._takes_parts = takes_parts(environment.parse(source))
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(self, chat: ChatPrompt) -> str:
        """Return the text of *chat*.

        Raises:
            Refused: the template, or the engine before it, refuses it.
            Unsupported: it has its own template, or continues its last message.
        """
        if chat.chat_template is not None or chat.continue_final_message:
            raise Unsupported
        if not chat.messages:
            raise Refused
        messages = [self._message(message) for message in chat.messages]
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            messages = _system_first([_without_developer(message) for message in messages])
        more = {name: value for name, value in chat.template_kwargs.items() if name not in _RESERVED}
        try:
            return self._template.render(
                messages=messages,
                tools=None if chat.tools is None else [_tool(tool) for tool in chat.tools],
                add_generation_prompt=chat.add_generation_prompt,
                **{"documents": None, **self._special_tokens, **more},
            )
        # A template may fail on any conversation it was not written for, as it does in the engine.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError):
            raise Refused from None

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return *message* as the template gets it."""
        role, content = message["role"], message.get("content")
        parts: list[Any] = [] if content is None else [content] if isinstance(content, str) else list(content)
        if role == "system":
            parts = _without_billing(parts)
        taken = [part for part in map(_text_part, parts) if part is not None]
        made: dict[str, Any] = {"role": role}
        if not self._takes_parts:
            made["content"] = "\n".join(text for _, text in taken)
        else:
            made["content"] = [
                {"type": kind, "name" if kind == "tool_reference" else "text": text} for kind, text in taken
            ]
        if role == "assistant":
            if calls := message.get("tool_calls"):
                if not isinstance(calls, list):
                    raise Refused
                made["tool_calls"] = [_call(call) for call in calls]
            if message.get("reasoning") is not None:
                made["reasoning"] = made["reasoning_content"] = message["reasoning"]
        elif role == "tool":
            if "tool_call_id" in message:
                made["tool_call_id"] = message["tool_call_id"]
            if self._takes_parts and all(kind == "text" for kind, _ in taken):
                made["content"] = "\n".join(text for _, text in taken)
        elif role == "developer":
            made["tools"] = message.get("tools")
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                made[name] = message[name]
        return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _text_part(part: Any) -> tuple[str, str] | None:
    """Return type and text of a part as the template sees it; None if it is left out."""
    if isinstance(part, str):
        return "text", part
    kind = part["type"]
    text = part.get(TEXT_PARTS[kind])
    if text is None:
        if kind in ("text", "refusal"):
            return None
        raise Refused
    return ("tool_reference" if kind == "tool_reference" else "text"), text


def _without_billing(parts: list[Any]) -> list[Any]:
    """Return system *parts* without the line of Claude Code's billing header."""
    kept: list[Any] = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
        if not isinstance(text, str) or not text.startswith(BILLING):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest)
    return kept


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call with decoded arguments; arguments other than an object become an empty one."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Refused
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool with the fields, and in the order, in which the engine serialises it."""
    given = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise Refused
    function = {name: given.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    if (loading := given.get("defer_loading")) is not None or (loading := deferred) is not None:
        function["defer_loading"] = loading
    made = {"type": "function", "function": function}
    if deferred is not None:
        made["defer_loading"] = deferred
    return made


def _without_developer(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *messages* with all system messages merged into a leading one, unless the only one already leads."""
    system = [message for message in messages if message["role"] == "system"]
    if len(system) <= 1 and (not system or messages[0] is system[0]):
        return messages
    texts = [
        one["content"]
        if isinstance(one["content"], str)
        else "\n".join(part["text"] for part in one["content"] if "text" in part)
        for one in system
    ]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]

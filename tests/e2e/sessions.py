"""Agent sessions of bounded size that no person wrote: each turn carries the whole history, tools and tool results."""

from __future__ import annotations

import inspect
import json
import random
import string
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.real_vllm import MODEL

#: Text of all kinds an agent reads: source of the standard library.
_TEXT = "\n".join(inspect.getsource(module) for module in (string, textwrap, inspect, random))
_TOOLS = [
    {
        "name": name,
        "description": f"{name} a file of the project and answer with what was found",
        "schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for name in ("read", "search", "edit")
]


@dataclass
class AgentSession:
    """A conversation that grows with each reply; ask for `body()`, then tell `answered()`.

    Args:
        number: which one; sessions of three share a system prompt and its tools.
        api: chat or messages.
        task: characters of the first wish, the part of the first prompt that is its own.
    """

    number: int
    api: str
    task: int = 600
    _rng: random.Random = field(init=False)
    _history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.number)
        self._system = f"You are agent {self.number % 3} of a team.\n" + _TEXT[:1500]
        self._history.append({"role": "user", "content": f"Task {self.number}: " + self._some(self.task)})

    def _some(self, length: int) -> str:
        start = self._rng.randrange(len(_TEXT) - length)
        return _TEXT[start : start + length]

    @property
    def path(self) -> str:
        return "/v1/messages" if self.api == "messages" else "/v1/chat/completions"

    def body(self, *, stream: bool = False, max_tokens: int = 24) -> dict[str, Any]:
        shared = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0.7, "stream": stream}
        if self.api == "messages":
            tools = [{"name": t["name"], "description": t["description"], "input_schema": t["schema"]} for t in _TOOLS]
            return shared | {"system": self._system, "messages": self._history, "tools": tools}
        functions = [{"name": t["name"], "description": t["description"], "parameters": t["schema"]} for t in _TOOLS]
        messages = [{"role": "system", "content": self._system}, *self._history]
        return shared | {
            "messages": messages,
            "tools": [{"type": "function", "function": one} for one in functions],
            "tool_choice": "none",
        }

    def answered(self, text: str) -> None:
        """Take the reply, and go on with a tool's result or the user's next wish."""
        turn = len(self._history)
        if self._rng.random() < 0.3:
            self._history += [{"role": "assistant", "content": text or "-"}]
            self._history += [{"role": "user", "content": self._some(self._rng.randrange(100, 500))}]
            return
        call, result = f"call_{self.number}_{turn}", self._some(self._rng.randrange(100, 900))
        arguments = {"path": f"src/part{turn}.py"}
        self._history += list(
            self._messages_call(text, call, arguments, result)
            if self.api == "messages"
            else self._chat_call(text, call, arguments, result)
        )

    @staticmethod
    def _messages_call(text: str, call: str, arguments: dict[str, str], result: str) -> Iterator[dict[str, Any]]:
        use = {"type": "tool_use", "id": call, "name": "read", "input": arguments}
        yield {"role": "assistant", "content": [*([{"type": "text", "text": text}] if text else []), use]}
        yield {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": result}]}

    @staticmethod
    def _chat_call(text: str, call: str, arguments: dict[str, str], result: str) -> Iterator[dict[str, Any]]:
        function = {"name": "read", "arguments": json.dumps(arguments)}
        yield {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        }
        yield {"role": "tool", "tool_call_id": call, "content": result}

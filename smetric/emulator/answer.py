"""What every API's answer is made of: one body, or the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import orjson

from smetric.emulator.generation import Choice, Generation

#: As vLLM 0.32.0 signs its answers.
FINGERPRINT = "vllm-0.32.0-emulated"

#: The end of a stream in the OpenAI APIs.
DONE = b"data: [DONE]\n\n"


class Answer(Protocol):
    """Writes the answer to one call in one API's form; events are whole, one chunk each on the wire."""

    #: Whether the opening is sent at once; otherwise it waits for the first token.
    eager: bool

    def body(self) -> dict[str, Any]:
        """The answer that is not streamed, once everything has ended."""

    def opening(self) -> Iterable[bytes]:
        """The events before the first token."""

    def news(self, choice: Choice) -> Iterable[bytes]:
        """The events for what *choice* has to tell."""

    def closing(self) -> Iterable[bytes]:
        """The events after everything has ended."""


def counts(generation: Generation) -> dict[str, int]:
    """What `usage` begins with in the OpenAI APIs."""
    prompt_tokens, output_tokens = generation.prompt_tokens, generation.output_tokens
    total = prompt_tokens + output_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": output_tokens}


def data_event(value: dict[str, Any]) -> bytes:
    """An event without a name."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """An event named by its own `type`."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"

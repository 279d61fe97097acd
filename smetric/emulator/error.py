"""Errors of an emulated engine, in the words and shapes of vLLM."""

from __future__ import annotations

from typing import Any

import orjson

BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
#: The type of an error of a body that does not validate.
INVALID = "Bad Request"


class EngineError(Exception):
    """An error that is answered to the client.

    Args:
        status: HTTP status.
        message: as vLLM words it; values of prompts are never repeated.
        kind: `error.type` of the body.
        param: the field at fault.
    """

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    def body(self, *, anthropic: bool) -> bytes:
        """The body of the answer, in Anthropic's shape or in OpenAI's; what does not validate always has OpenAI's."""
        if anthropic and self.kind != INVALID:
            return orjson.dumps({"type": "error", "error": {"type": self.kind, "message": self.message}})
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}
        )


class UnreadableBodyError(Exception):
    """The body is no text, or more deeply nested or longer in its numbers than the parser reads."""


class InvalidBodyError(EngineError):
    """The body does not have the shape the API asks for.

    Args:
        rule: the name of the rule that was broken, as pydantic gives it.
        at: the place, from `body`.
        message: what should be there.
        value: what is there; only its kind and size are told.
    """

    def __init__(self, rule: str, at: str, message: str, value: object, context: str | None = None) -> None:
        found = {"type": rule, "loc": at, "msg": message, "input": _kind_of(value)}
        details: dict[str, Any] = found if context is None else {**found, "ctx": {"error": context}}
        super().__init__(400, f"1 validation error:\n  {details}", INVALID, at)


def bad_request(message: str, param: str | None = None, value: object = None) -> EngineError:
    """A request that is well formed and cannot be served."""
    if param is not None:
        shown = "" if value is None else f", value={value}"
        message = f"{message} (parameter={param}{shown})"
    return EngineError(400, message, "BadRequestError", param)


def unknown_model(model: str, known: tuple[str, ...]) -> EngineError:
    """A model this engine does not serve."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(known)}."
    return EngineError(404, message, "NotFoundError", "model")


def busy() -> EngineError:
    """The queue is full."""
    return EngineError(503, BUSY, "Service Unavailable")


def no_such_response(response_id: str) -> EngineError:
    """Responses are not stored, as in vLLM unless it is told to."""
    return EngineError(404, f"Response with id '{response_id}' not found.", "invalid_request_error", "response_id")


def _kind_of(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, str):
        return f"<str of {len(value)} characters>"
    return str(value)

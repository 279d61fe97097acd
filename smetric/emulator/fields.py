"""Typed access to the fields of a JSON body; what is wrong is told as vLLM's validation tells it."""

from __future__ import annotations

import json
from typing import Any

import orjson

from smetric.emulator.error import InvalidBodyError, UnreadableBodyError


class Fields:
    """An object of the body.

    Args:
        values: the decoded object.
        at: where it stands, for errors.
    """

    __slots__ = ("at", "values")

    def __init__(self, values: dict[str, Any], at: str = "body") -> None:
        self.values = values
        self.at = at

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        """Decode a request body.

        Raises:
            InvalidBodyError: it is empty, no JSON, no object, or a string in it is no text.
            UnreadableBodyError: it is no UTF-8, or more than the parser reads.
        """
        if not body:
            raise InvalidBodyError("missing", "body", "Field required", None)
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError:
            # The slow parser is the one vLLM has: it is a little more lenient, and words and counts as vLLM does.
            try:
                values = json.loads(body)
            except json.JSONDecodeError as error:
                at = f"body.{error.pos}"
                raise InvalidBodyError("json_invalid", at, "JSON decode error", {}, error.msg) from None
            except (ValueError, RecursionError) as error:
                raise UnreadableBodyError from error
            # It also takes halves of surrogate pairs, which the validation after it does not.
            try:
                json.dumps(values, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                message = "Input should be a valid string, unable to parse raw data as a unicode string"
                raise InvalidBodyError("string_unicode", "body", message, {}) from None
        if not isinstance(values, dict):
            raise InvalidBodyError("model_attributes_type", "body", "Input should be a valid dictionary", values)
        return cls(values)

    def required(self, name: str) -> Any:
        """The value of a field that must be there."""
        if self.values.get(name) is None:
            raise InvalidBodyError("missing", f"{self.at}.{name}", "Field required", self.values)
        return self.values[name]

    def integer(self, name: str) -> int | None:
        """A whole number, None if the field is absent or null."""
        value = self.values.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, str):
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise InvalidBodyError("int_parsing", f"{self.at}.{name}", message, value)
        raise InvalidBodyError("int_type", f"{self.at}.{name}", "Input should be a valid integer", value)

    def number(self, name: str) -> float | None:
        """A number, None if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise InvalidBodyError("float_type", f"{self.at}.{name}", "Input should be a valid number", value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise InvalidBodyError("bool_type", f"{self.at}.{name}", "Input should be a valid boolean", value)

    def string(self, name: str) -> str | None:
        """A text, None if the field is absent or null."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise InvalidBodyError("string_type", f"{self.at}.{name}", "Input should be a valid string", value)

    def objects(self, name: str) -> list[dict[str, Any]]:
        """A list of objects, empty if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise InvalidBodyError("list_type", f"{self.at}.{name}", "Input should be a valid list", value)
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                message = "Input should be a valid dictionary"
                raise InvalidBodyError("model_attributes_type", f"{self.at}.{name}.{index}", message, item)
        return value

    def nested(self, name: str) -> Fields:
        """An object within, empty if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return Fields({}, f"{self.at}.{name}")
        if not isinstance(value, dict):
            message = "Input should be a valid dictionary"
            raise InvalidBodyError("model_attributes_type", f"{self.at}.{name}", message, value)
        return Fields(value, f"{self.at}.{name}")

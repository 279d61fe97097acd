"""Request of an emulated engine: errors in vLLM's words, typed fields of its body, and what they ask for."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from smetric.lab.store import TOKEN_BYTES

#: `error.type` of a body that does not validate.
INVALID = "Bad Request"
#: Most sequences of one request, n × prompts.
MAX_SEQUENCES = 256


class EngineError(Exception):
    """Error that is answered to the client.

    Args:
        status: HTTP status.
        message: in vLLM's words; it never repeats values of prompts.
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
        """Return the body in Anthropic's shape or in OpenAI's; a validation error always has OpenAI's."""
        if anthropic and self.kind != INVALID:
            return orjson.dumps({"type": "error", "error": {"type": self.kind, "message": self.message}})
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}
        )


class UnreadableBodyError(Exception):
    """Body that is not UTF-8, nested too deeply, or with numbers too long for the parser."""


class InvalidBodyError(EngineError):
    """Body of another shape than the API expects.

    Args:
        rule: name of the broken rule, as pydantic gives it.
        at: the place, from `body`.
        message: what is expected there.
        value: what is there; the error shows only its kind and size.
        context: the parser's own message.
    """

    def __init__(self, rule: str, at: str, message: str, value: object, context: str | None = None) -> None:
        found = {"type": rule, "loc": at, "msg": message, "input": _kind_of(value)}
        details: dict[str, Any] = found if context is None else {**found, "ctx": {"error": context}}
        super().__init__(400, f"1 validation error:\n  {details}", INVALID, at)


def bad_request(message: str, param: str | None = None, value: object = None) -> EngineError:
    """Return the error of a well-formed request that cannot be served."""
    if param is not None:
        shown = "" if value is None else f", value={value}"
        message = f"{message} (parameter={param}{shown})"
    return EngineError(400, message, "BadRequestError", param)


def not_an_object(at: str, value: object) -> InvalidBodyError:
    """Return the error of a value that must be an object."""
    return InvalidBodyError("model_attributes_type", at, "Input should be a valid dictionary", value)


def _kind_of(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, str):
        return f"<str of {len(value)} characters>"
    return str(value)


class Fields:
    """Typed access to an object of the body; errors read as those of vLLM's validation.

    Each accessor treats null as absent and raises `InvalidBodyError` for another type.

    Args:
        values: the decoded object.
        at: its place, for errors.
    """

    __slots__ = ("at", "values")

    def __init__(self, values: dict[str, Any], at: str = "body") -> None:
        self.values = values
        self.at = at

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        """Decode a request body.

        Raises:
            InvalidBodyError: it is empty, not a JSON object, or contains half a surrogate pair.
            UnreadableBodyError: it is not UTF-8, or exceeds the parser's limits.
        """
        if not body:
            raise InvalidBodyError("missing", "body", "Field required", None)
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError:
            # vLLM uses the standard parser: it accepts a little more, and its messages and positions are repeated here.
            try:
                values = json.loads(body)
            except json.JSONDecodeError as error:
                at = f"body.{error.pos}"
                raise InvalidBodyError("json_invalid", at, "JSON decode error", {}, error.msg) from None
            except (ValueError, RecursionError) as error:
                raise UnreadableBodyError from error
            # That parser also accepts half a surrogate pair, which vLLM's validation rejects.
            try:
                json.dumps(values, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                message = "Input should be a valid string, unable to parse raw data as a unicode string"
                raise InvalidBodyError("string_unicode", "body", message, {}) from None
        if not isinstance(values, dict):
            raise not_an_object("body", values)
        return cls(values)

    def required(self, name: str) -> Any:
        """Return the value of a mandatory field of any type."""
        if self.values.get(name) is None:
            raise InvalidBodyError("missing", f"{self.at}.{name}", "Field required", self.values)
        return self.values[name]

    def integer(self, name: str) -> int | None:
        """Return a whole number, or None if it is absent."""
        value = self.values.get(name)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, str):
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise InvalidBodyError("int_parsing", f"{self.at}.{name}", message, value)
        number: int | None = self._checked(name, (int,), "int_type", "integer")
        return number

    def number(self, name: str) -> float | None:
        """Return a number, or None if it is absent."""
        value = self._checked(name, (int, float), "float_type", "number")
        return None if value is None else float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a truth value, or *default* if it is absent."""
        value = self._checked(name, (bool,), "bool_type", "boolean")
        return default if value is None else bool(value)

    def string(self, name: str) -> str | None:
        """Return a text, or None if it is absent."""
        text: str | None = self._checked(name, (str,), "string_type", "string")
        return text

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return a list of objects; it is empty if the field is absent."""
        items: list[Any] = self._checked(name, (list,), "list_type", "list") or []
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                raise not_an_object(f"{self.at}.{name}.{index}", item)
        return items

    def nested(self, name: str) -> Fields:
        """Return an inner object; it is empty if the field is absent."""
        return Fields(self._checked(name, (dict,), "model_attributes_type", "dictionary") or {}, f"{self.at}.{name}")

    def _checked(self, name: str, kinds: tuple[type, ...], rule: str, expected: str) -> Any:
        value = self.values.get(name)
        # A truth value is an int in Python, but not in JSON.
        if value is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            return value
        raise InvalidBodyError(rule, f"{self.at}.{name}", f"Input should be a valid {expected}", value)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a function that stands for the text of a reply.

    Args:
        name: the function.
        before: JSON of the arguments before the text, which is the value of one of them.
        after: JSON behind it.
        id: identifies the call.
    """

    name: str
    before: str
    after: str
    id: str

    def arguments(self, text: str) -> str:
        """Return the arguments, as JSON."""
        return self.before + self.escaped(text) + self.after

    @staticmethod
    def escaped(text: str) -> str:
        """Return *text* within a JSON string."""
        return json.dumps(text)[1:-1]


def tool_call(tools: Sequence[dict[str, Any]], choice: Any, id_prefix: str) -> ToolCall | None:
    """Return the call that `tool_choice` demands; None where the model may choose, as it chooses text.

    Args:
        tools: in Chat Completions form.
        choice: `required` or `any` for the first one, or an object that names one.
        id_prefix: of the call's id.

    Raises:
        EngineError: there is no such function.
    """
    if isinstance(choice, dict) and choice.get("type") in ("any", "auto", "none"):
        choice = choice["type"]
    if choice in (None, "auto", "none"):
        return None
    functions = [Fields(tool, "body.tools").nested("function") for tool in tools]
    named: Any = functions[0].values.get("name") if functions else None
    if isinstance(choice, dict):
        named = Fields(choice, "body.tool_choice").nested("function").values.get("name", choice.get("name"))
    function = next((each for each in functions if each.string("name") == named), None)
    if function is None or not isinstance(named, str):
        raise bad_request("tool_choice asks for a function that is not in tools", "tool_choice")
    schema = function.nested("parameters")
    properties = {name: kind for name, kind in schema.nested("properties").values.items() if isinstance(kind, dict)}
    text = next(
        (name for name, kind in properties.items() if kind.get("type") == "string" and "enum" not in kind), "input"
    )
    required = schema.values.get("required")
    required = required if isinstance(required, list) else []
    others = {name: _example(kind) for name, kind in properties.items() if name in required and name != text}
    return ToolCall(named, json.dumps({**others, text: ""})[:-2], '"}', f"{id_prefix}{uuid.uuid4().hex[:24]}")


def _example(schema: Mapping[str, Any]) -> Any:
    """Return a value of a property: the first of its choices, or the zero of its type."""
    zeros = {"string": "", "integer": 0, "number": 0, "boolean": False, "array": [], "object": {}}
    choices, kind = schema.get("enum"), schema.get("type")
    if isinstance(choices, list) and choices:
        return choices[0]
    return zeros.get(kind) if isinstance(kind, str) else None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Served names, of which answers carry the first, and the longest prompt and output together, in tokens."""

    names: tuple[str, ...]
    max_model_len: int


@dataclass(slots=True, kw_only=True)
class EmulatedCall:
    """Request to generate, in the same form for every API.

    Args:
        prompts: packed tokens.
        n: replies to each prompt.
        limit: most output tokens; None for the natural length of the reply.
        shortest: fewest output tokens.
        exact: the reply ends at the limit alone (`ignore_eos`).
        salt: separates cached prefixes.
        echo: repeat the prompt before the reply (Completions).
        tool: the call that the reply is; None for text.
        background: answer before it is generated (Responses).
        store: keep the response for later requests (Responses).
        chat: the conversation that `store` keeps.
        previous: id of the response that this one follows.
        dimensions: numbers of an embedding.
        is_base64: whether they are packed.
    """

    prompts: Sequence[bytes]
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    n: int = 1
    limit: int | None = None
    shortest: int = 0
    exact: bool = False
    seed: int | None = None
    salt: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False
    temperature: float | None = None
    tool: ToolCall | None = None
    background: bool = False
    store: bool = False
    chat: Sequence[dict[str, Any]] = ()
    previous: str | None = None
    dimensions: int = 0
    is_base64: bool = False


def parse_call(
    fields: Fields, limits: EngineLimits, prompts: Sequence[bytes], limit: int | None, n: int = 1
) -> EmulatedCall:
    """Read the fields that all APIs share; *prompts* are rendered already.

    Raises:
        EngineError: a value or a length cannot be served.
    """
    check_model(fields, limits)
    call = EmulatedCall(
        prompts=prompts,
        model=limits.names[0],
        n=n,
        limit=limit,
        shortest=_at_least(fields, "min_tokens", 0) or 0,
        exact=fields.boolean("ignore_eos"),
        seed=fields.integer("seed"),
        salt=_salt(fields),
        stream=fields.boolean("stream"),
        return_token_ids=fields.boolean("return_token_ids"),
        temperature=fields.number("temperature"),
    )
    if call.stream:
        options = fields.nested("stream_options")
        call.include_usage = options.boolean("include_usage")
        call.continuous_usage = call.include_usage and options.boolean("continuous_usage_stats")
    if call.temperature is not None and call.temperature < 0:
        message = f"temperature must be non-negative, got {call.temperature}."
        raise bad_request(message, "temperature", call.temperature)
    fields.integer("priority")
    if len(prompts) * call.n > MAX_SEQUENCES:
        raise bad_request(f"A request may ask for {MAX_SEQUENCES} sequences at most.", "n", call.n)
    _check_lengths(call, limits.max_model_len)
    return call


def check_model(fields: Fields, limits: EngineLimits) -> None:
    """Raise `EngineError` for a model that is not served; an absent name means the served one."""
    model = fields.string("model")
    if model and model not in limits.names:
        message = f"The model `{model}` does not exist. Valid aliases: {', '.join(limits.names)}."
        raise EngineError(404, message, "NotFoundError", "model")


def new_id(prefix: str) -> str:
    """Return an id in vLLM's form: *prefix* and 16 hexadecimal digits."""
    return f"{prefix}{uuid.uuid4().hex[:16]}"


def replies(fields: Fields) -> int:
    """Return the number of replies to each prompt, for the APIs that have `n`."""
    return _at_least(fields, "n", 1) or 1


def _at_least(fields: Fields, name: str, least: int) -> int | None:
    value = fields.integer(name)
    if value is not None and value < least:
        raise bad_request(f"{name} must be at least {least}, got {value}.", name, value)
    return value


def _salt(fields: Fields) -> str:
    salt = fields.string("cache_salt")
    if salt == "":
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    return salt or ""


def _check_lengths(call: EmulatedCall, longest: int) -> None:
    limit = call.limit
    if limit is not None:
        if limit < 1:
            raise bad_request(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
        if limit > longest:
            message = f"max_tokens={limit} cannot be greater than max_model_len={longest}."
            raise bad_request(f"{message} Please request fewer output tokens.", "max_tokens", limit)
    for prompt in call.prompts:
        length = len(prompt) // TOKEN_BYTES
        start = f"This model's maximum context length is {longest} tokens. However, "
        if length >= longest:
            message = (
                f"{start}your prompt contains at least {longest + 1} input tokens, which exceeds this limit even "
                "without any output tokens. Please reduce the length of the input prompt."
            )
            raise bad_request(message, "input_tokens", longest + 1)
        if limit is not None and length + limit > longest:
            message = (
                f"{start}you requested {limit} output tokens and your prompt contains at least {length} input "
                f"tokens, for a total of at least {length + limit} tokens. Please reduce the length of the input "
                "prompt or the number of requested output tokens."
            )
            raise bad_request(message, "input_tokens", length)

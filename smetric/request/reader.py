"""Body and headers to an inference request."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TypeVar

import msgspec
from msgspec import Raw

from smetric.errors import RequestError
from smetric.request.body import TOO_DEEP, Screened, beginning, is_null, members, screen, text_of
from smetric.request.conversation import LEAST_BYTES, Excerpt, excerpt, render
from smetric.request.memo import MOST_ENDS, Carried, Carrying, Memory, Unfit
from smetric.request.parts import hash_of
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import Api, InferenceRequest, TokenRatio

# Top-level fields of a body, read as the types that APIs give them; an error names the field and quotes nothing.

#: Longest JSON text of a number that is looked at, and of a name, an id or a salt: those are kept after the request.
_MAX_NUMBER = 32
MAX_STRING = 16 * 1024

T = TypeVar("T")

_NUMBER = msgspec.json.Decoder(float, strict=False)
_STRING = msgspec.json.Decoder(str | None)


def string(found: dict[str, Raw], name: str) -> str:
    """A top-level string, of bounded length; empty when absent or null."""
    value = found.get(name)
    return "" if value is None else decode(name, _STRING, bounded(name, value)) or ""


def bounded(name: str, value: Raw) -> Raw:
    """*value* of the field *name*, which must not be longer than what may be kept."""
    if len(value) > MAX_STRING:
        raise RequestError(f"`{name}` takes more than {MAX_STRING} bytes; no name, id or salt is that long", param=name)
    return value


def decode(name: str, decoder: msgspec.json.Decoder[T], value: Raw) -> T:
    """*value* of the field *name* as *decoder* takes it."""
    try:
        return decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(f"`{name}` does not have the type this API gives it", param=name) from None


def number(name: str, value: Raw | bytes) -> float:
    """A number, or a string that holds one, as engines take either."""
    text = bytes(value)
    if len(text) <= _MAX_NUMBER:
        try:
            read = _NUMBER.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        else:
            if abs(read) <= 1e15:
                return read
    raise RequestError(f"`{name}` must be a number, at most 1e15 in size", param=name)


# What headers say of a request: whose it is, which session's, and how urgent.

#: Headers in which agents name their session, best first (Claude Code, Codex, OpenCode, Dynamo).
SESSION_HEADERS = (b"x-claude-code-session-id", b"session-id", b"x-session-id", b"x-dynamo-session-id")
#: These, and all others that are read whatever is configured.
_READ_HEADERS = frozenset({*SESSION_HEADERS, b"x-request-id", b"x-vllm-priority", b"x-session-turn"})
_NAME = itemgetter(0)
#: Longest value taken from a header, in bytes.
MAX_HEADER_VALUE = 256


def read_headers(
    request: InferenceRequest, headers: Collection[tuple[bytes, bytes]], tenant_header: str, trusts_session: bool
) -> int | None:
    """Fill what *headers* say; returns the turn where one overrides what the body says.

    Args:
        request: to be filled.
        headers: names in lower case, and values.
        tenant_header: the one that names the tenant, in lower case; empty for none.
        trusts_session: `x-session-turn` counts.

    Raises:
        RequestError: one that is to be a number is none.
    """
    turn = None
    tenant = tenant_header.encode()
    wanted = _READ_HEADERS | {tenant} if tenant else _READ_HEADERS
    if wanted.isdisjoint(map(_NAME, headers)):
        return None  # as of most clients
    session_rank = len(SESSION_HEADERS)
    for name, value in headers:
        if name in SESSION_HEADERS:
            rank = SESSION_HEADERS.index(name)
            if rank < session_rank:
                session_rank = rank
                request.session = _header_text(value)
        elif name == b"x-request-id":
            request.id = _header_text(value)
        elif name == b"x-vllm-priority":
            request.priority = -number("X-Vllm-Priority", value.strip())
        elif name == b"x-session-turn" and trusts_session:
            turn = int(min(max(0.0, number("X-Session-Turn", value.strip())), 1e6))
        if tenant and name == tenant:
            request.tenant = _header_text(value)
    return turn


def _header_text(value: bytes) -> str:
    return value.strip()[:MAX_HEADER_VALUE].decode("latin-1")


# The prompts of a completions request: texts or token ids, one or several.

#: A string, or a list and what comes first in it.
_START = re.compile(rb'"|\[[ \t\r\n]*+(.)')
_RAWS = msgspec.json.Decoder(list[Raw])


class _Ids(msgspec.Struct, array_like=True):
    """A list, of whatever; none of it is kept."""


#: What a list of prompts may hold, by how the first begins. Those were counted when the body was screened; of numbers
#: between them there may be millions.
_PROMPTS: dict[bytes, msgspec.json.Decoder[list[str]] | msgspec.json.Decoder[list[_Ids]]] = {
    b'"': msgspec.json.Decoder(list[str]),
    b"[": msgspec.json.Decoder(list[_Ids]),
}


def read_prompts(
    request: InferenceRequest, value: Raw | None, bytes_per_token: float, key: bytes, is_plain: bool
) -> int:
    """Fill prompt and prompt length from a completions `prompt`; returns how many prompts there are.

    A prompt is a string or a list of token ids; there may be a list of either.

    Args:
        request: to be filled.
        value: of the field `prompt`.
        bytes_per_token: of its model.
        key: what besides the text decides whether engines share the prompt.
        is_plain: whether there is no choice of escapes in *value*.

    Raises:
        RequestError: it is neither of these.
    """
    if value is None or is_null(value):
        return 1
    start = _START.match(value)
    if start is None:
        raise RequestError("`prompt` must be a string, a list of strings or lists of token ids", param="prompt")
    first = start[1]
    given = _several(value, _PROMPTS[first]) if first in _PROMPTS else [value]
    if first not in (None, b'"'):
        return _read_token_ids(request, list(map(bytes, given)), key)
    texts = [text_of(one, is_plain) for one in given]
    request.prompt = prompt = Prompt([texts[0]], bytes_per_token, key=key)
    request.prompt_len = sum(prompt.tokens(len(one)) or 1 for one in texts)
    return len(texts)


def _several(value: Raw, kind: msgspec.json.Decoder[list[str]] | msgspec.json.Decoder[list[_Ids]]) -> list[Raw]:
    try:
        kind.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(
            "`prompt` must be a list of strings only, or of lists of token ids only", param="prompt"
        ) from None
    return _RAWS.decode(value)


def _read_token_ids(request: InferenceRequest, prompts: list[bytes], key: bytes) -> int:
    """The same for lists of token ids: their JSON text stands for the rendering, their number is exact."""
    counts = [ids.count(b",") + 1 for ids in prompts]
    request.prompt = Prompt([prompts[0]], len(prompts[0]) / counts[0], key=key, counted=True)
    request.prompt_len = sum(counts)
    return len(prompts)


# Reads a request: from its body and headers to the numbers a policy may read.
#
# Bodies are taken apart in `body.py`, conversations rendered in `conversation.py`; headers are read in `headers.py`,
# prompts that are no conversation in `completions.py`. Validation is the engine's business: what it might accept
# passes, and what is passed on is the body as it came.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How requests are read.

    Args:
        block_size: tokens per KV block; the expected hit is floored to it.
        tenant_header: header that names the tenant, in lower case; empty for none.
        trust_session_headers: `x-session-turn` overrides the turn read from the body.
        aliases: names that stand for another model; ratio and cache key are that model's.
    """

    block_size: int = 16
    tenant_header: str = ""
    trust_session_headers: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)


# Asked for each request: a look into an enumeration costs as much as a call.
_COMPLETIONS, _RESPONSES, _OTHER = Api.COMPLETIONS, Api.RESPONSES, Api.OTHER
#: Most sequences one request is counted as; the engine judges whether it takes that many.
MAX_PROMPTS = 65536
#: Fields from which engines render more than the conversation itself.
_TEMPLATE_FIELDS = frozenset(
    {
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "output_config",
        "reasoning",
        "reasoning_effort",
        "thinking",
        "tool_choice",
    }
)
_REFUSED = ("kv_transfer_params", "ec_transfer_params")
_QUOTE = ord('"')
_TRUE = (b"true", b"1", b'"true"', b'"1"')
_JSON_STRING = msgspec.json.Decoder(str)
#: What this process knows of the messages that bodies carry over.
memory = Memory(BLOCK_BYTES)


class _Named(msgspec.Struct):
    id: str


_CONVERSATION = msgspec.json.Decoder(str | _Named)


def parse(
    api: Api,
    body: bytes,
    headers: Collection[tuple[bytes, bytes]],
    ratio: TokenRatio,
    reading: Reading,
) -> InferenceRequest:
    """Read what routing needs of a request.

    Args:
        api: its wire format.
        body: as received.
        headers: names in lower case, and values.
        ratio: bytes per token of each model.
        reading: the settings.

    Raises:
        RequestError: the body is no JSON object, or a field that routing needs has a type no engine takes. Bodies of
            `Api.OTHER` need not be JSON.
    """
    request = InferenceRequest(api=api, body=body)
    turn = read_headers(request, headers, reading.tenant_header, reading.trust_session_headers)
    try:
        screened = screen(body)
    except RequestError:
        if api is _OTHER:
            return request
        raise
    carried = memory.find(screened) if len(body) >= memory.least_bytes and api in _CONVERSATIONS else None
    if carried is not None:
        try:
            _read_body(request, screened, turn, ratio, reading, carried)
        except (Unfit, RequestError, RecursionError):
            pass  # what is wrong is found again, and told of the whole body
        else:
            return request
    try:
        _read_body(request, screened, turn, ratio, reading, None)
    except RecursionError:  # its parts are read with less room on the stack than the whole
        raise RequestError(TOO_DEEP) from None
    return request


def _read_body(
    request: InferenceRequest,
    screened: Screened,
    turn: int | None,
    ratio: TokenRatio,
    reading: Reading,
    carried: Carried | None,
) -> None:
    """Fill what the body says; *turn* is what a trusted header said.

    Raises:
        RequestError: as `parse`.
        Unfit: the body does not go on from what is *carried*.
    """
    api = request.api
    text = screened.body if carried is None else carried.shortened(screened.body)
    brief: Excerpt | None = None
    if carried is None and len(text) >= LEAST_BYTES and api in _CONVERSATIONS:
        brief = excerpt(text, _CONVERSATIONS[api][0])
    try:
        found = members(text if brief is None else brief.body)
    except RequestError:
        if api is _OTHER:
            return
        if brief is None:
            raise
        brief, found = None, members(text)
    if brief is not None:
        text = brief.body
    names = "".join(found)
    if "_transfer_params" in names or "bootstrap_" in names:  # as hardly ever
        _refuse_engines_own(found)
    request.model = string(found, "model")
    request.stream = bytes(found.get("stream", b"")) in _TRUE
    if api is _OTHER:
        return
    if "priority" in found and not is_null(found["priority"]):
        request.priority = -number("priority", found["priority"])
    copies = number("n", found["n"]) if "n" in found and not is_null(found["n"]) else 1.0
    request.served = served = reading.aliases.get(request.model, request.model)
    bytes_per_token = ratio.of(served)
    salt = b""
    if "cache_salt" in found:
        salt = bytes(bounded("cache_salt", found["cache_salt"]))
        if salt[:1] == b'"':
            request.cache_salt = decode("cache_salt", _JSON_STRING, Raw(salt))
    key = served.encode() + b"\0" + salt
    if api is _COMPLETIONS:
        prompts = read_prompts(request, found.get("prompt"), bytes_per_token, key, screened.is_plain)
    else:
        prompts = 1
        if not _TEMPLATE_FIELDS.isdisjoint(found):
            given = [b"%b:%b" % (name.encode(), bytes(found[name])) for name in sorted(_TEMPLATE_FIELDS & found.keys())]
            request.template_args = b",".join(given)
        request.prompt = prompt = _conversation_prompt(
            request, text, found, screened, key, carried, brief, bytes_per_token
        )
        request.prompt_len = prompt.length
        request.est_hit = prompt.whole_blocks(prompt.history_bytes, reading.block_size)
    if prompts * copies != 1:
        request.prompts = int(min(max(1, prompts * copies), MAX_PROMPTS))
    if turn is not None:
        request.turn = turn
        request.est_hit = request.est_hit if turn else 0
    if api is _RESPONSES:
        request.pinned_to = _pinned_to(found)
        if request.pinned_to:
            request.turn = request.est_hit = None


def _refuse_engines_own(found: dict[str, Raw]) -> None:
    """Refuse what engines tell each other, whoever sends it."""
    for name, value in found.items():
        if (name in _REFUSED or name.startswith("bootstrap_")) and not is_null(value):
            raise RequestError(
                "`kv_transfer_params`, `ec_transfer_params` and `bootstrap_…` are set between engines, never by "
                "clients; send the request without them",
                param=name if name in _REFUSED else None,
            )


def _conversation_prompt(
    request: InferenceRequest,
    text: bytes,
    found: dict[str, Raw],
    screened: Screened,
    key: bytes,
    carried: Carried | None,
    brief: Excerpt | None,
    bytes_per_token: float,
) -> Prompt:
    """The prompt of a conversation, whose number of turns goes into *request*."""
    list_of, lead = _CONVERSATIONS[request.api]
    is_remembered = len(screened.body) >= memory.least_bytes
    messages = _listed(found, list_of, request.api)
    conversation = render(
        list_of,
        messages if brief is None else brief.messages,
        tools=found.get("tools"),
        system=found.get(lead) if lead else None,
        is_plain=screened.is_plain,
        seed=hash_of(key) if is_remembered else 0,
        ends=MOST_ENDS if is_remembered else 0,
        carried=(carried, carried.text_of_rest(screened.body)) if carried is not None else None,
    )
    request.turn = conversation.turn
    carrying = None
    if is_remembered:
        known = carried or brief
        begin = beginning(text, found, list_of) if known is None else known.begin
        if begin is not None:
            end = begin + len(messages) - 2 + len(screened.body) - len(text)
            carrying = Carrying(memory, screened, (begin, end), conversation.lead, conversation.marks, carried)
    return Prompt(
        conversation.pieces,
        bytes_per_token,
        size=conversation.size,
        history_bytes=conversation.history_bytes,
        question_bytes=conversation.question_bytes,
        key=key,
        outline=conversation.outline,
        carrying=carrying,
    )


#: By API, the fields of the messages and of the system prompt.
_CONVERSATIONS = {
    Api.CHAT: ("messages", ""),
    Api.MESSAGES: ("messages", "system"),
    Api.RESPONSES: ("input", "instructions"),
}


def _listed(found: dict[str, Raw], name: str, api: Api) -> Raw:
    """The messages; in the Responses API a string is one of the user's."""
    if name not in found:
        if api is not _RESPONSES:
            raise RequestError(f"`{name}` is missing; this API needs it", param=name)
        return Raw(b"[]")
    items = found[name]
    if api is _RESPONSES and memoryview(items)[0] == _QUOTE:
        return Raw(b'[{"role":"user","content":%b}]' % bytes(items))
    return items


def _pinned_to(found: dict[str, Raw]) -> str:
    previous = string(found, "previous_response_id")
    if previous or "conversation" not in found or is_null(found["conversation"]):
        return previous
    conversation = decode("conversation", _CONVERSATION, bounded("conversation", found["conversation"]))
    return conversation.id if isinstance(conversation, _Named) else conversation

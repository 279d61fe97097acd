"""Reader of requests: from body and headers to the numbers that a policy may read.

The engine validates requests: whatever it might accept passes, and the body is forwarded as it came, except where
`patch_model` and `patch_member` make a new one. Errors name the field and quote nothing that a client sent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TypeVar

import msgspec
from msgspec import Raw

from smetric.errors import UNREADABLE, RequestError
from smetric.request.conversation import LEAST_BYTES, Excerpt, MemoMismatch, excerpt, is_null, render, text_of
from smetric.request.form import form_type, read_form
from smetric.request.memo import MOST_ENDS, MemoEntry, PrefixMemo, ScreenedBody, encoding_problem, screen
from smetric.request.prompt import Prompt, hash_of
from smetric.request.request import INITIAL, Api, FieldGivenTwice, InferenceRequest, TokenRatio

#: Most members at the top level of a body, and bytes of their names. The widest API has about a hundred members of some
#: fifteen bytes each.
MAX_MEMBERS = 1024
MAX_NAMES_BYTES = 16 * 1024
#: Longest JSON text of a number, and of a name, an id or a salt, which are kept after the request.
_MAX_NUMBER = 32
MAX_STRING = 16 * 1024
#: Longest value taken from a header, in bytes.
MAX_HEADER_VALUE = 256
#: Most sequences that one request counts as; the engine judges whether it takes that many.
MAX_PROMPTS = 65536
TOO_DEEP = "the body nests objects and lists too deeply; send a flatter one"
_TWICE = "the body gives a top-level field twice, and readers differ in which one counts; send each field once"
#: Headers in which agents name their session, best first (Claude Code, Codex, OpenCode, Dynamo).
SESSION_HEADERS = (b"x-claude-code-session-id", b"session-id", b"x-session-id", b"x-dynamo-session-id")
_READ_HEADERS = frozenset({*SESSION_HEADERS, b"x-request-id", b"x-vllm-priority", b"x-session-turn"})
_NAME = itemgetter(0)
#: Fields of the messages and of the system prompt, by API.
_CONVERSATIONS = {
    Api.CHAT: ("messages", ""),
    Api.MESSAGES: ("messages", "system"),
    Api.RESPONSES: ("input", "instructions"),
}
#: Fields that engines render besides the conversation itself.
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
#: Fields that engines set for each other; with `bootstrap_…`.
_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")
#: Objects that engines merge into these, and objects within that they merge as well.
_MERGED: dict[str, tuple[str, ...]] = {"vllm_xargs": (), "sampling_params": ("extra_args",)}
_INTERNAL_PLACES = frozenset({*_INTERNAL_FIELDS, *_MERGED})
_TRUE = (b"true", b"1", b'"true"', b'"1"')
_QUOTE = ord('"')
_OPEN = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
#: A name, whose characters take six bytes each at most. It keeps no place to go back to, however long it is.
_KEY = re.compile(
    rb'"([^"\\]{0,%(most)d}+(?:\\.[^"\\]{0,%(most)d}+){0,%(most)d}+)"[ \t\r\n]*+:[ \t\r\n]*+'
    % {b"most": 6 * MAX_NAMES_BYTES},
    re.DOTALL,
)
_AFTER = re.compile(rb"[ \t\r\n]*([,}])[ \t\r\n]*")
#: A string, or a list and the first byte in it.
_PROMPT = re.compile(rb'"|\[[ \t\r\n]*+(.)')


class _Named(msgspec.Struct):
    id: str


class _Ids(msgspec.Struct, array_like=True):
    """Any list; nothing of it is kept."""


_MEMBERS = msgspec.json.Decoder(dict[str, Raw])
_SCALARS = msgspec.json.Decoder(dict[str, str | bool | int | float])
_NUMBER = msgspec.json.Decoder(float, strict=False)
_STRING = msgspec.json.Decoder(str)
_STRING_OR_NULL = msgspec.json.Decoder(str | None)
_CONVERSATION = msgspec.json.Decoder(str | _Named)
_RAWS = msgspec.json.Decoder(list[Raw])
#: Lists of prompts, by the first byte of the first prompt. The number of strings and lists was bounded before; there
#: may be millions of numbers between them.
_PROMPT_LISTS: dict[bytes, msgspec.json.Decoder[list[str]] | msgspec.json.Decoder[list[_Ids]]] = {
    b'"': msgspec.json.Decoder(list[str]),
    b"[": msgspec.json.Decoder(list[_Ids]),
}
#: What this process knows of the messages that bodies carry.
memo = PrefixMemo()
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """Settings of the reader.

    Args:
        block_size: tokens per KV block; the expected hit is floored to it.
        tenant_header: header that names the tenant, in lower case; empty for none.
        trust_session_headers: whether `x-session-turn` overrides the turn read from the body.
        aliases: other names of models, and the model that each stands for; ratio and cache key are that model's.
    """

    block_size: int = 16
    tenant_header: str = ""
    trust_session_headers: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)


def parse(
    api: Api,
    body: bytes,
    headers: Collection[tuple[bytes, bytes]],
    ratio: TokenRatio,
    settings: ReaderSettings,
) -> InferenceRequest:
    """Read what routing needs of a request.

    Args:
        api: its wire format.
        body: as received.
        headers: names in lower case, and values.
        ratio: bytes per token of each model.
        settings: the settings.

    Raises:
        RequestError: the body is no JSON object or gives a field twice, or a field that routing needs has a type no
            engine takes. A body of `Api.OTHER` may be a form, and is left unread if it is neither.
    """
    request = InferenceRequest(api=api, body=body)
    turn = _read_headers(request, headers, settings)
    if api is Api.OTHER:
        _read_other(request, body, headers)
        return request
    screened = screen(body)
    entry = memo.find(screened) if len(body) >= memo.least_bytes and api in _CONVERSATIONS else None
    if entry is not None:
        try:
            _read_body(request, screened, turn, ratio, settings, entry)
        except (MemoMismatch, RequestError, RecursionError):
            pass  # reading the whole body names the error
        else:
            return request
    try:
        _read_body(request, screened, turn, ratio, settings, None)
    except RecursionError:  # parts of a body are decoded deeper in the stack than the whole
        raise RequestError(TOO_DEEP) from None
    return request


def _read_other(request: InferenceRequest, body: bytes, headers: Collection[tuple[bytes, bytes]]) -> None:
    """Fill `model` and `stream` of a request that engines of several kinds take, or `unread`."""
    try:
        if (content_type := form_type(headers)) is not None:
            read_form(request, content_type, body)
            return
        found = members(screen(body).body)
    except FieldGivenTwice:
        raise
    except RequestError as error:
        request.unread = error.message
        return
    _read_common(request, found)


def _read_common(request: InferenceRequest, found: dict[str, Raw]) -> None:
    """Fill the fields that all APIs have in common; refuse fields that no client may set."""
    if not _INTERNAL_PLACES.isdisjoint(found) or "bootstrap_" in "".join(found):  # rare
        _refuse_internal_fields(found)
    request.model = _string(found, "model")
    request.stream = bytes(found.get("stream", b"")) in _TRUE


def _read_headers(
    request: InferenceRequest, headers: Collection[tuple[bytes, bytes]], settings: ReaderSettings
) -> int | None:
    """Fill the fields of *request* that come from headers; returns the turn if a trusted header gives it."""
    turn = None
    tenant = settings.tenant_header.encode()
    wanted = _READ_HEADERS | {tenant} if tenant else _READ_HEADERS
    if wanted.isdisjoint(map(_NAME, headers)):
        return None  # most clients
    once = {tenant, b"x-vllm-priority", b"x-session-turn" if settings.trust_session_headers else b""}
    named = [name for name, _ in headers if name in once]
    if len(named) > len(set(named)):
        raise FieldGivenTwice("the headers give tenant, priority or turn twice; send each once")
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
            request.priority = -_number("X-Vllm-Priority", value.strip())
        elif name == b"x-session-turn" and settings.trust_session_headers:
            turn = int(min(max(0.0, _number("X-Session-Turn", value.strip())), 1e6))
        if tenant and name == tenant:
            request.tenant = _header_text(value)
    return turn


def _header_text(value: bytes) -> str:
    return value.strip()[:MAX_HEADER_VALUE].decode("latin-1")


def _read_body(
    request: InferenceRequest,
    screened: ScreenedBody,
    turn: int | None,
    ratio: TokenRatio,
    settings: ReaderSettings,
    entry: MemoEntry | None,
) -> None:
    """Fill the fields of *request* that come from the body.

    Raises:
        RequestError: as `parse`.
        MemoMismatch: the body does not continue *entry*.
    """
    api = request.api
    text = screened.body if entry is None else entry.shortened(screened.body)
    brief: Excerpt | None = None
    if entry is None and len(text) >= LEAST_BYTES and api in _CONVERSATIONS:
        brief = excerpt(text, _CONVERSATIONS[api][0])
    try:
        found = members(text if brief is None else brief.body)
    except RequestError:
        if brief is None:
            raise
        brief, found = None, members(text)
    if brief is not None:
        text = brief.body
    _read_common(request, found)
    if "priority" in found and not is_null(found["priority"]):
        request.priority = -_number("priority", found["priority"])
    copies = _number("n", found["n"]) if "n" in found and not is_null(found["n"]) else 1.0
    request.served = served = settings.aliases.get(request.model, request.model)
    salt = b""
    if "cache_salt" in found:
        salt = bytes(_bounded("cache_salt", found["cache_salt"]))
        if salt[:1] == b'"':
            request.cache_salt = _decode("cache_salt", _STRING, Raw(salt))
    key = served.encode() + b"\0" + salt
    bytes_per_token = ratio.get(served, INITIAL)
    prompts = 1
    if api is Api.COMPLETIONS:
        prompts = _read_prompts(request, found.get("prompt"), bytes_per_token, key, screened.is_plain)
    else:
        if not _TEMPLATE_FIELDS.isdisjoint(found):
            given = [b"%b:%b" % (name.encode(), bytes(found[name])) for name in sorted(_TEMPLATE_FIELDS & found.keys())]
            request.template_args = b",".join(given)
        request.prompt = prompt = _conversation_prompt(
            request, text, found, screened, key, entry, brief, bytes_per_token
        )
        request.prompt_len = prompt.length
        request.est_hit = prompt.whole_blocks(prompt.history_bytes, settings.block_size)
    if prompts * copies != 1:
        request.prompts = int(min(max(1, prompts * copies), MAX_PROMPTS))
    if turn is not None:
        request.turn = turn
        request.est_hit = request.est_hit if turn else 0
    if api is Api.RESPONSES:
        request.pinned_to = _string(found, "previous_response_id")
        if not request.pinned_to and "conversation" in found and not is_null(found["conversation"]):
            stored = _decode("conversation", _CONVERSATION, _bounded("conversation", found["conversation"]))
            request.pinned_to = stored.id if isinstance(stored, _Named) else stored
        if request.pinned_to:
            request.turn = request.est_hit = None


def _refuse_internal_fields(found: Mapping[str, Raw], merged: Mapping[str, tuple[str, ...]] = _MERGED) -> None:
    """Refuse fields that engines set for each other, also where an engine merges them from; LMCache's own pass."""
    for name, value in found.items():
        if name in merged:
            _refuse_internal_fields(_object(value), dict.fromkeys(merged[name], ()))
        elif (
            (name in _INTERNAL_FIELDS or name.startswith("bootstrap_"))
            and not is_null(value)
            and not (name == "kv_transfer_params" and _is_for_lmcache(value))
        ):
            raise RequestError(
                "`kv_transfer_params`, `ec_transfer_params` and `bootstrap_…` are set between engines, never by "
                "clients, except for the `lmcache.tag.…` and `lmcache.skip_save` of LMCache; send the request without "
                "them",
                param=name if name in _INTERNAL_FIELDS else None,
            )


def _object(value: Raw) -> Mapping[str, Raw]:
    """Return the members of an object; none for other values, which engines refuse."""
    try:
        return _MEMBERS.decode(value)
    except RecursionError:
        raise RequestError(TOO_DEEP) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _is_for_lmcache(value: Raw) -> bool:
    """Return whether all members are settings that LMCache takes from clients, with a text or a number each."""
    try:
        names = _SCALARS.decode(value)
    except UNREADABLE:
        return False
    return all(name == "lmcache.skip_save" or name.startswith("lmcache.tag.") for name in names)


def _conversation_prompt(
    request: InferenceRequest,
    text: bytes,
    found: dict[str, Raw],
    screened: ScreenedBody,
    key: bytes,
    entry: MemoEntry | None,
    brief: Excerpt | None,
    bytes_per_token: float,
) -> Prompt:
    """Return the prompt of a conversation, and set the turn of *request*.

    Args:
        request: the request.
        text: the body, without the messages of *entry*, or that of *brief*.
        found: its members.
        screened: the whole body.
        key: of the prompt.
        entry: what is known of its first messages.
        brief: the body without its long texts.
        bytes_per_token: of the model.
    """
    list_field, system_field = _CONVERSATIONS[request.api]
    if list_field in found:
        messages = found[list_field]
        if request.api is Api.RESPONSES and memoryview(messages)[0] == _QUOTE:
            messages = Raw(b'[{"role":"user","content":%b}]' % bytes(messages))
    elif request.api is Api.RESPONSES:
        messages = Raw(b"[]")
    else:
        raise RequestError(f"`{list_field}` is missing; this API needs it", param=list_field)
    is_remembered = len(screened.body) >= memo.least_bytes
    conversation = render(
        list_field,
        messages if brief is None else brief.messages,
        tools=found.get("tools"),
        system=found.get(system_field) if system_field else None,
        is_plain=screened.is_plain,
        seed=hash_of(key) if is_remembered else 0,
        ends=MOST_ENDS if is_remembered else 0,
        known=entry.continuation(screened.body) if entry is not None else None,
    )
    request.turn = conversation.turn
    remember = None
    if is_remembered:
        known = entry or brief
        begin = _list_begin(text, found, list_field) if known is None else known.begin
        if begin is not None:
            end = begin + len(messages) - 2 + len(screened.body) - len(text)
            remember = partial(memo.remember, screened, (begin, end), conversation, entry)
    return Prompt(
        conversation.pieces,
        bytes_per_token,
        size=conversation.size,
        history_bytes=conversation.history_bytes,
        question_bytes=conversation.question_bytes,
        key=key,
        outline=conversation.outline,
        known=entry.prefix if entry is not None else None,
        remember=remember,
    )


def _list_begin(body: bytes, found: Mapping[str, Raw], member: str) -> int | None:
    """Return the position after the bracket of the list *member*; None if it is no list."""
    value = found.get(member)
    if value is None or bytes(memoryview(value)[:1]) != b"[":
        return None
    return next(start for name, start, _ in spans(body, found) if name == member) + 1


def _read_prompts(
    request: InferenceRequest, value: Raw | None, bytes_per_token: float, key: bytes, is_plain: bool
) -> int:
    """Fill prompt and prompt length from the field `prompt` of a completions body; returns the number of prompts.

    A prompt is a string or a list of token ids; there may be a list of either.
    """
    if value is None or is_null(value):
        return 1
    start = _PROMPT.match(value)
    if start is None:
        raise RequestError("`prompt` must be a string, a list of strings or lists of token ids", param="prompt")
    first, given = start[1], [value]
    if first in _PROMPT_LISTS:
        try:
            _PROMPT_LISTS[first].decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise RequestError(
                "`prompt` must be a list of strings only, or of lists of token ids only", param="prompt"
            ) from None
        given = _RAWS.decode(value)
    if first in (None, b'"'):
        texts = [text_of(one, is_plain) for one in given]
        request.prompt = prompt = Prompt([texts[0]], bytes_per_token, key=key)
        request.prompt_len = sum(prompt.tokens(len(text)) or 1 for text in texts)
    else:
        # The JSON text of the ids stands for the rendering; their number is exact.
        lists = list(map(bytes, given))
        counts = [ids.count(b",") + 1 for ids in lists]
        request.prompt = Prompt([lists[0]], len(lists[0]) / counts[0], key=key, counted=True)
        request.prompt_len = sum(counts)
    return len(given)


def _string(found: dict[str, Raw], name: str) -> str:
    """Return the string *name* of bounded length; empty if absent or null."""
    value = found.get(name)
    return "" if value is None else _decode(name, _STRING_OR_NULL, _bounded(name, value)) or ""


def _bounded(name: str, value: Raw) -> Raw:
    if len(value) > MAX_STRING:
        raise RequestError(f"`{name}` takes more than {MAX_STRING} bytes; no name, id or salt is that long", param=name)
    return value


def _decode(name: str, decoder: msgspec.json.Decoder[T], value: Raw) -> T:
    try:
        return decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError(f"`{name}` does not have the type this API gives it", param=name) from None


def _number(name: str, value: Raw | bytes) -> float:
    """Return a number, or a string that holds one, as engines take either."""
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


def members(body: bytes) -> dict[str, Raw]:
    """Return the top-level members of *body*, which was screened, each value as its JSON text.

    Raises:
        RequestError: the body is not one JSON object, gives a member twice, nests too deeply, has too many members or
            names too long.
    """
    try:
        found = _MEMBERS.decode(body)
    except RecursionError:
        raise RequestError(TOO_DEEP) from None
    except msgspec.ValidationError:
        raise RequestError("the body must be a JSON object, such as {...}, at its top level") from None
    except msgspec.DecodeError as error:
        raise RequestError(_malformed(body, error)) from None
    if len(found) > MAX_MEMBERS:
        raise RequestError(f"the body has more than {MAX_MEMBERS} top-level fields; no API has that many")
    names = len("".join(found).encode())
    if names > MAX_NAMES_BYTES:
        raise RequestError(
            f"the names of the body's top-level fields take more than {MAX_NAMES_BYTES} bytes; no API has such names"
        )
    # A body without spaces, as most clients write it, has the length of its members: no room for a repeated name.
    if len(body) != 1 + 4 * len(found) + names + sum(map(len, found.values())):
        for _ in spans(body, found):
            pass
    return found


def _malformed(body: bytes, error: Exception) -> str:
    if not body.strip():
        return "the body is empty; it must be a JSON object"
    encoding = encoding_problem(body)
    if encoding is not None:
        return encoding
    place = re.search(r"\(byte \d+\)", str(error))
    where = f" {place[0]}" if place else ""
    return f"the body is not valid JSON{where}; NaN, Infinity and halves of surrogate pairs are not taken"


def spans(body: bytes, found: Mapping[str, Raw]) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each value of *found* in *body*, in order.

    A decoder keeps the last of equal names. Walking from value to value by their lengths detects the others: the walk
    meets a name twice, or misses a name.

    Raises:
        RequestError: a name is given twice.
    """
    match = _OPEN.match(body)
    at = match.end() if match else 0
    seen: set[str] = set()
    while len(seen) < len(found):
        key = _KEY.match(body, at)
        if key is None:
            raise FieldGivenTwice(_TWICE)
        text = key[1]
        name = msgspec.json.decode(b'"%b"' % text, type=str) if b"\\" in text else text.decode()
        value = found.get(name)
        if value is None or name in seen:
            raise FieldGivenTwice(_TWICE)
        seen.add(name)
        start = key.end()
        end = start + len(value)
        yield name, start, end
        after = _AFTER.match(body, end)
        if after is None:
            raise FieldGivenTwice(_TWICE)
        at = after.end()
    if found and at != len(body):
        raise FieldGivenTwice(_TWICE)


def patch_member(body: bytes, member: str, text: str) -> bytes:
    """Return *body* with its top-level *member*, or a new one, set to the string *text*; all other bytes stay.

    `members` must have accepted *body*, and *member* must need no escapes.
    """
    found = _MEMBERS.decode(body)
    value = msgspec.json.encode(text)
    for name, start, end in spans(body, found):
        if name == member:
            return body[:start] + value + body[end:]
    match = _OPEN.match(body)
    assert match is not None, "the body is an object"
    comma = b"," if found else b""
    return body[: match.end()] + b'"%b":%b%b' % (member.encode(), value, comma) + body[match.end() :]


def patch_model(body: bytes, model: str, span: slice | None = None) -> bytes:
    """Return *body* with its `model` replaced by *model*; all other bytes stay.

    Args:
        body: a JSON object with a top-level `model`, or a form.
        model: the new name.
        span: the place of the old one in a form.
    """
    if span is not None:
        return body[: span.start] + model.encode() + body[span.stop :]
    return patch_member(body, "model", model)

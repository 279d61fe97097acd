"""Reads a request: from its body and headers to the numbers a policy may read.

Bodies are taken apart in `body.py`, conversations rendered in `conversation.py`; headers are read in `headers.py`,
prompts that are no conversation in `completions.py`. Validation is the engine's business: what it might accept passes,
and what is passed on is the body as it came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from smetric.errors import RequestError
from smetric.reading.body import TOO_DEEP, beginning, is_null, members
from smetric.reading.carried import MOST_ENDS, Carried, Carrying, Memory, Unfit
from smetric.reading.completions import read_prompts
from smetric.reading.conversation import render
from smetric.reading.excerpt import LEAST_BYTES, Excerpt, excerpt
from smetric.reading.fields import bounded, decode, number, string
from smetric.reading.headers import read_headers
from smetric.reading.parts import hash_of
from smetric.reading.prompt import BLOCK_BYTES, Prompt
from smetric.reading.screening import Screened, screen
from smetric.request import Api, InferenceRequest
from smetric.tokens import TokenRatio


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
_STRING = msgspec.json.Decoder(str)
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
            request.cache_salt = decode("cache_salt", _STRING, Raw(salt))
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

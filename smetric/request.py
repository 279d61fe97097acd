"""One inference request as the router sees it: the numbers a policy may read, and the bytes that are forwarded."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smetric.prompt import Prompt


class Api(enum.Enum):
    """The wire format of a request."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"
    #: Anything else under /v1 that is passed through.
    OTHER = "other"


@dataclass(slots=True, kw_only=True)
class InferenceRequest:
    """A request that is to be routed.

    The fields up to `prefill_zone` are what policies read as `req.…` (units: tokens, seconds).
    """

    turn: int | None = 0
    prompt_len: int = 1
    est_hit: int | None = 0
    priority: float = 0.0
    model: str = ""
    lora: str = ""
    tenant: str = ""
    session: str = ""
    id: str = ""
    prefix: str = ""
    held: float = 0.0
    prefill: str = ""
    prefill_zone: str = ""

    api: Api = Api.OTHER
    #: Sequences the engine will run: n × prompts.
    prompts: int = 1
    stream: bool = False
    #: The prompt as the engine renders it, for the sources; None when there is none to speak of.
    prompt: Prompt | None = field(default=None, repr=False)
    #: A response id or conversation id that ties the request to the engine that holds it.
    pinned_to: str = ""

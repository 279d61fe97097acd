"""One inference request as policies and sources see it."""

from __future__ import annotations

import asyncio
import enum
from array import array
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from smetric.request.parts import NOTHING, Parts, hash_of
from smetric.request.prompt import BlockKeys, Prompt

# One inference request as the router sees it: the numbers a policy may read, and what sources look it up by.
#
# It is read from a body and its headers in `smetric.reading.reader`.


class Api(enum.Enum):
    """The wire format of a request."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"
    #: Anything else under /v1 that is passed through.
    OTHER = "other"

    __hash__ = object.__hash__  # as there is one of each; an enum's own is Python


class InferenceRequest(Struct, kw_only=True):
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
    held: float = 0.0
    class_share: float = 0.0
    class_streak: float = 0.0
    prefill: str = ""
    prefill_zone: str = ""

    api: Api = Api.OTHER
    #: What the client calls `model`, where that is an alias.
    alias: str = ""
    #: The path it was sent to.
    path: str = ""
    #: Sequences the engine will run: n × prompts.
    prompts: int = 1
    stream: bool = False
    #: The prompt as the engine renders it, for the sources; None when there is none to speak of.
    prompt: Prompt | None = None
    #: A response id or conversation id that ties the request to the engine that holds it.
    pinned_to: str = ""
    #: What the engine takes `model` for once an alias is resolved, and the salt that keeps its cache entries apart.
    served: str = ""
    cache_salt: str = ""
    #: What the client gives the chat template besides the messages, as JSON; empty for nothing.
    template_args: bytes = b""
    #: Hashes of the prompt's parts, once an answer has begun.
    parts: Parts | None = None
    #: What is filled on demand was filled for this request, as a policy that was asked, or observed, reads it.
    is_described: bool = False
    #: The prompt as `smetric.sources.cut` cuts its text, kept there.
    text_cut: Any = None
    #: Chained keys of the prompt's token blocks by block size, once somebody has asked for them.
    block_keys: dict[int, BlockKeys] | None = None
    #: The body as received, for whoever tokenises it, till the first byte of the answer; what comes of that, once
    #: somebody has asked, and the ids it found in time. None of them is logged or recorded.
    body: bytes | None = None
    tokenising: asyncio.Future[array[int] | None] | None = None
    token_ids: array[int] | None = None
    _prefix: str | None = None

    def __repr__(self) -> str:
        # It is logged with faults: nothing of what the client wrote.
        return f"InferenceRequest(api={self.api}, model={self.model!r}, turn={self.turn}, prompt_len={self.prompt_len})"

    @property
    def prefix(self) -> str:
        """Key of the prompt's first 256 tokens, 16 hex digits; empty without a prompt. Computed when asked for."""
        if self._prefix is None:
            beginning = self.prompt.beginning if self.prompt is not None else 0
            self._prefix = f"{beginning:016x}" if beginning else ""
        return self._prefix

    def keys_of(self, ids: Sequence[int], block_size: int, adapter: str) -> BlockKeys:
        """Chained keys of the blocks of *ids*, its tokens, for the *adapter* it names or none; made once."""
        if self.block_keys is None:
            self.block_keys = {}
        keys = self.block_keys.get(block_size)
        if keys is None:
            keys = self.block_keys[block_size] = BlockKeys(ids, block_size, adapter, self.cache_salt)
        return keys

    def count_by(self, ids: array[int], block_size: int) -> None:
        """The first prompt's tokens are known to be *ids*: count its lengths by them instead of estimating.

        The share of the history stays what it was by bytes; the expected hit is whole blocks of *block_size* tokens.
        """
        self.token_ids = ids
        prompt = self.prompt
        if prompt is None or prompt.counted or prompt.length != self.prompt_len:
            return
        prompt.count(len(ids))
        self.prompt_len = len(ids)
        if self.turn and self.est_hit is not None:
            self.est_hit = prompt.whole_blocks(prompt.history_bytes, block_size)

    def answering(self) -> None:
        """An answer has begun: nothing is looked up for this request any more, so its text is let go."""
        self.body = None
        if self.prompt is not None:
            salt = hash_of(self.cache_salt.encode()) if self.cache_salt else NOTHING
            template = hash_of(self.template_args) if self.template_args else NOTHING
            self.parts = self.prompt.summarise(salt=salt, template=template)
        self.template_args = b""

    def let_go(self) -> None:
        """The exchange has ended; what is recorded of it must not keep its body alive."""
        self.prompt = self.text_cut = self.body = self.tokenising = self.token_ids = self.parts = self.block_keys = None
        self.template_args = b""


# Token counts without a tokenizer: rendered bytes per token, learned per model from what engines report.
#
# Rendering is in `smetric.reading.prompt` and `smetric.reading.conversation`; exact token ids are not here.

#: Bytes per token before anything was learned.
INITIAL = 4.0
#: A learned ratio stays within these: fewer or more bytes per token is a report about something else.
LEAST, MOST = 1.0, 16.0
#: Prompts below this many tokens are mostly chat template and teach nothing.
MIN_TOKENS = 64
#: Models remembered; the one learned from longest ago goes first.
MAX_MODELS = 256
#: Weight of a sample once there are many, how many that is, and how far one sample may lie from the average before it
#: is clipped.
WEIGHT = 0.05
MANY = round(1 / WEIGHT) - 1
CLIP = 1.5


class TokenRatio:
    """Bytes of rendered prompt per token, one moving average per model.

    Prompt length, expected hit and hit length use the same ratio, so shares are right even where counts are not.
    """

    def __init__(self) -> None:
        self._learned: dict[str, tuple[float, int]] = {}

    def of(self, model: str) -> float:
        """Bytes per token of *model*; `INITIAL` while nothing was learned."""
        learned = self._learned.get(model)
        return INITIAL if learned is None else learned[0]

    def learn(self, model: str, rendered_bytes: int, prompt_tokens: int) -> None:
        """Take in an engine's own count.

        The first sample is taken as it is; after that each one is clipped to a factor `CLIP` around the average, so
        that one wrong report moves it by a few per cent.

        Args:
            model: as the request named it.
            rendered_bytes: `Prompt.size` of a request of one prompt.
            prompt_tokens: `usage.prompt_tokens` of its answer.
        """
        if prompt_tokens < MIN_TOKENS or rendered_bytes <= 0:
            return
        sample = _within(rendered_bytes / prompt_tokens, LEAST, MOST)
        learned = self._learned.pop(model, None)
        if learned is None:
            if len(self._learned) >= MAX_MODELS:
                del self._learned[next(iter(self._learned))]
            self._learned[model] = (sample, 1)
            return
        ratio, samples = learned
        sample = _within(sample, ratio / CLIP, ratio * CLIP)
        ratio += (sample - ratio) * (WEIGHT if samples >= MANY else 1 / (samples + 1))
        self._learned[model] = (ratio, samples + 1)


def _within(value: float, least: float, most: float) -> float:
    return least if value < least else most if value > most else value


# Moved.


class Usage(Struct, frozen=True):
    """Tokens as the instance counted them; None where it did not say.

    Args:
        prompt_tokens: of the prompt.
        completion_tokens: generated.
        cached_tokens: of the prompt, found in a cache.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

"""Inference request as policies and sources see it, and the estimate of its tokens."""

from __future__ import annotations

import asyncio
import enum
from array import array
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from smetric.errors import RequestError
from smetric.request.prompt import BLOCK_BYTES, NOTHING, BlockKeys, Parts, Prompt, hash_of

#: Bytes per token before any engine reported a count.
INITIAL = 4.0
#: Bounds of a learned ratio; a report outside of them is about something else.
LEAST, MOST = 1.0, 16.0
#: Prompts below this many tokens are mostly chat template and are ignored.
MIN_TOKENS = 64
#: Most models with a learned ratio; the one that learned least recently goes first.
MAX_MODELS = 256
#: Weight of a sample after `MANY` samples, and the factor around the average to which a sample is clipped.
WEIGHT = 0.05
MANY = round(1 / WEIGHT) - 1
CLIP = 1.5


class Api(enum.Enum):
    """The wire format of a request."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    MESSAGES = "messages"
    RESPONSES = "responses"
    #: Any other body that is passed through.
    OTHER = "other"

    __hash__ = object.__hash__  # members are singletons, and the hash of Enum is slow


class Usage(Struct, frozen=True):
    """Tokens as the instance counted them; None for a count that it did not report.

    Args:
        prompt_tokens: of the prompt.
        completion_tokens: generated.
        cached_tokens: of the prompt, found in a cache.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class FieldGivenTwice(RequestError):
    """A body gives a field twice, and readers differ in which one counts."""


class InferenceRequest(Struct, kw_only=True):
    """Request to be routed.

    Policies read the fields up to `prefill_zone` as `req.…` (units: tokens, seconds).
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
    #: The client's name of `model`, if that is an alias.
    alias: str = ""
    #: The path of the request.
    path: str = ""
    #: Number of sequences the engine will run: n × prompts.
    prompts: int = 1
    stream: bool = False
    #: The place of `model` in a form; None for other bodies.
    model_span: slice | None = None
    #: Why the body was not read; empty if it was. Only a body of `Api.OTHER` may be unread.
    unread: str = ""
    #: The prompt as the engine renders it; None without one.
    prompt: Prompt | None = None
    #: A response id or conversation id that ties the request to the engine that holds it.
    pinned_to: str = ""
    #: The model after alias resolution, and the salt that separates its cache entries.
    served: str = ""
    cache_salt: str = ""
    #: Arguments of the chat template besides the messages, as JSON; empty for none.
    template_args: bytes = b""
    #: Hashes of the prompt's parts, once an answer has begun.
    parts: Parts | None = None
    #: Whether the on-demand fields were filled, as a policy that was asked, or observed, reads them.
    is_described: bool = False
    #: Cached by `smetric.sources.prefix_index.cut`: the blocks of the prompt's text.
    text_cut: Any = None
    #: Chained keys of the prompt's token blocks by block size.
    block_keys: dict[int, BlockKeys] | None = None
    #: The body as received, until the first byte of the answer; the task that tokenises it; and the ids, if known in
    #: time. None of them is logged or recorded.
    body: bytes | None = None
    tokenising: asyncio.Future[array[int] | None] | None = None
    token_ids: array[int] | None = None
    _prefix: str | None = None

    def __repr__(self) -> str:
        # Logged with errors, so it has nothing of the client's text.
        return f"InferenceRequest(api={self.api}, model={self.model!r}, turn={self.turn}, prompt_len={self.prompt_len})"

    @property
    def prefix(self) -> str:
        """Key of the prompt's first 256 tokens, 16 hex digits; empty without a prompt. Computed on first use."""
        if self._prefix is None:
            beginning = self.prompt.beginning if self.prompt is not None else 0
            self._prefix = f"{beginning:016x}" if beginning else ""
        return self._prefix

    def prompt_blocks(self) -> tuple[Sequence[int], float]:
        """Return hashes of the first prompt's full blocks, each covering all before it, and the tokens of a block.

        The blocks are of token ids if the prefix index has cut it by them, else of text.
        """
        prompt = self.prompt
        if prompt is None or not prompt.beginning:  # 0: its text was dropped unhashed
            return (), 0.0
        for block_tokens, (blocks, _) in prompt.token_blocks.items():
            return blocks, block_tokens
        return prompt.hashes.blocks, BLOCK_BYTES / prompt.bytes_per_token

    def keys_of(self, ids: Sequence[int], block_size: int, adapter: str) -> BlockKeys:
        """Return the chained keys of the blocks of *ids*, its tokens, for *adapter* (empty for none); cached."""
        if self.block_keys is None:
            self.block_keys = {}
        keys = self.block_keys.get(block_size)
        if keys is None:
            keys = self.block_keys[block_size] = BlockKeys(ids, block_size, adapter, self.cache_salt)
        return keys

    def count_by(self, ids: array[int], block_size: int) -> None:
        """Replace the estimated lengths by those of *ids*, the tokens of the first prompt.

        The share of the history stays what it was in bytes. The expected hit is whole blocks of *block_size* tokens.
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
        """Drop the text, because an answer has begun and nothing more is looked up."""
        self.body = None
        if self.prompt is not None:
            salt = hash_of(self.cache_salt.encode()) if self.cache_salt else NOTHING
            template = hash_of(self.template_args) if self.template_args else NOTHING
            self.parts = self.prompt.summarise(salt=salt, template=template)
        self.template_args = b""

    def let_go(self) -> None:
        """Drop everything large, because the exchange has ended and its record is kept."""
        self.prompt = self.text_cut = self.body = self.tokenising = self.token_ids = self.parts = self.block_keys = None
        self.template_args = b""


class TokenRatio(dict[str, float]):
    """Bytes of rendered prompt per token without a tokenizer, by model: moving averages learned from engines.

    It has no item for a model of which nothing is learned; take `INITIAL`. Prompt length, expected hit and hit length
    use the same ratio, so shares are right even if counts are not.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Number of samples by model, the one that learned least recently first.
        self._samples: dict[str, int] = {}

    def learn(self, model: str, rendered_bytes: int, prompt_tokens: int) -> None:
        """Learn from an engine's own count.

        The first sample is taken as it is. Later ones are clipped to a factor `CLIP` around the average, so that one
        wrong report changes it by a few per cent.

        Args:
            model: as the request named it.
            rendered_bytes: `Prompt.size` of a request of one prompt.
            prompt_tokens: `usage.prompt_tokens` of its answer.
        """
        if prompt_tokens < MIN_TOKENS or rendered_bytes <= 0:
            return
        sample = min(max(rendered_bytes / prompt_tokens, LEAST), MOST)
        ratio, samples = self.get(model, sample), self._samples.pop(model, 0)
        sample = min(max(sample, ratio / CLIP), ratio * CLIP)
        self[model] = ratio + (sample - ratio) * (WEIGHT if samples >= MANY else 1 / (samples + 1))
        self._samples[model] = samples + 1
        if len(self) > MAX_MODELS:
            stalest = next(iter(self._samples))
            del self._samples[stalest], self[stalest]

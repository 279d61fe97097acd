"""Prompts cut into blocks of text or token ids."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from smetric.request.prompt import BLOCK_BYTES, BlockKeys, Prompt
from smetric.request.request import InferenceRequest, Usage

#: Most blocks that a reply is entered as.
MOST_REPLY_BLOCKS = 16_384
_pair = struct.Struct("<II").pack
_hash = xxhash.xxh3_64_intdigest


class Cut(ABC):
    """One prompt in one space.

    Attributes:
        blocks: hashes of its full blocks; each covers all before it.
        grain: units of a block: bytes or tokens.
        size: units of the whole prompt.
    """

    __slots__ = ("blocks", "grain", "size")

    blocks: Sequence[int]
    grain: int
    size: int

    @property
    @abstractmethod
    def units_per_token(self) -> float:
        """Units that a token is, in the mean."""

    @abstractmethod
    def tokens(self, units: int) -> int:
        """Tokens that can hit where the leading *units* are held."""

    @abstractmethod
    def reach(self, depth: int, held: Callable[[Sequence[int]], int]) -> int:
        """Units held where the leading *depth* blocks are, with a reply that goes on from there.

        Args:
            depth: blocks.
            held: how many leading ones are held there of hashes that `reply` gave for an earlier prompt.
        """

    @abstractmethod
    def answered(self, depth: int) -> int:
        """The first of the hashes that `reply` gave for the prompt that this one follows, which ended in block *depth*.

        0 where it did not end there, or nothing was followed.
        """

    @abstractmethod
    def reply(self, usage: Usage | None) -> Sequence[int]:
        """Hashes that stand for the reply to this prompt, to be held by whoever gave it."""


class TextCut(Cut):
    """By rendered text. A follow-up whose question was answered counts as held with all of its history."""

    __slots__ = ("_hashes", "_prompt")

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._hashes = hashes = prompt.hashes
        self.blocks = hashes.blocks
        self.grain = BLOCK_BYTES
        self.size = prompt.size

    @property
    def units_per_token(self) -> float:
        """Bytes of a token, as far as that is known."""
        return self._prompt.bytes_per_token

    def tokens(self, units: int) -> int:
        """By that ratio, at most the whole prompt."""
        return self._prompt.tokens_within(units)

    def reach(self, depth: int, held: Callable[[Sequence[int]], int]) -> int:
        """The blocks, or the whole history where the question before it was answered there."""
        reach, question = depth * BLOCK_BYTES, self.answered(depth)
        history = self._prompt.history_bytes
        return history if history > reach and question and held((question,)) else reach

    def answered(self, depth: int) -> int:
        """The question."""
        return self._hashes.question if depth >= self._prompt.question_bytes // BLOCK_BYTES else 0

    def reply(self, usage: Usage | None) -> Sequence[int]:
        """The prompt itself, as a question that was answered."""
        return (self._hashes.whole,)


class TokenCut(Cut):
    """By token ids. Of a reply no ids are known, only their number: it is blocks that are named by the question's text.

    The engine has computed all tokens of the reply but the last. They are those that follow the question in the next
    prompt, unless the engine would encode its own text otherwise than it wrote it.
    """

    __slots__ = ("_question", "_whole")

    def __init__(self, blocks: Sequence[int], grain: int, size: int, prompt: Prompt) -> None:
        self.blocks = blocks
        self.grain = grain
        self.size = size
        self._question = prompt.hashes.question
        self._whole = prompt.hashes.whole

    @property
    def units_per_token(self) -> float:
        """Tokens are what is counted."""
        return 1.0

    def tokens(self, units: int) -> int:
        """Whole blocks; the last token of a prompt is always computed again."""
        return min(units, (self.size - 1) // self.grain * self.grain)

    def reach(self, depth: int, held: Callable[[Sequence[int]], int]) -> int:
        """The blocks, and those of the reply to the question that ends within the next one."""
        end, first = depth, self.answered(depth)
        if first and held((first,)):
            most = min(self.size // self.grain, depth + MOST_REPLY_BLOCKS)
            end += held([_reply_block(self._question, depth, at) for at in range(depth, most)])
        return end * self.grain

    def answered(self, depth: int) -> int:
        """The block behind the question's last full one."""
        is_followed = self._question and depth < self.size // self.grain
        return _reply_block(self._question, depth, depth) if is_followed else 0

    def reply(self, usage: Usage | None) -> Sequence[int]:
        """The blocks that the engine has filled with it; none where that is not told."""
        if usage is None or not usage.completion_tokens or usage.prompt_tokens != self.size:
            return array("Q")
        begin, end = self.size // self.grain, (self.size + usage.completion_tokens - 1) // self.grain
        end = min(end, begin + MOST_REPLY_BLOCKS)
        return array("Q", [_reply_block(self._whole, begin, at) for at in range(begin, end)])


class Cutting(Protocol):
    """One of the spaces."""

    #: Tokens of a block, 0 for blocks of text; and the units of a block.
    tokens: int
    grain: int

    def of(self, request: InferenceRequest) -> Cut | None:
        """The request's first prompt, hashed once; None where it has none, or no ids."""


class TextCutting:
    """Blocks of text."""

    tokens = 0
    grain = BLOCK_BYTES

    def of(self, request: InferenceRequest) -> Cut | None:
        """Its first prompt, if there is one; who asks again gets the same."""
        cut: TextCut | None = request.text_cut
        if cut is None and request.prompt is not None:
            cut = request.text_cut = TextCut(request.prompt)
        return cut


class TokenCutting:
    """Blocks of *tokens* token ids."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self.grain = tokens

    def of(self, request: InferenceRequest) -> Cut | None:
        """Its first prompt, if its ids are known, or were when it was hashed."""
        prompt, ids = request.prompt, request.token_ids
        if prompt is None:
            return None
        known = prompt.token_blocks.get(self.tokens)
        if known is not None:
            return TokenCut(known[0], self.tokens, known[1], prompt)
        return self.cut(prompt, ids) if ids is not None else None

    def cut(self, prompt: Prompt, ids: Sequence[int]) -> Cut:
        """*prompt*, whose ids are *ids*; hashed from now on, whether or not its request keeps them."""
        blocks = BlockKeys(ids, self.tokens, root=_hash(prompt.key)).upto(len(ids) // self.tokens)
        prompt.token_blocks[self.tokens] = blocks, len(ids)
        return TokenCut(blocks, self.tokens, len(ids), prompt)


def _reply_block(question: int, begin: int, at: int) -> int:
    """Hash of the block *at* of what was answered to *question*, whose own full blocks end at *begin*."""
    return _hash(_pair(begin, at), question)

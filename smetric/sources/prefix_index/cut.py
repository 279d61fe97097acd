"""Prompts cut into blocks of text or of token ids.

The two kinds of blocks are separate spaces: their hashes never match.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence

import xxhash

from smetric.request.prompt import BLOCK_BYTES, BlockKeys, Prompt
from smetric.request.request import InferenceRequest, Usage

#: Most blocks that a reply is entered as.
MOST_REPLY_BLOCKS = 16_384
_pair = struct.Struct("<II").pack
_hash = xxhash.xxh3_64_intdigest


class Cut(ABC):
    """One prompt, cut into blocks. Its units are bytes of text or tokens.

    Attributes:
        blocks: hashes of its full blocks; each covers all before it.
        grain: units of a block.
        size: units of the whole prompt.
    """

    __slots__ = ("blocks", "grain", "size")

    blocks: Sequence[int]
    grain: int
    size: int

    @property
    @abstractmethod
    def units_per_token(self) -> float:
        """Units per token, on average."""

    @abstractmethod
    def tokens(self, units: int) -> int:
        """Return the tokens that can hit if the leading *units* are held."""

    @abstractmethod
    def reach(self, depth: int, held: Callable[[Sequence[int]], int]) -> int:
        """Return the units held by a holder of the leading *depth* blocks, including a reply that follows them.

        Args:
            depth: blocks.
            held: returns how many leading ones of the hashes that `reply` gave for an earlier prompt are held.
        """

    @abstractmethod
    def answered(self, depth: int) -> int:
        """Return the first hash that `reply` gave for the prompt before this one, if that ended in block *depth*.

        0 if it did not end there, or if there is none.
        """

    @abstractmethod
    def reply(self, usage: Usage | None) -> Sequence[int]:
        """Return hashes that stand for the reply to this prompt, to be entered for the instance that gave it."""


class TextCut(Cut):
    """Prompt cut by rendered text.

    A follow-up whose previous question was answered by the holder counts as held with its whole history.
    """

    __slots__ = ("_hashes", "_prompt")

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._hashes = hashes = prompt.hashes
        self.blocks = hashes.blocks
        self.grain = BLOCK_BYTES
        self.size = prompt.size

    @property
    def units_per_token(self) -> float:
        """Bytes per token, as far as known."""
        return self._prompt.bytes_per_token

    def tokens(self, units: int) -> int:
        """Return *units* divided by that ratio, at most the whole prompt."""
        return self._prompt.tokens_within(units)

    def reach(self, depth: int, held: Callable[[Sequence[int]], int]) -> int:
        """Return the bytes of the blocks, or of the whole history if its last question was answered there."""
        reach, question = depth * BLOCK_BYTES, self.answered(depth)
        history = self._prompt.history_bytes
        return history if history > reach and question and held((question,)) else reach

    def answered(self, depth: int) -> int:
        """Return the hash of the last question in the history."""
        return self._hashes.question if depth >= self._prompt.question_bytes // BLOCK_BYTES else 0

    def reply(self, usage: Usage | None) -> Sequence[int]:
        """Return the hash of the whole prompt, which stands for an answered question."""
        return (self._hashes.whole,)


class TokenCut(Cut):
    """Prompt cut by token ids.

    Of a reply only the number of tokens is known, not their ids, so the hashes of its blocks derive from the text of
    the question. The engine has computed all tokens of the reply but the last. They follow the question in the next
    prompt, unless the engine encodes its own text differently from how it generated it.
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
        """Always 1."""
        return 1.0

    def tokens(self, units: int) -> int:
        """Return whole blocks; the last token of a prompt is always computed again."""
        return min(units, (self.size - 1) // self.grain * self.grain)

    def reach(self, depth: int, held: Callable[[Sequence[int]], int]) -> int:
        """Return the tokens of the blocks, and of the reply to the question that ends within the next block."""
        end, first = depth, self.answered(depth)
        if first and held((first,)):
            most = min(self.size // self.grain, depth + MOST_REPLY_BLOCKS)
            end += held([_reply_block(self._question, depth, at) for at in range(depth, most)])
        return end * self.grain

    def answered(self, depth: int) -> int:
        """Return the hash of the first reply block, which follows the last full block of the question."""
        is_followed = self._question and depth < self.size // self.grain
        return _reply_block(self._question, depth, depth) if is_followed else 0

    def reply(self, usage: Usage | None) -> Sequence[int]:
        """Return the blocks that the engine has filled with the reply; none if *usage* does not report it."""
        if usage is None or not usage.completion_tokens or usage.prompt_tokens != self.size:
            return array("Q")
        begin, end = self.size // self.grain, (self.size + usage.completion_tokens - 1) // self.grain
        end = min(end, begin + MOST_REPLY_BLOCKS)
        return array("Q", [_reply_block(self._whole, begin, at) for at in range(begin, end)])


def cut_of(request: InferenceRequest, block_tokens: int) -> Cut | None:
    """Return the request's first prompt, cut into blocks of *block_tokens* token ids, or of text for 0.

    A prompt is hashed once. None if there is no prompt, or if its token ids are unknown and were when it was hashed.
    """
    prompt = request.prompt
    if not block_tokens:
        text: TextCut | None = request.text_cut
        if text is None and prompt is not None:
            text = request.text_cut = TextCut(prompt)
        return text
    if prompt is None:
        return None
    known = prompt.token_blocks.get(block_tokens)
    if known is not None:
        return TokenCut(known[0], block_tokens, known[1], prompt)
    return None if request.token_ids is None else cut_ids(prompt, request.token_ids, block_tokens)


def cut_ids(prompt: Prompt, ids: Sequence[int], block_tokens: int) -> Cut:
    """Return *prompt* cut by its token *ids*. The prompt keeps the hashes, so its request need not keep the ids."""
    blocks = BlockKeys(ids, block_tokens, root=_hash(prompt.key)).upto(len(ids) // block_tokens)
    prompt.token_blocks[block_tokens] = blocks, len(ids)
    return TokenCut(blocks, block_tokens, len(ids), prompt)


def _reply_block(question: int, begin: int, at: int) -> int:
    """Return the hash of block *at* of the answer to *question*, whose own full blocks end at *begin*."""
    return _hash(_pair(begin, at), question)

"""Prompts spelt in letters of one block each, and hit lengths in blocks."""

from __future__ import annotations

from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.block_table import (
    BYTES_PER_BLOCK,
    BYTES_PER_HELD_RUN,
    BYTES_PER_HOLDING,
    BYTES_PER_RUN,
)
from smetric.sources.prefix_index.index import PrefixIndex

#: What a run of one block takes, held by one instance.
ENTRY = BYTES_PER_BLOCK + BYTES_PER_HOLDING + BYTES_PER_RUN + BYTES_PER_HELD_RUN
TOKENS_PER_BLOCK = BLOCK_BYTES // 4


def instances(count: int, *, seen_empty: bool = True) -> list[Instance]:
    fleet = [Instance(chr(ord("a") + i), f"http://127.0.0.1:{i + 1}") for i in range(count)]
    for instance in fleet:
        instance.seen_empty, instance.started_at = seen_empty, 1000.0
    return fleet


def request(blocks: str, *, key: bytes = b"m", tail: int = 0) -> InferenceRequest:
    """A prompt with one block of text for each letter, and *tail* bytes that fill no block."""
    pieces = [letter.encode() * BLOCK_BYTES for letter in blocks]
    return InferenceRequest(prompt=Prompt([*pieces, b"." * tail], 4.0, key=key))


def hits(index: PrefixIndex, asked: InferenceRequest, fleet: list[Instance]) -> list[float | None]:
    """Hit lengths in blocks."""
    cells = index.lookup(asked, fleet)["hit_len"]
    return [None if cell is None else cell / TOKENS_PER_BLOCK for cell in cells]

"""A prompt as the engine renders it: its length in bytes and tokens, and the chained hashes of its blocks.

Which pieces of a body are rendered, and in which order, is in `smetric.conversation`; who holds which block is in
`smetric.sources.prefix_index`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

#: Rendered bytes per block. A block's hash covers everything before it.
BLOCK_BYTES = 1024
#: Rendered bytes an image stands for: 1,024 tokens at the initial ratio.
IMAGE_BYTES = 4096


class Prompt:
    """The first prompt of a request.

    Args:
        pieces: its rendered text in order, UTF-8.
        bytes_per_token: the ratio all its lengths are converted by.
        history_bytes: length of the carried history, a prefix of the prompt.
        key: what besides the text decides whether engines share it: model or adapter, and cache salt.
        counted: whether `bytes_per_token` is exact, because the prompt came as token ids.
    """

    __slots__ = ("_blocks", "_pieces", "bytes_per_token", "counted", "history_bytes", "key", "size")

    def __init__(
        self,
        pieces: Sequence[bytes],
        bytes_per_token: float,
        *,
        history_bytes: int = 0,
        key: bytes = b"",
        counted: bool = False,
    ) -> None:
        self._pieces = pieces
        self._blocks: array[int] | None = None
        self.bytes_per_token = bytes_per_token
        self.history_bytes = history_bytes
        self.key = key
        self.counted = counted
        #: Rendered bytes.
        self.size = sum(map(len, pieces))

    def tokens(self, rendered_bytes: int) -> int:
        """How many whole tokens *rendered_bytes* of this prompt are."""
        # A whole number of tokens must survive the division by a ratio that was itself a quotient.
        return int(rendered_bytes / self.bytes_per_token + 1e-6)

    @property
    def length(self) -> int:
        """Tokens of the prompt, at least 1."""
        return max(1, self.tokens(self.size))

    @property
    def blocks(self) -> array[int]:
        """One 64-bit hash for each full block, chained: equal hashes at one place mean equal prompts up to there.

        Computed when first asked for, in one pass over the text, which is let go then.
        """
        if self._blocks is None:
            self._blocks = _chain(b"".join(self._pieces), self.key)
            self._pieces = ()
        return self._blocks


def _chain(text: bytes, key: bytes) -> array[int]:
    hash_of = xxhash.xxh3_64_intdigest
    view = memoryview(text)
    blocks = array("Q")
    last = hash_of(key)
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        last = hash_of(view[start : start + BLOCK_BYTES], last)
        blocks.append(last)
    return blocks


def image(data: bytes | memoryview) -> bytes:
    """The piece an image (or any other medium) renders to: its hash, repeated to the length it stands for."""
    return xxhash.xxh3_64_digest(data) * (IMAGE_BYTES // 8)

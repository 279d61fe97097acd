"""Prompt as the engine renders it: length and chained block hashes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec
import xxhash
from msgspec import Struct

from smetric.request.body import Text
from smetric.request.memo import Carrying
from smetric.request.parts import Kind, Outline, Parts, parts_of

# A prompt as the engine renders it: its length in bytes and tokens, and the chained hashes of its blocks.
#
# Which pieces of a body are rendered, and in which order, is in `conversation.py`; who holds which block is in
# `smetric.sources.prefix_index`.

#: Rendered bytes per block. A block's hash covers everything before it.
BLOCK_BYTES = 1024
#: Most bytes hashed in one go, whole blocks; of larger pieces no copy is made.
CHUNK_BYTES = 64 * 1024
#: Rendered bytes an image stands for: 1,024 tokens at the initial ratio.
IMAGE_BYTES = 4096
#: In so many pieces.
IMAGE_PIECES = 16
#: How much of a part is seen by who asks what the last message is: pieces, those of an image too, and bytes of each.
_PIECES_SEEN = 4 + IMAGE_PIECES
_BYTES_SEEN = 4096
_NONE = array("Q")
#: The blocks of a chunk.
_CUTS = [slice(at, at + BLOCK_BYTES) for at in range(0, CHUNK_BYTES, BLOCK_BYTES)]


class Prompt:
    """The first prompt of a request.

    Args:
        pieces: its rendered text in order, UTF-8, escaped as in JSON.
        bytes_per_token: the ratio all its lengths are converted by.
        size: its length in bytes; None where it is still to be counted.
        history_bytes: length of the carried history, a prefix of the prompt.
        question_bytes: length up to the last assistant turn of that history: the whole prompt of the request that this
            one follows. 0 where there is no such turn.
        key: what besides the text decides whether engines share it: model or adapter, and cache salt.
        counted: whether `bytes_per_token` is exact, because the prompt came as token ids.
        outline: which pieces are which part of a conversation; None for a prompt that is none.
        carrying: the body it is of, where its messages are to be remembered. What of them was known before is not among
            *pieces*, but for the end that fills no block.
    """

    __slots__ = (
        "_carrying",
        "_hashes",
        "_known_bytes",
        "_outline",
        "_pieces",
        "bytes_per_token",
        "counted",
        "held_before",
        "history_bytes",
        "key",
        "length",
        "question_bytes",
        "size",
        "token_blocks",
    )

    def __init__(
        self,
        pieces: Sequence[Text],
        bytes_per_token: float,
        *,
        size: int | None = None,
        history_bytes: int = 0,
        question_bytes: int = 0,
        key: bytes = b"",
        counted: bool = False,
        outline: Outline | None = None,
        carrying: Carrying | None = None,
    ) -> None:
        self._pieces: Sequence[Text] | None = pieces
        self._carrying = carrying
        self._outline = outline
        self._hashes: Hashes | None = None
        self.bytes_per_token = bytes_per_token
        self.history_bytes = history_bytes
        self.question_bytes = question_bytes
        self.key = key
        self.counted = counted
        #: What a prefix index believed held of it where it was sent, before it was: `Held.runs`, and the tick then; and
        #: hashes of its blocks of token ids, and how many ids it has. By the tokens of a block, 0 for blocks of text.
        self.held_before: dict[int, tuple[list[tuple[int, int]], int]] = {}
        self.token_blocks: dict[int, tuple[Sequence[int], int]] = {}
        carried = carrying.carried if carrying is not None else None
        #: Rendered bytes before the pieces, whole blocks.
        self._known_bytes = carried.mark.size // BLOCK_BYTES * BLOCK_BYTES if carried is not None else 0
        #: Rendered bytes.
        self.size = self._known_bytes + sum(map(len, pieces)) if size is None else size
        #: Tokens, at least 1.
        self.length = self.tokens(self.size) or 1

    def tokens(self, rendered_bytes: int) -> int:
        """How many whole tokens *rendered_bytes* of this prompt are."""
        # A whole number of tokens must survive the division by a ratio that was itself a quotient.
        return int(rendered_bytes / self.bytes_per_token + 1e-6)

    def tokens_within(self, rendered_bytes: int) -> int:
        """The same, at most the whole prompt."""
        tokens = int(rendered_bytes / self.bytes_per_token + 1e-6)
        return tokens if tokens < self.length else self.length

    def whole_blocks(self, rendered_bytes: int, block_size: int) -> int:
        """How many tokens *rendered_bytes* of this prompt are, floored to blocks of *block_size* tokens."""
        if not rendered_bytes:
            return 0
        tokens = self.tokens_within(rendered_bytes)
        return tokens - tokens % block_size

    def count(self, tokens: int) -> None:
        """The prompt is known to have *tokens* tokens, at least 1: convert by what that makes of its bytes."""
        self.bytes_per_token = max(1, self.size) / tokens
        self.length = tokens
        self.counted = True

    @property
    def beginning(self) -> int:
        """Hash of its first block, or of all of it where it has no full one; 0 once its text was let go unasked."""
        if self._hashes is None and self._pieces is None:
            return 0
        return self.hashes.blocks[0] if self.hashes.blocks else self.hashes.whole

    @property
    def is_hashed(self) -> bool:
        """Whether somebody asked for its hashes while its text was there."""
        return self._hashes is not None

    @property
    def hashes(self) -> Hashes:
        """Computed when first asked for, in one pass over the text."""
        if self._hashes is None:
            assert self._pieces is not None, "the text was let go before anybody asked for its hashes"
            known, blocks = self._known_bytes, _NONE
            if known:
                assert self._carrying is not None
                assert self._carrying.carried is not None
                blocks = self._carrying.carried.blocks[: known // BLOCK_BYTES]
            self._hashes = _hashes(self._pieces, self.size - known, self.key, self.question_bytes, blocks)
        return self._hashes

    def summarise(self, *, salt: int, template: int) -> Parts | None:
        """Let the text go; what is kept are the hashes, those computed before and these of its parts.

        A prompt that fills no block is not divided: what could be lost of its cache is less than that would cost.

        Args:
            salt: hash of the cache salt.
            template: hash of the arguments of the chat template.
        """
        outline, pieces, carrying = self._outline, self._pieces, self._carrying
        self._outline, self._pieces, self._carrying = None, None, None
        assert pieces is not None, "an answer begins once"
        if outline is None or self.size < BLOCK_BYTES:
            return None
        carried = carrying.carried if carrying is not None else None
        before = carried.parts.up_to(carried.mark.size) if carried is not None else None
        parts = parts_of(pieces, outline, salt=salt, template=template, before=before)
        if carrying is not None and self._hashes is not None:
            carrying.memory.remember(carrying, pieces, self._hashes.blocks, parts)
        return parts

    def last_message(self) -> list[tuple[Kind, bytes]]:
        """The parts of the last message that is no answer begun, each with the beginning of its text.

        Empty for what is no conversation, and once the text was let go.
        """
        outline, pieces = self._outline, self._pieces
        if outline is None or pieces is None:
            return []
        begins, first = outline.begins, outline.messages_from
        last = len(begins)
        while last > first and begins[last - 1][1] is Kind.ASSISTANT:
            last -= 1
        at = last
        while at > first and begins[at - 1][2] == begins[last - 1][2]:
            at -= 1
        ends = [*(start for start, _, _ in begins[at + 1 : last + 1]), len(pieces)]
        return [
            (kind, b"".join(piece[:_BYTES_SEEN] for piece in pieces[start : min(end, start + _PIECES_SEEN)]))
            for (start, kind, _), end in zip(begins[at:last], ends, strict=False)
        ]


class Hashes(Struct, frozen=True):
    """What stands for a prompt's text: 64-bit hashes, each of which covers everything before it.

    Args:
        blocks: one for each full block; equal hashes at one place mean equal prompts up to there.
        whole: the whole prompt, with the bytes at its end that fill no block.
        question: the same for the part up to the last assistant turn, so the `whole` of the request that this one
            follows; 0 where there is no such turn.
    """

    blocks: array[int]
    whole: int
    question: int


def _hashes(pieces: Sequence[Text], size: int, key: bytes, question_bytes: int, known: array[int]) -> Hashes:
    """The hashes of a prompt that goes on with *pieces*, of *size* bytes, from the blocks that are *known*."""
    hash_of = xxhash.xxh3_64_intdigest
    first = last = known[-1] if known else hash_of(key)
    if size < BLOCK_BYTES:
        text = b"".join(pieces)
        asked = question_bytes - len(known) * BLOCK_BYTES
        return Hashes(known, hash_of(text, first), hash_of(text[:asked], first) if question_bytes else 0)
    if size <= CHUNK_BYTES:
        pieces = (b"".join(pieces),)
    blocks: list[int] = []
    left = b""  # of the chunks before, and fills no block
    for chunk in _chunks(pieces) if size > CHUNK_BYTES else pieces:
        view = memoryview(chunk)
        if left:
            missing = BLOCK_BYTES - len(left)
            left += view[:missing]
            if len(left) < BLOCK_BYTES:
                continue
            last = hash_of(left, last)
            blocks.append(last)
            view = view[missing:]
        full = len(view) // BLOCK_BYTES
        for cut in _CUTS[:full]:
            last = hash_of(view[cut], last)
            blocks.append(last)
        left = bytes(view[full * BLOCK_BYTES :])
    question = 0
    if question_bytes:
        asked = question_bytes - len(known) * BLOCK_BYTES
        full = asked // BLOCK_BYTES
        rest = _between(pieces, full * BLOCK_BYTES, asked)
        question = hash_of(rest, blocks[full - 1] if full else first)
    return Hashes(known + array("Q", blocks), hash_of(left, last), question)


def _chunks(pieces: Sequence[Text]) -> Iterator[Text]:
    """The text of *pieces* in chunks, small ones put together: a copy of it all would be fresh memory, and slow."""
    small: list[Text] = []
    size = 0
    for piece in pieces:
        length = len(piece)
        if size + length > CHUNK_BYTES and small:
            yield b"".join(small)
            small.clear()
            size = 0
        if length > CHUNK_BYTES:
            view = memoryview(piece)
            for at in range(0, length, CHUNK_BYTES):
                yield view[at : at + CHUNK_BYTES]
        else:
            small.append(piece)
            size += length
    if small:
        yield b"".join(small)


def _between(pieces: Sequence[Text], start: int, end: int) -> bytes:
    """The text of *pieces* from *start* to *end*."""
    found: list[Text] = []
    at = 0
    for piece in pieces:
        after = at + len(piece)
        if after > start:
            found.append(piece[start - at if start > at else 0 : end - at])
        at = after
        if at >= end:
            break
    return b"".join(found)


def image(data: bytes | memoryview) -> tuple[bytes, ...]:
    """The pieces an image (or any other medium) renders to: its hash, repeated to the length it stands for.

    They are one and the same: a body of some KiB may name thousands of images.
    """
    return (xxhash.xxh3_64_digest(data) * (IMAGE_BYTES // IMAGE_PIECES // 8),) * IMAGE_PIECES


# Names for blocks of tokens: chained keys, so that equal keys mean equal prompts up to the block's end.
#
# A key covers the block's token ids, whatever else decides whether engines share the block (adapter, image, cache
# salt), and all blocks before it. Who holds which block is in `smetric.sources.kv_index`.

#: Key of the empty prompt.
ROOT = 0
_hash = xxhash.xxh3_64_intdigest
_encode = msgspec.msgpack.Encoder().encode


def suffix_of(extra: Sequence[object] | None) -> bytes:
    """What a block's extra keys (adapter, images, salt) add to the bytes its key is computed from."""
    return _encode(extra) if extra else b""


class BlockKeys:
    """The keys of a prompt's blocks, computed as far as somebody asked.

    Args:
        token_ids: of the whole prompt.
        block_size: tokens of a block.
        adapter: name of the adapter the prompt is for; empty for none.
        salt: cache salt; empty for none.
        root: key of the empty prompt, where more than these two tells prompts apart.
    """

    __slots__ = ("_ids", "_size", "_suffix", "keys")

    def __init__(
        self, token_ids: Sequence[int], block_size: int, adapter: str = "", salt: str = "", *, root: int = ROOT
    ) -> None:
        ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
        self._ids = memoryview(ids).cast("B")
        self._size = block_size * ids.itemsize
        self._suffix = suffix_of([adapter] if adapter else None)
        first = [part for part in (adapter, salt) if part]
        #: Those computed so far.
        self.keys: list[int] = []
        if len(self._ids) >= self._size:
            self.keys.append(_hash(bytes(self._ids[: self._size]) + suffix_of(first), root))

    def upto(self, count: int) -> list[int]:
        """At least the first *count* keys, or all there are."""
        keys, ids, size, suffix = self.keys, self._ids, self._size, self._suffix
        done = len(keys)
        end = min(count * size, len(ids) - size + 1)
        if keys and done < count:
            key = keys[-1]
            if suffix:
                for start in range(done * size, end, size):
                    key = _hash(bytes(ids[start : start + size]) + suffix, key)
                    keys.append(key)
            else:
                for start in range(done * size, end, size):
                    key = _hash(ids[start : start + size], key)
                    keys.append(key)
        return keys

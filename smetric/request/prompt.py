"""Prompt as the engine renders it: its length, its chained block hashes, and hashes of its parts.

The rendering is in `conversation.py`. Which instance holds which block is known to the sources.
"""

from __future__ import annotations

import enum
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import xxhash
from msgspec import Raw, Struct

from smetric.errors import UNREADABLE

#: A piece of rendered text: UTF-8, escaped as in JSON.
Piece = bytes | memoryview

#: Rendered bytes per block. A block's hash covers everything before it.
BLOCK_BYTES = 1024
#: Most bytes hashed at once, in whole blocks; larger pieces are not copied.
CHUNK_BYTES = 64 * 1024
#: Added to a number of tokens before it is cut: the ratio may be a quotient, and whole numbers survive the division.
ROUNDING = 1e-6
#: Rendered bytes of an image: 1,024 tokens at the initial ratio. It consists of several equal pieces.
IMAGE_BYTES = 4096
IMAGE_PIECES = 16
#: Most pieces of a part that `Prompt.last_message` returns, and bytes of each; an image fits.
_MOST_PIECES = 4 + IMAGE_PIECES
_MOST_PIECE_BYTES = 4096
#: Parts that must agree in a row before the rest after a difference counts as the same again.
_RUN = 2
#: Salt of the hashes of parts. It makes them incomparable between processes, and useless for guessing text.
_SALT = int.from_bytes(os.urandom(8))
_RAWS = msgspec.json.Decoder(list[Raw])
_NO_BLOCKS = array("Q")


class _Object(Struct):
    """Any object; nothing of it is kept."""


_OBJECTS = msgspec.json.Decoder(list[_Object])

#: Names of the APIs that marks are made of: roles, types of Responses items, types of content other than text.
_NAMES = """
system developer user assistant tool function
message item_reference reasoning function_call function_call_output custom_tool_call custom_tool_call_output
web_search_call file_search_call code_interpreter_call image_generation_call computer_call computer_call_output
local_shell_call local_shell_call_output mcp_call mcp_list_tools mcp_approval_request mcp_approval_response
text input_text output_text summary_text refusal thinking redacted_thinking tool_use tool_result server_tool_use
web_search_tool_result mcp_tool_use mcp_tool_result search_result image image_url input_image input_audio
audio_url video_url file input_file document
"""
_MARKS = {name: b"<|%b|>" % name.encode() for name in _NAMES.split()}
#: Suffixes of these marks, none of which is a client's text.
MARK_SUFFIXES = frozenset(mark[start:] for mark in _MARKS.values() for start in range(len(mark)))


def mark_of(name: str) -> bytes:
    """Return the mark of a role or type, such as `<|user|>`; *name* may be any text."""
    return _MARKS.get(name) or b"<|%b|>" % name.encode()


def image(data: bytes | memoryview) -> tuple[bytes, ...]:
    """Return the pieces that an image or other medium renders to: its hash, repeated to `IMAGE_BYTES`.

    The pieces are one object, because a body of a few KiB may name thousands of images.
    """
    return (xxhash.xxh3_64_digest(data) * (IMAGE_BYTES // IMAGE_PIECES // 8),) * IMAGE_PIECES


def hash_of(text: Piece | Raw) -> int:
    """Return the salted 64-bit hash of *text*."""
    return xxhash.xxh3_64_intdigest(text, _SALT)


#: The hash of the empty text.
NOTHING = hash_of(b"")


class PartKind(enum.IntEnum):
    """Kind of a part of a prompt."""

    TOOLS = 0
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL_RESULT = 4


class Outline(Struct, frozen=True):
    """Positions of the parts in the pieces of a rendered conversation.

    Args:
        field: name of the list of messages in the body.
        begins: index of each part's first piece, its kind, and its index in the list it comes from. Parts are
            contiguous; a part without pieces does not count.
        messages_from: number of parts before the messages.
    """

    field: str
    begins: list[tuple[int, PartKind, int]]
    messages_from: int


class Parts(Struct, frozen=True):
    """Hashes of a prompt's parts: each tool, system block, message and tool result. No text is kept.

    Args:
        hashes: 64 bits each, comparable within this process only.
        kinds: the `PartKind` of each.
        places: index in the list each comes from: tools, system blocks, messages.
        ends: rendered bytes of the prompt up to the end of each.
        messages_from: number of parts before the messages.
        field: name of the list of messages in the body.
        size: rendered bytes of the prompt.
        salt: hash of the cache salt.
        template: hash of the arguments of the chat template.
        first_user: hash of the first user message; None without one.
        first_assistant: hash of the first assistant message; None without one.
    """

    hashes: array[int]
    kinds: bytes
    places: array[int]
    ends: array[int]
    messages_from: int
    field: str
    size: int
    salt: int = 0
    template: int = 0
    first_user: int | None = None
    first_assistant: int | None = None

    def up_to(self, size: int) -> Parts:
        """Return the parts that end within the first *size* rendered bytes, for `parts_of` to continue."""
        count = bisect_right(self.ends, size)
        hashes, kinds, places, ends = self.hashes[:count], self.kinds[:count], self.places[:count], self.ends[:count]
        return Parts(hashes, kinds, places, ends, min(self.messages_from, count), self.field, size)

    def place(self, at: int) -> str:
        """Return the place of part *at* in the body, e.g. `messages[3]`; all tools are one place."""
        if self.kinds[at] == PartKind.TOOLS:
            return "tools"
        return f"{self.field if at >= self.messages_from else 'system'}[{self.places[at]}]"

    def shared_with(self, other: Parts) -> int:
        """Return the number of equal leading parts."""
        low, high = 0, min(len(self.hashes), len(other.hashes))
        if self.hashes[:high] == other.hashes[:high]:
            return high
        while high - low > 1:  # the first `low` parts agree, the first `high` do not
            middle = (low + high) // 2
            if self.hashes[low:middle] == other.hashes[low:middle]:
                low = middle
            else:
                high = middle
        return low

    def messages(self) -> set[int]:
        """Return the hashes of the messages and tool results."""
        return set(self.hashes[self.messages_from :])

    def tools(self) -> array[int]:
        """Return the hashes of the tools, which come first."""
        return self.hashes[: self.kinds.count(PartKind.TOOLS)]


def parts_of(
    pieces: Sequence[Piece], outline: Outline, *, salt: int = 0, template: int = 0, before: Parts | None = None
) -> Parts:
    """Hash the parts of a conversation rendered as *pieces*, which continues the parts *before*, in one pass."""
    hashes: list[int] = []
    kinds: list[int] = []
    places: list[int] = []
    ends: list[int] = []
    begins, first_message = outline.begins, outline.messages_from
    messages_from = None if before is None else before.messages_from
    # Position of each piece. Pieces before the first part are the end of the known prefix.
    at = list(accumulate(map(len, pieces), initial=0))
    shift = 0 if before is None else before.size - at[begins[0][0]]
    # Bound here because CPython 3.11 takes 0.1 µs to read a member of an enumeration, a tenth of the work per part.
    tools_kind, result_kind, digest_of = PartKind.TOOLS, PartKind.TOOL_RESULT, xxhash.xxh3_64_intdigest
    following = (*begins[1:], (len(pieces), None, 0))
    for number, ((start, kind, place), (stop, next_kind, next_place)) in enumerate(
        zip(begins, following, strict=False)
    ):
        if number == first_message and messages_from is None:
            messages_from = len(hashes)
        if kind is tools_kind:
            size = at[start]
            for tool in _tools(pieces[start]):
                size += len(tool)
                hashes.append(digest_of(tool, _SALT))
                kinds.append(kind)
                places.append(place)
                ends.append(size)
            continue
        if stop - start < 2 and (
            stop == start
            # The mark of a message that begins with a tool result is no part of its own.
            or (
                next_kind is result_kind
                and next_place == place
                and (number <= first_message or begins[number - 1][2] != place)
            )
        ):
            continue
        digest = _SALT
        for piece in pieces[start:stop]:
            digest = digest_of(piece, digest)
        hashes.append(digest)
        kinds.append(kind)
        places.append(place)
        ends.append(at[stop] + shift)
    if messages_from is None:
        messages_from = len(hashes)
    table = array("Q", hashes), bytes(kinds), array("I", places), array("Q", ends)
    if before is not None:
        table = before.hashes + table[0], before.kinds + table[1], before.places + table[2], before.ends + table[3]
    user, assistant = table[1].find(PartKind.USER, messages_from), table[1].find(PartKind.ASSISTANT, messages_from)
    return Parts(
        *table,
        messages_from,
        outline.field,
        at[-1] + shift,
        salt,
        template,
        table[0][user] if user >= 0 else None,
        table[0][assistant] if assistant >= 0 else None,
    )


def _tools(text: Piece) -> Sequence[Piece | Raw]:
    """Return the tools in *text*; tools other than a list of objects count as one.

    The number of objects was bounded when the body was screened. There may be millions of numbers instead.
    """
    try:
        _OBJECTS.decode(text)
        return _RAWS.decode(text)
    except UNREADABLE:
        return (text,)


class PartChange(enum.Enum):
    """Change of a part between two prompts of a session."""

    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"
    REORDERED = "reordered"


@dataclass(frozen=True, slots=True)
class Divergence:
    """First part of a prompt that differs from the prompt before.

    Args:
        part: name of its `PartKind` in lower case.
        place: its place in the body, e.g. `tools`, `system[0]`, `messages[3]`.
        change: how it changed.
        reach_bytes: rendered bytes up to its end, the later one of both prompts: they are equal up to less than that.
    """

    part: str
    place: str
    change: PartChange
    reach_bytes: int


def divergence(before: Parts, after: Parts) -> Divergence | None:
    """Return where *after* departs from *before*; None if one of them continues the other."""
    at = before.shared_with(after)
    if at == min(len(before.hashes), len(after.hashes)):
        return None
    reach_bytes = max(before.ends[at], after.ends[at])
    if PartKind.TOOLS in (before.kinds[at], after.kinds[at]):
        return Divergence("tools", "tools", _change_of_tools(before.tools(), after.tools()), reach_bytes)
    comes_later = _recurs(before.hashes, at, after.hashes)
    came_earlier = _recurs(after.hashes, at, before.hashes)
    if comes_later and came_earlier:
        change = PartChange.REORDERED
    elif comes_later:
        change = PartChange.ADDED
    else:
        change = PartChange.REMOVED if came_earlier else PartChange.CHANGED
    named = after if change is PartChange.ADDED else before
    return Divergence(PartKind(named.kinds[at]).name.lower(), named.place(at), change, reach_bytes)


def _change_of_tools(before: array[int], after: array[int]) -> PartChange:
    if sorted(before) == sorted(after):
        return PartChange.REORDERED
    if set(before) < set(after):
        return PartChange.ADDED
    return PartChange.REMOVED if set(after) < set(before) else PartChange.CHANGED


def _recurs(one: array[int], at: int, other: array[int]) -> bool:
    """Return whether part *at* of *one* comes later in *other*, followed by the same parts."""
    try:
        found = other.index(one[at], at + 1)
    except ValueError:
        return False
    run = one[at : at + _RUN]
    return run == other[found : found + len(run)]


class KnownPrefix(Struct, frozen=True):
    """Hashes of a prompt's beginning that are known from an earlier prompt.

    Args:
        size: rendered bytes that both prompts share.
        blocks: block hashes of the earlier prompt.
        parts: parts of the earlier prompt.
    """

    size: int
    blocks: array[int]
    parts: Parts


class Hashes(Struct, frozen=True):
    """64-bit hashes of a prompt's text. Each covers everything before it.

    Args:
        blocks: one for each full block; equal hashes at the same index mean equal prompts up to there.
        whole: hash of the whole prompt, including the bytes after the last full block.
        question: the `whole` of the request that this one follows: the prompt up to the last assistant turn. 0 without
            such a turn.
    """

    blocks: array[int]
    whole: int
    question: int


class _HashedOnce:
    """Hashes of a prompt, computed on first use; from then on they are a plain attribute, unlike a property."""

    def __get__(self, prompt: Prompt, owner: type[Prompt]) -> Hashes:
        hashes = prompt.__dict__["hashes"] = prompt.hash()
        return hashes


class Prompt:
    """The first prompt of a request.

    Args:
        pieces: its rendered text in order, without the whole blocks of the *known* prefix.
        bytes_per_token: the ratio by which all its lengths are converted.
        size: its length in bytes; None to count it.
        history_bytes: length of the carried history, a prefix of the prompt.
        question_bytes: length up to the last assistant turn of that history, which is the whole prompt of the request
            before. 0 without such a turn.
        key: everything besides the text that decides whether engines share it: model or adapter, and cache salt.
        counted: whether `bytes_per_token` is exact, because the prompt came as token ids.
        outline: the parts of a conversation; None for other prompts.
        known: what is known of its beginning.
        remember: called with block hashes and parts once an answer has begun.
    """

    hashes = _HashedOnce()

    def __init__(
        self,
        pieces: Sequence[Piece],
        bytes_per_token: float,
        *,
        size: int | None = None,
        history_bytes: int = 0,
        question_bytes: int = 0,
        key: bytes = b"",
        counted: bool = False,
        outline: Outline | None = None,
        known: KnownPrefix | None = None,
        remember: Callable[[array[int], Parts], None] | None = None,
    ) -> None:
        self._pieces: Sequence[Piece] | None = pieces
        self._outline = outline
        self._known = known
        self._known_blocks = known.size // BLOCK_BYTES if known is not None else 0
        self._remember = remember
        #: Whether the hashes were computed.
        self.is_hashed = False
        self.bytes_per_token = bytes_per_token
        self.history_bytes = history_bytes
        self.question_bytes = question_bytes
        self.key = key
        self.counted = counted
        #: By tokens per block of a prefix index, 0 for blocks of text: what the index believed its instance to hold
        #: before this request (`HolderBlocks.runs`, and the tick then), and the hashes of its token blocks with the
        #: number of ids.
        self.held_before: dict[int, tuple[list[tuple[int, int]], int]] = {}
        self.token_blocks: dict[int, tuple[Sequence[int], int]] = {}
        #: Rendered bytes.
        self.size = self._known_blocks * BLOCK_BYTES + sum(map(len, pieces)) if size is None else size
        #: Tokens, at least 1.
        self.length = int(self.size / bytes_per_token + ROUNDING) or 1

    def tokens(self, rendered_bytes: int) -> int:
        """Return how many whole tokens *rendered_bytes* of this prompt are."""
        return int(rendered_bytes / self.bytes_per_token + ROUNDING)

    def whole_blocks(self, rendered_bytes: int, block_size: int) -> int:
        """Return how many tokens *rendered_bytes* are, floored to blocks of *block_size* tokens."""
        if not rendered_bytes:
            return 0
        tokens = min(int(rendered_bytes / self.bytes_per_token + ROUNDING), self.length)
        return tokens - tokens % block_size

    def count(self, tokens: int) -> None:
        """Set the exact number of tokens, at least 1, and the ratio that it implies."""
        self.bytes_per_token = max(1, self.size) / tokens
        self.length = tokens
        self.counted = True

    @property
    def beginning(self) -> int:
        """Hash of the first block, or of a prompt without a full one; 0 if the text was dropped unhashed."""
        if self._pieces is None and not self.is_hashed:
            return 0
        return self.hashes.blocks[0] if self.hashes.blocks else self.hashes.whole

    def hash(self) -> Hashes:
        """Hash the text in one pass."""
        pieces = self._pieces
        assert pieces is not None, "the text was dropped before it was hashed"
        self.is_hashed = True
        hash_block = xxhash.xxh3_64_intdigest
        known = self._known.blocks[: self._known_blocks] if self._known is not None else _NO_BLOCKS
        size = self.size - len(known) * BLOCK_BYTES
        asked = self.question_bytes - len(known) * BLOCK_BYTES
        first = last = known[-1] if known else hash_block(self.key)
        if size < BLOCK_BYTES:
            text = b"".join(pieces)
            return Hashes(known, hash_block(text, first), hash_block(text[:asked], first) if self.question_bytes else 0)
        if size <= CHUNK_BYTES:
            pieces = (b"".join(pieces),)
        blocks: list[int] = []
        left = b""  # bytes of the chunks before that fill no block
        for chunk in _chunks(pieces) if size > CHUNK_BYTES else pieces:
            view = memoryview(chunk)
            if left:
                missing = BLOCK_BYTES - len(left)
                left += view[:missing]
                if len(left) < BLOCK_BYTES:
                    continue
                last = hash_block(left, last)
                blocks.append(last)
                view = view[missing:]
            full = len(view) // BLOCK_BYTES
            for cut in _CUTS[:full]:
                last = hash_block(view[cut], last)
                blocks.append(last)
            left = bytes(view[full * BLOCK_BYTES :])
        question = 0
        if self.question_bytes:
            full = asked // BLOCK_BYTES
            rest = _between(pieces, full * BLOCK_BYTES, asked)
            question = hash_block(rest, blocks[full - 1] if full else first)
        return Hashes(known + array("Q", blocks), hash_block(left, last), question)

    def summarise(self, *, salt: int, template: int) -> Parts | None:
        """Drop the text and return the hashes of its parts; block hashes computed before are kept.

        A prompt without a full block has no parts: the cache it could lose is worth less than the work.

        Args:
            salt: hash of the cache salt.
            template: hash of the arguments of the chat template.
        """
        outline, pieces, known, remember = self._outline, self._pieces, self._known, self._remember
        self._outline = self._pieces = self._known = self._remember = None
        assert pieces is not None, "an answer begins once"
        if outline is None or self.size < BLOCK_BYTES:
            return None
        before = known.parts.up_to(known.size) if known is not None else None
        parts = parts_of(pieces, outline, salt=salt, template=template, before=before)
        if remember is not None and self.is_hashed:
            remember(self.hashes.blocks, parts)
        return parts

    def last_message(self) -> list[tuple[PartKind, bytes]]:
        """Return the parts of the last message before a begun answer, each with the beginning of its text.

        Empty for prompts other than conversations, and once the text is dropped.
        """
        outline, pieces = self._outline, self._pieces
        if outline is None or pieces is None:
            return []
        begins, first = outline.begins, outline.messages_from
        last = len(begins)
        while last > first and begins[last - 1][1] is PartKind.ASSISTANT:
            last -= 1
        at = last
        while at > first and begins[at - 1][2] == begins[last - 1][2]:
            at -= 1
        ends = [*(start for start, _, _ in begins[at + 1 : last + 1]), len(pieces)]
        return [
            (kind, b"".join(piece[:_MOST_PIECE_BYTES] for piece in pieces[start : min(end, start + _MOST_PIECES)]))
            for (start, kind, _), end in zip(begins[at:last], ends, strict=False)
        ]


#: The blocks of a chunk.
_CUTS = [slice(at, at + BLOCK_BYTES) for at in range(0, CHUNK_BYTES, BLOCK_BYTES)]


def _chunks(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the text of *pieces* in chunks, with small pieces joined. A copy of it all would need fresh memory."""
    small: list[Piece] = []
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


def _between(pieces: Sequence[Piece], start: int, end: int) -> bytes:
    """Return the text of *pieces* from *start* to *end*."""
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        after = at + len(piece)
        if after > start:
            found.append(piece[start - at if start > at else 0 : end - at])
        at = after
        if at >= end:
            break
    return b"".join(found)


#: Key of the empty prompt.
ROOT = 0
_encode = msgspec.msgpack.Encoder().encode


def suffix_of(extra: Sequence[object] | None) -> bytes:
    """Return the bytes that a block's extra keys (adapter, images, salt) add to the input of its key."""
    return _encode(extra) if extra else b""


class BlockKeys:
    """Chained keys of a prompt's token blocks, computed as far as needed.

    A key covers the block's token ids, everything else that decides whether engines share the block (adapter, image,
    cache salt), and all blocks before it. Equal keys mean equal prompts up to the end of the block.

    Args:
        token_ids: ids of the whole prompt.
        block_size: tokens per block.
        adapter: name of the adapter; empty for none.
        salt: cache salt; empty for none.
        root: key of the empty prompt, if more than these two tells prompts apart.
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
        #: The keys computed so far.
        self.keys: list[int] = []
        if len(self._ids) >= self._size:
            self.keys.append(xxhash.xxh3_64_intdigest(bytes(self._ids[: self._size]) + suffix_of(first), root))

    def upto(self, count: int) -> list[int]:
        """Return at least the first *count* keys, or all there are."""
        keys, ids, size, suffix = self.keys, self._ids, self._size, self._suffix
        done = len(keys)
        end = min(count * size, len(ids) - size + 1)
        if keys and done < count:
            key = keys[-1]
            for start in range(done * size, end, size):
                block = ids[start : start + size]
                key = xxhash.xxh3_64_intdigest(bytes(block) + suffix if suffix else block, key)
                keys.append(key)
        return keys

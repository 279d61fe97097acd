"""Parts of a prompt as hashes."""

from __future__ import annotations

import enum
import os
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import xxhash
from msgspec import Raw, Struct

from smetric.errors import UNREADABLE
from smetric.request.body import Text

# The marks that rendered prompts have for roles and types, such as `<|user|>`: those of the APIs are known by heart.
#
# What is rendered between them is in `rendering.py`.

#: Roles, types of Responses items, and types of content that is no text.
_NAMES = """
system developer user assistant tool function
message item_reference reasoning function_call function_call_output custom_tool_call custom_tool_call_output
web_search_call file_search_call code_interpreter_call image_generation_call computer_call computer_call_output
local_shell_call local_shell_call_output mcp_call mcp_list_tools mcp_approval_request mcp_approval_response
text input_text output_text summary_text refusal thinking redacted_thinking tool_use tool_result server_tool_use
web_search_tool_result mcp_tool_use mcp_tool_result search_result image image_url input_image input_audio
audio_url video_url file input_file document
"""
_KNOWN = {name: b"<|%b|>" % name.encode() for name in _NAMES.split()}
#: The known ones and what they end with: none of it is a client's text.
ENDINGS = frozenset(mark[start:] for mark in _KNOWN.values() for start in range(len(mark)))


def mark_of(name: str) -> bytes:
    """The mark for *name*, which may be any text."""
    return _KNOWN.get(name) or b"<|%b|>" % name.encode()


# The parts of a prompt (tools, system blocks, messages) as hashes, and where two prompts of one session part ways.
#
# No text is kept, and the hashes are salted for this process alone. Who compares which prompts, and when a difference
# counts, is in `smetric.caches.breaks`.

#: Hashes of two processes cannot be compared, nor can those of a guessed text with ours.
_SALT = int.from_bytes(os.urandom(8))
_RAWS = msgspec.json.Decoder(list[Raw])
#: Parts that must agree in a row before what follows a difference counts as the same again.
_RUN = 2


class _Object(Struct):
    """Any object; none of it is kept."""


_OBJECTS = msgspec.json.Decoder(list[_Object])


class Kind(enum.IntEnum):
    """What a part is."""

    TOOLS = 0
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL_RESULT = 4


class Change(enum.Enum):
    """What became of a part."""

    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"
    REORDERED = "reordered"


class Outline(Struct, frozen=True):
    """Which pieces of a rendered conversation are which part.

    Args:
        field: name of the list of messages in the body.
        begins: index of each part's first piece, what it is, and its place in the list it comes from. Parts follow
            each other without gaps; one without pieces is none.
        messages_from: how many of these come before the messages.
    """

    field: str
    begins: list[tuple[int, Kind, int]]
    messages_from: int


class Parts(Struct, frozen=True):
    """A prompt as the hashes of its parts: one for each tool, system block, message and tool result.

    Args:
        hashes: 64 bits each.
        kinds: a `Kind` each.
        places: place in the list each comes from: tools, system blocks, messages.
        ends: rendered bytes of the prompt up to the end of each.
        messages_from: how many come before the messages.
        field: name of the list of messages in the body.
        size: rendered bytes of the prompt.
        salt: hash of the cache salt.
        template: hash of the arguments of the chat template.
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

    def up_to(self, size: int) -> Parts:
        """Those that end within the first *size* rendered bytes, as the parts of a prompt of that size."""
        count = bisect_right(self.ends, size)
        hashes, kinds, places, ends = self.hashes[:count], self.kinds[:count], self.places[:count], self.ends[:count]
        return Parts(hashes, kinds, places, ends, min(self.messages_from, count), self.field, size)

    def place(self, at: int) -> str:
        """Where part *at* stands in the body, e.g. `messages[3]`; tools are one place."""
        if self.kinds[at] == Kind.TOOLS:
            return "tools"
        return f"{self.field if at >= self.messages_from else 'system'}[{self.places[at]}]"

    def shared_with(self, other: Parts) -> int:
        """How many leading parts are the same."""
        low, high = 0, min(len(self.hashes), len(other.hashes))
        if self.hashes[:high] == other.hashes[:high]:
            return high
        while high - low > 1:  # the first `low` agree, the first `high` do not
            middle = (low + high) // 2
            if self.hashes[low:middle] == other.hashes[low:middle]:
                low = middle
            else:
                high = middle
        return low

    def is_beginning_of(self, other: Parts) -> bool:
        """Whether *other* goes on where these end."""
        return self.hashes == other.hashes[: len(self.hashes)]

    def first(self, kind: Kind) -> int | None:
        """Hash of the first message of *kind*, None without one."""
        at = self.kinds.find(kind, self.messages_from)
        return None if at < 0 else self.hashes[at]

    def messages(self) -> set[int]:
        """The hashes of the messages and tool results."""
        return set(self.hashes[self.messages_from :])

    def tools(self) -> array[int]:
        """The hashes of the tools, which come first."""
        return self.hashes[: self.kinds.count(Kind.TOOLS)]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first part of a prompt that is not continued as it was.

    Args:
        part: what it is: the name of a `Kind` in lower case.
        place: where it stands in the body, e.g. `tools`, `system[0]`, `messages[3]`.
        change: what became of it.
        reach_bytes: rendered bytes up to its end, the later one: what is the same of both prompts ends before.
    """

    part: str
    place: str
    change: Change
    reach_bytes: int


def hash_of(text: bytes) -> int:
    """The salted hash of *text*, 64 bits."""
    return xxhash.xxh3_64_intdigest(text, _SALT)


#: The hash of no text.
NOTHING = hash_of(b"")
# Asked for each prompt: a look into an enumeration costs as much as a call.
_TOOLS, _TOOL_RESULT = Kind.TOOLS, Kind.TOOL_RESULT


def parts_of(
    pieces: Sequence[Text], outline: Outline, *, salt: int = 0, template: int = 0, before: Parts | None = None
) -> Parts:
    """Hash the parts of a conversation rendered as *pieces*, which go on from the parts *before*, in one pass."""
    digest_of = xxhash.xxh3_64_intdigest
    hashes: list[int] = []
    kinds: list[int] = []
    places: list[int] = []
    ends: list[int] = []
    begins, first_message = outline.begins, outline.messages_from
    messages_from = None if before is None else before.messages_from
    # Where each piece begins; what comes before the first part is the end of what was known before.
    at = list(accumulate(map(len, pieces), initial=0))
    shift = 0 if before is None else before.size - at[begins[0][0]]
    ahead = (*begins[1:], (len(pieces), None, 0))
    for number, ((start, kind, place), (stop, next_kind, next_place)) in enumerate(zip(begins, ahead, strict=False)):
        if number == first_message and messages_from is None:
            messages_from = len(hashes)
        if kind is _TOOLS:
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
            # The mark of a message that begins with a tool result says nothing of its own.
            or (
                next_kind is _TOOL_RESULT
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
    return Parts(*table, messages_from, outline.field, at[-1] + shift, salt, template)


def _tools(text: Text) -> Sequence[Raw | Text]:
    """The tools, each as it stands in *text*; tools that are no list of objects are one.

    Objects were counted when the body was screened. Of numbers there may be millions, and each would be a part.
    """
    try:
        _OBJECTS.decode(text)
        return _RAWS.decode(text)
    except UNREADABLE:
        return (text,)


def divergence(before: Parts, after: Parts) -> Divergence | None:
    """Where *after* departs from *before*; None where it continues it, or is a beginning of it."""
    at = before.shared_with(after)
    if at == min(len(before.hashes), len(after.hashes)):
        return None
    reach_bytes = max(before.ends[at], after.ends[at])
    if Kind.TOOLS in (before.kinds[at], after.kinds[at]):
        return Divergence("tools", "tools", _change_of_tools(before.tools(), after.tools()), reach_bytes)
    comes_later = _runs_on(before.hashes, at, after.hashes)
    came_earlier = _runs_on(after.hashes, at, before.hashes)
    if comes_later and came_earlier:
        change = Change.REORDERED
    elif comes_later:
        change = Change.ADDED
    else:
        change = Change.REMOVED if came_earlier else Change.CHANGED
    told = after if change is Change.ADDED else before
    return Divergence(Kind(told.kinds[at]).name.lower(), told.place(at), change, reach_bytes)


def _change_of_tools(before: array[int], after: array[int]) -> Change:
    if sorted(before) == sorted(after):
        return Change.REORDERED
    if set(before) < set(after):
        return Change.ADDED
    return Change.REMOVED if set(after) < set(before) else Change.CHANGED


def _runs_on(one: array[int], at: int, other: array[int]) -> bool:
    """Whether what *one* holds at *at* comes later in *other*, with what follows it."""
    try:
        found = other.index(one[at], at + 1)
    except ValueError:
        return False
    run = one[at : at + _RUN]
    return run == other[found : found + len(run)]

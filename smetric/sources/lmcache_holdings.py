"""What one answer of an LMCache lookup service says: how long a prefix of the prompt each LMCache instance holds.

How the two services put it is in `lmcache_coordinator` and `lmcache_controller`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec

#: Most tokens in one question; the coordinator refuses more than a million.
MAX_TOKENS = 1_000_000
#: LMCache's id of an instance, in an answer: no longer than it may be in the settings, since answers are remembered.
InstanceId: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that is looked up.

    Args:
        tokens: its leading ids, an array of unsigned 32-bit integers, whole chunks only: the rest is never held.
        model: the model as LMCache's keys name it.
        salt: its cache salt, empty for none.
    """

    tokens: array[int] = field(repr=False)
    model: str
    salt: str


@dataclass(frozen=True, slots=True)
class Holdings:
    """Lengths in tokens, from the prompt's first token on, by LMCache's instance id.

    All lengths are above 0. An instance that is not named is unknown, not empty: a service that has lost its
    directory, or hashes otherwise than the engines, answers in the same way.

    Args:
        host: held in the instance's own host memory.
        own: held by the instance itself, in host memory or on its disk.
        shared: held in a store that every instance can fetch from; None where there is no such thing.
        likely: held in the instance's host memory if the likeliest reading of an ambiguous answer is right.
    """

    host: Mapping[str, int] = field(default_factory=dict)
    own: Mapping[str, int] = field(default_factory=dict)
    shared: int | None = None
    likely: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many lengths it keeps, and one for itself."""
        return 1 + len(self.host) + len(self.own) + len(self.likely)


#: Nothing is known.
NOTHING = Holdings()


class UnreadableError(Exception):
    """An answer that makes no sense; the message says why, with numbers only and nothing of what was answered."""

"""LMCache's coordinator (`lmcache coordinator`, multi-process mode, 0.5.3 on): `POST /directory/lookup`.

It names every instance and tier for every chunk, so each instance's prefix is exact: its chunks from the first one to
the first gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import orjson

from smetric.sources.lmcache_holdings import Holdings, InstanceId, Question, UnreadableError
from smetric.unreadable import UNREADABLE

#: The tier in an instance's host memory; every other tier of its own lies on its disk.
HOST_TIER = "l1"
#: Bytes an answer may have: whatever the question, and for each key. Real ones repeat the tokens, 2 KB a key, and take
#: 140 bytes for each placement.
BASE_BYTES, KEY_BYTES = 1024 * 1024, 16 * 1024


# An answer for a long prompt has tens of thousands of these, none in a cycle: the collector need not look at them.
class _Placement(msgspec.Struct, gc=False):
    instance_id: InstanceId
    tier: str
    shared: bool = False


class _Key(msgspec.Struct, gc=False):
    chunk_hash_hex: str


class _Result(msgspec.Struct, gc=False):
    key: _Key
    placements: list[_Placement]


class _Answer(msgspec.Struct, gc=False):
    chunks: int
    results: list[_Result]


_ANSWER = msgspec.json.Decoder(_Answer)


class Coordinator:
    """Asks the coordinator's directory.

    Args:
        chunk_size: tokens of a chunk, as the servers are started.
        world_size: tensor-parallel ranks of an engine; each holds its own part of every chunk.
    """

    path = "/directory/lookup"
    #: A salt is part of the keys.
    knows_salts = True

    def __init__(self, chunk_size: int, world_size: int) -> None:
        self._chunk_size = chunk_size
        self._world_size = world_size

    def body(self, question: Question) -> bytes:
        """The request body for *question*."""
        return orjson.dumps(
            {
                "token_ids": question.tokens.tolist(),
                "model_name": question.model,
                "world_size": self._world_size,
                "cache_salt": question.salt,
            }
        )

    def largest(self, question: Question) -> int:
        """Bytes of the largest answer that makes sense."""
        return BASE_BYTES + len(question.tokens) // self._chunk_size * self._world_size * KEY_BYTES

    def read(self, body: bytes, question: Question) -> Holdings:
        """What the answer *body* says.

        Raises:
            UnreadableError: it is no answer to *question*.
        """
        try:
            answer = _ANSWER.decode(body)
        except UNREADABLE as error:
            raise UnreadableError("the answer is no directory listing") from error
        asked = len(question.tokens) // self._chunk_size
        if answer.chunks != asked:
            raise UnreadableError(
                f"{len(question.tokens)} tokens were cut into {answer.chunks} chunks, not {asked}: "
                f"lmcache.chunk_size is {self._chunk_size} here; set it to the servers' chunk size"
            )
        ranks, rest = divmod(len(answer.results), asked)
        if rest or ranks < self._world_size:
            raise UnreadableError(
                f"{len(answer.results)} keys for {asked} chunks and lmcache.world_size {self._world_size}"
            )
        chunks = [answer.results[at : at + ranks] for at in range(0, len(answer.results), ranks)]
        for chunk in chunks:
            if any(result.key.chunk_hash_hex != chunk[0].key.chunk_hash_hex for result in chunk):
                raise UnreadableError(f"the {ranks} keys of a chunk do not stand together")
        return self._walk(chunks)

    def _walk(self, chunks: Sequence[Sequence[_Result]]) -> Holdings:
        """Follow every instance from the first chunk to its first gap. A chunk is held if all its ranks' parts are."""
        host, own, shared = _Prefixes(), _Prefixes(), 0
        for number, ranks in enumerate(chunks):
            host.follow(
                number, [{p.instance_id for p in r.placements if p.tier == HOST_TIER and not p.shared} for r in ranks]
            )
            own.follow(number, [{p.instance_id for p in r.placements if not p.shared} for r in ranks])
            if shared == number and all(any(p.shared for p in r.placements) for r in ranks):
                shared += 1
            elif not own.following:
                break
        size = self._chunk_size
        return Holdings(
            host={id: chunks * size for id, chunks in host.lengths.items()},
            own={id: chunks * size for id, chunks in own.lengths.items()},
            shared=shared * size or None,
        )


class _Prefixes:
    """How many leading chunks each holder has, while a prompt is walked along."""

    __slots__ = ("following", "lengths")

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        #: Those that have held every chunk so far.
        self.following: set[str] = set()

    def follow(self, number: int, holders: Sequence[set[str]]) -> None:
        """The chunk *number*, counted from 0, has these holders, one set for each rank."""
        here = set.intersection(*holders)
        self.following = here if number == 0 else self.following & here
        for id in self.following:
            self.lengths[id] = number + 1

"""LMCache's controller (`lmcache_controller`, in-process mode): `POST /lookup`.

For every chunk it names one instance only, the one among its holders that registered first, and of that instance only
where its last such chunk ends. So:

- One instance named: it holds every chunk up to there, and nobody holds the next one. That is exact for it. Others may
  hold any part of the same; they are unknown.
- Several named: the chunks are split among them in a way that is not told. An instance may be named for a chunk in the
  middle without holding the beginning, so no length is certain. The instance whose chunks reach furthest most probably
  holds everything before them too, since an engine stores a prompt's chunks together (sessions that share a system
  prompt look like this: its chunks are credited to whoever registered first). It is given as `likely`; the others are
  unknown.
- Nobody named: unknown. A controller that hashes otherwise than the engines answers like this for ever.

Keys carry no model, adapter or salt: a salted prompt is not asked for. With tensor parallelism one rank's chunks count
as the instance's.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import orjson

from smetric.sources.lmcache_holdings import NOTHING, Holdings, InstanceId, Question, UnreadableError
from smetric.unreadable import UNREADABLE

#: Where an instance keeps chunks of its own: in host memory, on its disk.
HOST, DISK = "LocalCPUBackend", "LocalDiskBackend"
#: Bytes an answer may have; an instance takes about 50.
MAX_BYTES = 1024 * 1024

_Length = Annotated[int, msgspec.Meta(gt=0)]


class _Answer(msgspec.Struct):
    layout_info: dict[InstanceId, tuple[str, _Length]]


_ANSWER = msgspec.json.Decoder(_Answer)


class Controller:
    """Asks the controller."""

    path = "/lookup"
    #: A salted prompt would be found under the same key as any other.
    knows_salts = False

    def body(self, question: Question) -> bytes:
        """The request body for *question*."""
        return orjson.dumps({"tokens": question.tokens.tolist()})

    def largest(self, question: Question) -> int:
        """Bytes of the largest answer that makes sense."""
        return MAX_BYTES

    def read(self, body: bytes, question: Question) -> Holdings:
        """What the answer *body* says.

        Raises:
            UnreadableError: it is no answer to *question*.
        """
        try:
            layout = _ANSWER.decode(body).layout_info
        except UNREADABLE as error:
            raise UnreadableError("the answer is no layout") from error
        if not layout:
            return NOTHING
        furthest, (place, length) = max(layout.items(), key=lambda item: item[1][1])
        if length > len(question.tokens):
            raise UnreadableError(f"{len(question.tokens)} tokens were asked for and {length} are said to be held")
        if len(layout) > 1:
            # Two cannot own the last chunk; if they do, nothing can be read from this.
            alone = sum(end == length for _, end in layout.values()) == 1
            return Holdings(likely={furthest: length}) if alone and place == HOST else NOTHING
        return Holdings(
            host={furthest: length} if place == HOST else {},
            own={furthest: length} if place in (HOST, DISK) else {},
        )

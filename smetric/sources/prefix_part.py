"""What the prefix index knows of a hit in part only: it stands where no source knows the whole.

A router that has just started may know an instance to hold the system prompt that all sessions share, and nothing of
the session that is asked for. Told at once, this part would hide the whole from sources that are asked later.
"""

from __future__ import annotations

from collections.abc import Sequence

from smetric.fleet.instance import Instance
from smetric.request import InferenceRequest
from smetric.sources.prefix_index import PrefixIndex
from smetric.sources.source import Cells, Source


class PrefixPart(Source):
    """A source to be asked after all others.

    Args:
        index: what learns, and forgets; it is told itself.
    """

    name = "prefix_index:part"
    fills = frozenset({"hit_len"})

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        """The tokens that each instance is known to hold, None where that is none."""
        return {"hit_len": [hit or None for hit in self._index.least(request, instances)]}

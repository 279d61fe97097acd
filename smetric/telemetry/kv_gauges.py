"""Series of what is known of each KV cache from its engine's events, computed when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smetric.telemetry import names
from smetric.telemetry.family import family
from smetric.telemetry.metrics import MOST_INSTANCES


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What is known of one instance's caches, and how it came.

    Args:
        is_known: whether the contents of all of them, one for each data-parallel rank, are complete.
        messages: messages by result: ok, replayed, repeated, malformed.
        lag_s: seconds from when the engine made its latest message until it was taken; None before the first.
        gaps: how often messages were missed for good.
        missed: how many of them.
        orphans: blocks that could not be entered.
        restarts: most that one publisher's numbers showed.
    """

    is_known: bool
    messages: Mapping[str, int]
    lag_s: float | None
    gaps: int
    missed: int
    orphans: int
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class KvFigures:
    """What the source of KV events says of itself: its index, and each instance by id."""

    blocks: int
    memory_bytes: int
    refused: int
    instances: Mapping[str, CacheFigures]


class KvGauges(Collector):
    """Collects the state of the source of KV events; *figures* may be called from any thread."""

    def __init__(self, figures: Callable[[], KvFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """All series, now; those of single instances only while there are few of them."""
        figures = self._figures()
        yield family(names.KV_INDEX_BLOCKS, figures.blocks)
        yield family(names.KV_INDEX_BYTES, figures.memory_bytes)
        yield family(names.KV_INDEX_REFUSED, figures.refused)
        of = figures.instances
        if len(of) > MOST_INSTANCES:
            return
        yield family(names.KV_KNOWN, {id: one.is_known for id, one in of.items()})
        yield family(names.KV_LAG, {id: one.lag_s for id, one in of.items() if one.lag_s is not None})
        messages = {(id, result): count for id, one in of.items() for result, count in one.messages.items()}
        yield family(names.KV_EVENTS, messages)
        yield family(names.KV_GAPS, {id: one.gaps for id, one in of.items()})
        yield family(names.KV_MISSED, {id: one.missed for id, one in of.items()})
        yield family(names.KV_ORPHANS, {id: one.orphans for id, one in of.items()})

"""What stands before everything that knows something about instances, and what works beside the requests."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from smetric.fleet.instance import Instance
from smetric.request import InferenceRequest
from smetric.usage import Usage

#: One value per instance asked for; None where the source does not know.
Cells = Sequence[float | None]


class Background(Protocol):
    """What works beside the requests, from the application's start to its end."""

    async def start(self) -> None:
        """Begin background work; returns soon."""

    async def stop(self) -> None:
        """End background work and close what was opened."""


class Source:
    """Fills features by answering look-ups. What one that derives from it leaves out, it has no use for.

    Attributes:
        name: as it appears in traces and configuration.
        fills: the look-up features it fills; empty for one that is never asked.
    """

    name: str = ""
    fills: frozenset[str] = frozenset()

    async def start(self) -> None:
        """Begin background work; returns at once."""

    async def stop(self) -> None:
        """End background work and close what was opened."""

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        """Look *request* up in every instance: feature name to one cell each.

        A source that knows at once returns the mapping itself; one that must ask returns an awaitable, which the
        router bounds by its deadline. Failure and lateness are unknown cells, never 0.
        """
        return {}

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """*instance* sent the first body byte of its answer: the prompt is in its cache now."""

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """*instance* has answered *request* to the end, and reported *usage* if it did."""

    def forget(self, instance: Instance) -> None:
        """*instance* restarted: nothing known of its cache holds any more."""

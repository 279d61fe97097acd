"""Protocols of sources, and the base classes they derive from.

A source knows something about instances. `Lookups` asks sources for values when a request is decided, and reports to
them how the request goes on.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from smetric.fleet.fleet import Measured
from smetric.fleet.instance import Instance, Lease
from smetric.request.request import InferenceRequest, Usage

#: One value per instance asked for; None where it is unknown.
Cells = Sequence[float | None]


class Background(Protocol):
    """Work beside the requests, from the application's start to its end."""

    async def start(self) -> None:
        """Begin background work; return soon."""

    async def stop(self) -> None:
        """End background work and close what was opened."""


class TokenIds(Protocol):
    """Token ids of prompts, as sources get them."""

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        """Return the ids of the request's first prompt exactly as its engine will see them; None if unknown."""

    def begin(self, request: InferenceRequest) -> Awaitable[Sequence[int] | None] | None:
        """Begin to find the same ids for use after the decision, while the request's body is still there.

        The request's lengths stay as the decision saw them. Return None if it is clear that there will be no ids.
        """


class SourceCounts(Protocol):
    """Counters of what sources do; the metrics implement them."""

    def scraped(self, instance: str, result: str, duration_s: float) -> None:
        """Count a scrape of *instance*; *result* is ok, timeout, connect_error, http_error or bad_page."""

    def looked_up(self, source: str, result: str) -> None:
        """Count a look-up; *result* is one of `names.LOOKUP_RESULTS`."""

    def suspended(self, source: str, is_suspended: bool) -> None:
        """Record whether the service behind *source* is suspended because it fails."""

    def tokenized(self, source: str, result: str, duration_s: float) -> None:
        """Count a prompt whose token ids were wanted; *result* is one of `names.TOKENIZE_RESULTS`."""

    def ids_compared(self, equal: bool) -> None:
        """Count a prompt whose token ids were compared with an engine's own count."""


class Source:
    """Source of look-up features. A subclass overrides the methods it needs.

    Attributes:
        name: as it appears in traces and configuration.
        fills: the look-up features it fills; empty if it is never asked.
    """

    name: str = ""
    fills: frozenset[str] = frozenset()

    async def start(self) -> None:
        """Begin background work; return at once."""

    async def stop(self) -> None:
        """End background work and close what was opened."""

    def lookup(
        self, request: InferenceRequest, instances: Sequence[Instance]
    ) -> dict[str, Cells] | Awaitable[dict[str, Cells]]:
        """Look *request* up in every instance: feature name to one cell each.

        Return the mapping itself, or an awaitable of it if it has to be fetched; the router bounds that by its
        deadline. Failure and lateness are unknown cells, never 0.
        """
        return {}

    def prefilled(self, request: InferenceRequest, instance: Instance) -> None:
        """Note that *instance* sent the first output of its answer: the prompt is in its cache now."""

    def settled(self, request: InferenceRequest, instance: Instance, usage: Usage | None) -> None:
        """Note that *instance* has answered *request*, with *usage* if it reported that; without it, completely."""

    def forget(self, instance: Instance) -> None:
        """Drop what is known of the cache of *instance*, which restarted."""


class Follower(Source):
    """Source that learns from requests as they pass, and a `Measure`: it fills features at once, without a look-up.

    What it keeps is bounded and grows old.

    Args:
        clock: monotonic seconds.

    Attributes:
        measures: features of instances that it fills.
        describes: fields of requests that it fills before they are decided.
    """

    measures: frozenset[str] = frozenset()
    describes: frozenset[str] = frozenset()

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """Return the present values of a feature it measures over *instances*, and when each was measured."""
        raise NotImplementedError(f"{self.name} measures no {feature}")

    def describe(self, request: InferenceRequest) -> None:
        """Fill its fields of *request*. Called if a policy reads one of them."""

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """Note that *request* was charged to an instance."""

    def first_token(self, lease: Lease, seconds: float) -> None:
        """Note that the stream of a charged request began *seconds* after it was sent."""

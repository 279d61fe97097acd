"""Protocols of sources and background work."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from typing import Protocol

from smetric.config import Settings
from smetric.fleet.fleet import Measured
from smetric.fleet.instance import Instance, Lease
from smetric.request.request import InferenceRequest, Usage

# What stands before everything that knows something about instances, and what works beside the requests.

#: One value per instance asked for; None where the source does not know.
Cells = Sequence[float | None]


class Background(Protocol):
    """What works beside the requests, from the application's start to its end."""

    async def start(self) -> None:
        """Begin background work; returns soon."""

    async def stop(self) -> None:
        """End background work and close what was opened."""


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
        """Count a prompt whose token ids an engine counted too: as many, or not."""


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


# What sources that follow requests on their way have in common: they look nothing up, and do nothing till told.


class Follower(Source):
    """A source that learns from where requests go and when they are answered, and a `Measure`.

    What it keeps is bounded, and has an age.
    """

    #: Features that it fills at once.
    measures: frozenset[str] = frozenset()
    #: Fields of requests that it fills before they are decided.
    describes: frozenset[str] = frozenset()

    def measure(self, feature: str, instances: Sequence[Instance]) -> Measured:
        """One of the features it measures, over *instances*, now."""
        raise NotImplementedError(f"{self.name} measures no {feature}")

    def describe(self, request: InferenceRequest) -> None:
        """Fill its fields of *request*; called where a policy reads one of them."""

    def sent(self, request: InferenceRequest, lease: Lease) -> None:
        """*request* was charged to an instance."""

    def first_token(self, lease: Lease, seconds: float) -> None:
        """The stream of a charged request began *seconds* after it was sent."""


# Which look-ups and measured features a configuration fills, without building its sources.


def filled_by(settings: Settings) -> frozenset[str]:
    """The look-ups and measured features that some source of *settings* may know."""
    filled = {"prefill_rate", "qps"}
    if settings.prefix_index.enabled:
        filled.add("cached_tokens")
    if settings.lmcache.url or settings.prefill.fetch_rate:
        filled.add("fetch_rate")
    if settings.kv_events.enabled or settings.prefix_index.enabled:
        filled.add("hit_len")
    if settings.lmcache.url:
        filled |= {"hit_len", "host_hit_len", "disk_hit_len"}
        if settings.lmcache.mode != "controller":  # it knows of no store, so that tier is always unknown
            filled.add("store_hit_len")
    return frozenset(filled)


# When a loop that does something at a steady pace does it next.


def next_turn(due: float, interval_s: float, now: float) -> float:
    """When the turn after that of *due* is: whole intervals later, so that loops stay as far apart as they were.

    One that is late by less than an interval is taken at once: what waits for an answer for as long as an interval must
    not miss every other turn. Those missed by more, while the process was suspended or busy, are left out: were they
    made up for, the loops of all instances, which begin one after the other, would go on at one moment for ever.
    """
    turns = (now - due) / interval_s
    return due + interval_s * (1 if turns < 2 else math.ceil(turns))


# The one protocol by which sources get a prompt's token ids; nothing that tokenises is here.


class TokenIds(Protocol):
    """Knows the token ids of prompts."""

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        """Ids of the request's first prompt exactly as its engine will see them; None where that is not known."""

    def begin(self, request: InferenceRequest) -> Awaitable[Sequence[int] | None] | None:
        """The same for whoever needs them after the decision: begun at once, while the request's body is there.

        The request's lengths stay as the decision saw them. None where it is clear that there will be no ids.
        """

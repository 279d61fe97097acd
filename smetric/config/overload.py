"""The section of the configuration that says how much is taken at once, and what becomes of the rest."""

from __future__ import annotations

from dataclasses import dataclass

from smetric.config.kind import Integer
from smetric.config.quantity import Duration, Size
from smetric.config.section import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadSettings:
    """How much is taken at once; what is above is refused at once, or waits in the queue."""

    in_flight: int = setting(
        Integer(0, 1_000_000),
        "Most inference requests under way at the instances; those above wait in the queue. 0: as many as come.",
        0,
    )
    wait: float = setting(
        Duration("0s", "10m"),
        "Longest wait for one of these places; a request that would wait longer is answered 429 at once.",
        2.0,
    )
    queue: int = setting(
        Integer(0, 65536), "Most requests in the queue: held by a policy's `hold`, or for want of a place.", 1024
    )
    queue_bytes: int = setting(Size("1KiB", "64GiB"), "Most bytes of their bodies.", 64 << 20)
    bodies: int = setting(
        Size("1KiB", "1024GiB"),
        "Most bytes of request bodies kept until their answers begin; what does not fit is answered 503.",
        256 << 20,
    )
    memory: int = setting(
        Size("0B", "1024GiB"), "Memory the router may take; 0B for what its container allows, if that is limited.", 0
    )
    soft_percent: int = setting(
        Integer(1, 100),
        "Share of that memory, or of the open files allowed, from which no more are taken than are under way.",
        85,
    )
    hard_percent: int = setting(Integer(1, 100), "Share from which no new ones are taken.", 95)
    soft_lag: float = setting(
        Duration("1ms", "1m"), "Lateness of the event loop from which no more are taken than are under way.", 0.5
    )
    hard_lag: float = setting(Duration("1ms", "1m"), "Lateness from which no new ones are taken.", 2.0)

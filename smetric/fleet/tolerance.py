"""What an instance may do before it is left out, and for how long it then is.

Judging by it is `smetric.fleet.health`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from smetric.config import Settings


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The bounds.

    Args:
        fall: probes in a row that fail and make an instance ill.
        rise: probes in a row that succeed and make it well again.
        failures: requests in a row that fail and eject it.
        slow_factor: times its peers' wait for a first token, from which it is ejected; 0 for never.
        ejection_s: seconds it is ejected for, times the falls it has not been forgiven.
        longest_ejection_s: most seconds in one go.
        max_ejected: most of all instances that may be ejected for what requests say, 0..1; one always may.
        panic_below: share of healthy instances, 0..1, below which health no longer decides who is a candidate.
        slow_start_s: seconds over which an instance that has come back gets its share again; 0 for at once.
    """

    fall: int = 2
    rise: int = 2
    failures: int = 5
    slow_factor: float = 5.0
    ejection_s: float = 30.0
    longest_ejection_s: float = 300.0
    max_ejected: float = 0.3
    panic_below: float = 0.5
    slow_start_s: float = 30.0


def tolerance_of(settings: Settings) -> Tolerance:
    """What the settings say."""
    return Tolerance(
        fall=settings.health.fall,
        rise=settings.health.rise,
        failures=settings.health.failures,
        slow_factor=settings.health.slow_factor,
        ejection_s=settings.health.ejection,
        longest_ejection_s=settings.health.longest_ejection,
        max_ejected=settings.health.max_ejected_percent / 100,
        panic_below=settings.health.panic_below_percent / 100,
        slow_start_s=settings.health.slow_start,
    )

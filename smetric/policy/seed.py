"""Stateless draws: the decision's seed mixed with the place of the draw in the file.

Not `random.Random(seed)`: setting one up costs more than a policy.
"""

from __future__ import annotations

import zlib

_MASK = (1 << 64) - 1


def stream_of(key: str) -> int:
    """The number that stands for a pick's own stream of draws; unrelated edits of the file do not change it."""
    return zlib.crc32(key.encode()) * 0x9E3779B97F4A7C15 & _MASK


def fraction(seed: int, stream: int) -> float:
    """A number on 0..1, never 1, drawn from *seed* in *stream*."""
    return (mix(seed, stream) >> 11) * 2.0**-53


def mix(seed: int, stream: int) -> int:
    """64 well mixed bits of *seed* in *stream* (the finaliser of splitmix64)."""
    x = (seed ^ stream) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31

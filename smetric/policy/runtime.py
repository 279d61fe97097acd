"""What compiled policies call: the parts that gain nothing from being written out in each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smetric.policy.seed import mix
from smetric.policy.snapshot import Snapshot


def drawn(tied: Sequence[int], ids: Sequence[str], seed: int, stream: int) -> int:
    """One of *tied*, which are indices into *ids*, at random; the order of the candidates plays no part."""
    if len(tied) == 1:
        return tied[0]
    in_order = sorted([ids[i] for i in tied])
    return ids.index(in_order[mix(seed, stream) % len(in_order)])


def rotated(tied: Sequence[int], ids: Sequence[str], last: str) -> int:
    """The first of *tied*, which are indices into *ids*, after *last* in order of ids, around the end."""
    if len(tied) == 1:
        return tied[0]
    names = [ids[i] for i in tied]
    later = [name for name in names if name > last]
    return ids.index(min(later or names))


def norm(values: Sequence[float], over: Sequence[float]) -> list[float]:
    """Min-max of *values* on the range of *over*; 0 for all when that range is empty."""
    low, high = min(over), max(over)
    if low == high:
        return [0.0] * len(values)
    width = high - low
    return [(value - low) / width for value in values]


def known(snapshot: Snapshot, features: Iterable[str]) -> list[bool]:
    """Per candidate, whether all *features* are known."""
    cells = [True] * len(snapshot.ids)
    for feature in features:
        cells = [a and b for a, b in zip(cells, snapshot.is_known(feature), strict=True)]
    return cells


def age(snapshot: Snapshot, features: Iterable[str]) -> list[float]:
    """Per candidate, the age in seconds of the oldest of *features*."""
    cells = [0.0] * len(snapshot.ids)
    for feature in features:
        cells = [max(a, b) for a, b in zip(cells, snapshot.age(feature), strict=True)]
    return cells

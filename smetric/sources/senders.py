"""Which sidecars tell placements, and whether any of it is missing: by the numbers of what comes, and by silence.

What they tell is in `placement.py`; what follows when something is missing is in `peers.py`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

#: Senders remembered; each restart of a sidecar is a new one.
MAX_SENDERS = 1024
#: Seconds of silence after which a sender is gone, and places nothing any more.
GONE_S = 600.0


@dataclass(slots=True)
class _Sender:
    next_number: int
    heard_at: float
    is_silent: bool = False


class Senders:
    """Those that were heard, the one heard longest ago first.

    A sender counts its batches from 0, sends one at least every heartbeat, and says which is its last.

    Args:
        silence_s: seconds without a batch after which those that should have come count as missing.
        clock: monotonic seconds.
    """

    def __init__(self, *, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._senders: OrderedDict[str, _Sender] = OrderedDict()

    def heard(self, sender: str, number: int, *, is_last: bool) -> bool:
        """Batch *number* of *sender* is here; returns whether one before it is missing."""
        known = self._senders.pop(sender, None)
        expected = known.next_number if known is not None else 0
        if not is_last:
            self._senders[sender] = _Sender(max(expected, number + 1), self._clock())
            if len(self._senders) > MAX_SENDERS:
                self._senders.popitem(last=False)
        return number > expected

    def fallen_silent(self) -> list[str]:
        """Senders whose silence was not noticed before."""
        fallen = []
        for name, sender in self._silent():
            if not sender.is_silent:
                sender.is_silent = True
                fallen.append(name)
        return fallen

    def heard_now(self) -> int:
        """How many are heard, and have not ended."""
        silent = len(self._silent())
        return len(self._senders) - silent

    def is_any_silent(self) -> bool:
        """Whether somebody who may still place something is not heard."""
        return bool(self._silent())

    def _silent(self) -> list[tuple[str, _Sender]]:
        """Those not heard for `silence_s`; who is not heard for `GONE_S` is forgotten."""
        now = self._clock()
        silent = []
        for name, sender in list(self._senders.items()):
            if now - sender.heard_at < self._silence_s:
                break
            if now - sender.heard_at >= GONE_S:
                del self._senders[name]
            else:
                silent.append((name, sender))
        return silent

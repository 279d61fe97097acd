"""What has happened since somebody last looked: decisions made and requests ended. Cheap to tell, bounded to keep."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord

#: Records of each kind that are kept until the next look, which is within a second.
MOST = 8192


class Activity:
    """Collects records between two looks.

    Args:
        most: how many of each kind; of more the latest.
    """

    def __init__(self, most: int = MOST) -> None:
        self._decided: deque[DecisionRecord] = deque(maxlen=most)
        self._ended: deque[DecisionRecord] = deque(maxlen=most)
        #: A decision was made, a request ended: called for every request.
        self.decided = self._decided.append
        self.ended = self._ended.append

    def take(self) -> tuple[list[DecisionRecord], list[DecisionRecord]]:
        """Decisions made and requests ended since the last call, oldest first."""
        taken = list(self._decided), list(self._ended)
        self._decided.clear()
        self._ended.clear()
        return taken

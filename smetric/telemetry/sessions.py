"""Where each conversation was served last: for telemetry alone, no decision rests on it.

Bounded; hashes only. How a prompt is hashed is in `smetric.reading.prompt`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from smetric.telemetry import names
from smetric.telemetry.series import Counts

if TYPE_CHECKING:
    from smetric.request import InferenceRequest

#: Places remembered, by prompt and by session, 3 MB of them; the one that was served longest ago goes first.
MOST = 1 << 14


class Sessions:
    """Remembers them, and counts whether later turns stay.

    A conversation goes on from the request whose whole prompt is its own up to the last assistant turn, whose place it
    then takes; where a client has edited its history, from the last request of the session that a header names.

    Args:
        most: places remembered.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._places: OrderedDict[int, str] = OrderedDict()
        self.turns = Counts(names.SESSION_TURNS)

    def __len__(self) -> int:
        return len(self._places)

    def last(self, request: InferenceRequest) -> str | None:
        """The id of the instance that served the turn before *request*; None for a first turn, or if not known."""
        if not request.turn:
            return None
        prompt = request.prompt
        found = None
        if prompt is not None and (question := prompt.hashes.question):
            found = self._places.get(question)
        if found is None and request.session:
            found = self._places.get(hash(request.session))
        return found

    def served(self, request: InferenceRequest, instance: str, policy: str) -> None:
        """*instance* has begun to answer *request*, which *policy* sent there."""
        prompt, session, places = request.prompt, request.session, self._places
        hashes = prompt.hashes if prompt is not None and prompt.is_hashed else None
        if request.turn:
            last = places.pop(hashes.question, None) if hashes is not None else None
            if last is None and session:
                last = places.get(hash(session))
            if last is not None:
                same = names.SAME_INSTANCE if last == instance else names.OTHER_INSTANCE
                self.turns.series[policy, same].value += 1
        if session:
            self._remember(hash(session), instance)
        if hashes is not None:
            self._remember(hashes.whole, instance)

    def _remember(self, key: int, instance: str) -> None:
        places = self._places
        places[key] = instance
        places.move_to_end(key)
        if len(places) > self._most:
            places.popitem(last=False)

"""The last decisions in memory, as lines of a record: what can be asked of a record can be asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from smetric.policy import Policy
from smetric.records.line import DecisionLine, PolicyLine
from smetric.records.reader import Recorded
from smetric.records.recorder import Recorder

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord

_decision = msgspec.json.Decoder(DecisionLine).decode
_policy = msgspec.json.Decoder(PolicyLine).decode


class _Last:
    """Keeps the last line that was put, and the policies before them."""

    def __init__(self) -> None:
        self.policies: dict[int, PolicyLine] = {}
        self._line: Recorded | None = None

    def put(self, key: int, preamble: bytes, line: bytes) -> None:
        if key not in self.policies:
            self.policies[key] = _policy(preamble)
        self._line = Recorded(_decision(line), self.policies[key])

    def spoilt(self) -> int | None:
        return 0

    def take(self) -> Recorded | None:
        """The line; once."""
        line, self._line = self._line, None
        return line


def recorded(records: Sequence[DecisionRecord], observed: Sequence[Policy]) -> Iterator[Recorded]:
    """*records* as a record would have them, with what *observed* policies read of requests.

    A record goes through its text and back, so that nothing here can be decided otherwise than it would be from a file.
    """
    last = _Last()
    recorder = Recorder(last, observed)
    for record in records:
        recorder.ended(record)
        line = last.take()
        if line is not None:
            yield line

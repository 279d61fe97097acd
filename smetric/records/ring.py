"""The last decisions in memory, as a record would have them: what can be asked of a record can be asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from smetric.policy import Policy
from smetric.records.line import DecisionLine, PolicyLine
from smetric.records.reader import Recorded
from smetric.records.recorder import Recorder, header

if TYPE_CHECKING:
    from smetric.telemetry.record import DecisionRecord

_decision = msgspec.json.Decoder(DecisionLine).decode
_policy = msgspec.json.Decoder(PolicyLine).decode


class _Last:
    """Takes the lines of a recorder and keeps the last."""

    def __init__(self) -> None:
        self._line: tuple[int, bytes, bytes] | None = None

    def put(self, key: int, preamble: bytes, line: bytes) -> None:
        self._line = key, preamble, line

    def spoilt(self) -> int | None:
        return 0

    def take(self) -> tuple[int, bytes, bytes] | None:
        """Number and line of the policy, and the decision's line; once."""
        line, self._line = self._line, None
        return line


def recorded(records: Sequence[DecisionRecord], observed: Sequence[Policy]) -> Iterator[Recorded]:
    """*records* as a record would have them, with what *observed* policies read of requests.

    A record goes through its text and back, so that nothing here can be decided otherwise than it would be from a file.
    """
    last = _Last()
    recorder = Recorder(last, observed)
    policies: dict[int, PolicyLine] = {}
    for record in records:
        recorder.ended(record)
        taken = last.take()
        if taken is not None:
            key, policy, line = taken
            if key not in policies:
                policies[key] = _policy(policy)
            yield Recorded(_decision(line), policies[key])


def alone(record: DecisionRecord) -> bytes | None:
    """*record* by itself as JSON, for `smetric.records.reader.read_alone`; None where it cannot be written down."""
    last = _Last()
    Recorder(last).ended(record)
    taken = last.take()
    return b'{"header":%b,"policy":%b,"decision":%b}' % (header(), *taken[1:]) if taken is not None else None

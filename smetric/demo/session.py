"""The shapes of the recorded sessions that the demo replays: how long, how much, in what rhythm; never what was said.

Where they come from is in `data/README.md`; how a shape becomes requests is in `smetric.demo.dialect`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

_FILE = Path(__file__).parent / "data" / "sessions.jsonl"


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a session.

    Args:
        new: tokens the user or a tool adds.
        output: tokens of the reply.
        gap_s: seconds between the reply before and this request.
    """

    new: int
    output: int
    gap_s: float


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One agent's session.

    Args:
        id: its name in the source.
        tools: tokens of the tool definitions. Sessions with the same number have the same tools.
        system: tokens of the system prompt; the same where both numbers are.
        turns: its requests, the first one included.
    """

    id: str
    tools: int
    system: int
    turns: tuple[Turn, ...]


_DECODER = msgspec.json.Decoder(Session)


def load_sessions() -> list[Session]:
    """All sessions of the extract, in its order."""
    return [_DECODER.decode(line) for line in _FILE.read_bytes().splitlines()]

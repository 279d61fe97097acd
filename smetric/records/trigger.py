"""What made a client send a request: a person, an agent that has run its tools, or the compaction of a session.

Judged by the last message alone (the paper's Figure 7 tells the same three apart). Its text is looked at and not kept.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from smetric.reading.parts import Kind

#: With what agents ask for a summary of the session: Claude Code and Cline, Codex, OpenCode, Gemini CLI.
_COMPACTIONS = (
    b"create a detailed summary of the conversation",
    b"CONTEXT CHECKPOINT COMPACTION",
    b"detailed prompt for continuing our conversation",
    b"<state_snapshot>",
)


class Trigger(enum.Enum):
    """Who or what sent a request."""

    USER = "user"
    #: The results of tools came back.
    AGENT = "agent"
    #: The agent has its context summarised.
    COMPACTION = "compaction"


def trigger_of(last: Iterable[tuple[Kind, bytes]]) -> Trigger:
    """What *last*, the parts of a request's last message with the beginning of each one's text, was sent for."""
    trigger = Trigger.USER
    for kind, text in last:
        if kind is Kind.TOOL_RESULT:
            trigger = Trigger.AGENT
        elif any(phrase in text for phrase in _COMPACTIONS):
            return Trigger.COMPACTION
    return trigger

"""One sequence an engine generates; tokens themselves never appear: it is its lengths and the names of its blocks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class State(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(eq=False, slots=True)
class SequenceRequest:
    """One sequence to generate, and how far it has come.

    Args:
        prompt_len: tokens of the prompt, at least 1.
        output_len: tokens to generate, at least 1.
        keys: names of the full blocks of prompt and output together, as far as they are known; blocks beyond are
            computed but never shared.
    """

    prompt_len: int
    output_len: int
    keys: Sequence[int] = ()

    state: State = State.WAITING
    #: Output tokens generated so far.
    emitted: int = 0
    #: Prompt tokens that were in the cache when it was first admitted; None while it waits.
    hit_len: int | None = None
    #: Model time of events, seconds; None until they happen.
    arrived_s: float = 0.0
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    preemptions: int = 0

    # Tokens whose KV is computed, blocks held, and how many of those are committed under a key.
    _computed: int = 0
    _blocks: int = 0
    _committed: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in (State.FINISHED, State.ABORTED)

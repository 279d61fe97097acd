"""The one protocol by which sources get a prompt's token ids; nothing that tokenises is here."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Protocol

from smetric.request import InferenceRequest


class TokenIds(Protocol):
    """Knows the token ids of prompts."""

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        """Ids of the request's first prompt exactly as its engine will see them; None where that is not known."""

    def begin(self, request: InferenceRequest) -> Awaitable[Sequence[int] | None] | None:
        """The same for whoever needs them after the decision: begun at once, while the request's body is there.

        The request's lengths stay as the decision saw them. None where it is clear that there will be no ids.
        """

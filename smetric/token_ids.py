"""The one protocol by which sources get a prompt's token ids; nothing that tokenises is here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from smetric.request import InferenceRequest


class TokenIds(Protocol):
    """Knows the token ids of prompts."""

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        """Ids of the request's first prompt exactly as its engine will see them; None where that is not known."""

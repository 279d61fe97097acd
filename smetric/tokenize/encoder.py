"""The protocol behind which the ways to tokenise stand."""

from __future__ import annotations

from array import array
from typing import Protocol

from smetric.tokenize.chat import Chat, NotTokenised, Text


class Unavailable(NotTokenised):
    """Nobody could tokenise it now; that says nothing of the prompt."""

    result = "unavailable"


class Encoder(Protocol):
    """Tokenises as a model's engine does."""

    async def start(self) -> None:
        """Open what encoding needs."""

    async def stop(self) -> None:
        """Close it."""

    async def encode(self, model: str, prompt: Text | Chat, size: int) -> array[int]:
        """The ids of *prompt*, 32-bit unsigned.

        Args:
            model: as the engines know it.
            prompt: what is to be encoded.
            size: bytes of the body it came in, which tell a long prompt from a short one.

        Raises:
            NotTokenised: they cannot be had.
        """

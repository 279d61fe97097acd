"""Moved."""

from __future__ import annotations

from msgspec import Struct


class Usage(Struct, frozen=True):
    """Tokens as the instance counted them; None where it did not say.

    Args:
        prompt_tokens: of the prompt.
        completion_tokens: generated.
        cached_tokens: of the prompt, found in a cache.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

"""Kinds of clients, from a closed list, by the product that a User-Agent begins with."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

#: What every client becomes that is not in the list, and one that does not say.
OTHER = "other"
#: Beginnings of User-Agents, in lower case; the first that fits.
_PRODUCTS: tuple[tuple[bytes, str], ...] = (
    (b"claude-cli", "claude-code"),
    (b"claude-code", "claude-code"),
    (b"codex", "codex"),
    (b"opencode", "opencode"),
    (b"aider", "aider"),
    (b"cline", "cline"),
    (b"cursor", "cursor"),
    (b"qwencode", "qwen-code"),
    (b"geminicli", "gemini-cli"),
    (b"litellm", "litellm"),
    (b"langchain", "langchain"),
    (b"openai/", "openai-sdk"),
    (b"asyncopenai/", "openai-sdk"),
    (b"anthropic/", "anthropic-sdk"),
    (b"asyncanthropic/", "anthropic-sdk"),
    (b"ai-sdk", "ai-sdk"),
    (b"ai/", "ai-sdk"),
    (b"python-httpx", "python"),
    (b"python-requests", "python"),
    (b"python/", "python"),
    (b"curl/", "curl"),
)
#: All kinds there are.
KINDS = (*dict.fromkeys(kind for _, kind in _PRODUCTS), OTHER)


def client_kind(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """One of `KINDS` for a request with these *headers*, whose names are in lower case."""
    for name, value in headers:
        if name == b"user-agent":
            return _kind_of(value[:32])
    return OTHER


@lru_cache(1024)
def _kind_of(product: bytes) -> str:
    """Most requests come from a few kinds of clients."""
    product = product.lower()
    return next((kind for beginning, kind in _PRODUCTS if product.startswith(beginning)), OTHER)

"""Text that comes from a client, before it stands in a span, a log line or a record."""

from __future__ import annotations

#: Characters of a value that comes from a client.
CLIENT_TEXT_MAX = 256


def safe(text: str) -> str:
    """*text* bounded, with control characters escaped: it may come from a client."""
    if len(text) <= CLIENT_TEXT_MAX and text.isprintable():
        return text
    text = text[: CLIENT_TEXT_MAX + 1]
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= CLIENT_TEXT_MAX else text[: CLIENT_TEXT_MAX - 1] + "…"

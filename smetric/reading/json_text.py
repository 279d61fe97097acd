"""The text of a JSON string as prompts are hashed and measured: escaped as in JSON, but each text in one way only.

Most bodies are written that way already, so that a text is a slice of its body: nothing is decoded, nothing copied.
Which texts a prompt is made of is in `conversation.py`.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

#: A piece of rendered text.
Text = bytes | memoryview

#: An escape for what can be written without one, or with another. One that is itself escaped looks the same.
CHOSEN_ESCAPE = re.compile(rb"\\[u/]")

_QUOTE = ord('"')
_STRING = msgspec.json.Decoder(str)
_ENCODE = msgspec.json.Encoder().encode


def text_of(value: Raw, is_plain: bool) -> Text:
    """The text of *value*, without the quotes around it; a value that is no string stands for itself.

    Args:
        value: JSON text.
        is_plain: whether there is no choice of escapes in *value*, as `screening.py` says.
    """
    text = memoryview(value)
    if text[0] != _QUOTE:
        return text
    if is_plain or CHOSEN_ESCAPE.search(text) is None:
        return text[1:-1]
    return escaped(_STRING.decode(value))


def escaped(text: str) -> bytes:
    """*text* as it stands between the quotes of a JSON string, with no escape that could be left out."""
    return _ENCODE(text)[1:-1]

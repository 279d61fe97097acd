"""Stand-ins for strings of a request that must not be written down: session ids, tenants, request ids.

A stand-in is `#` and the 64-bit key of the string in hex. What depends on a string's key alone, as `hrw` and `bucket`
do, comes out alike for both, because the key of a stand-in is the key it shows.
"""

from __future__ import annotations

import hashlib
import re

_STAND_IN = re.compile(r"#[0-9a-f]{16}\Z")


def key_of(text: str) -> int:
    """64 bits that stand for *text*, the same in every process and version."""
    if text.startswith("#") and _STAND_IN.match(text):
        return int(text[1:], 16)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


def pseudonym(text: str) -> str:
    """What stands for *text*; the empty string for itself."""
    return f"#{key_of(text):016x}" if text else ""

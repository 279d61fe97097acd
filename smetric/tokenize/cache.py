"""Encodes text segment by segment and remembers the segments, so that a follow-up turn encodes only what is new.

A tokenizer finds its special tokens in the text first, and encodes what lies between two of them by itself: no merge
reaches across. So the ids of a text are the ids of its segments, one after the other, if every segment but the first
begins with a special token (a segment that starts in the middle of a text is encoded otherwise than one at its
beginning by some tokenizers, and the special token in front keeps it in the middle). Segments are looked up by a
cryptographic hash of their text: the same system prompt is encoded once for all sessions. Where a tokenizer has tokens
that look at their neighbours, no cuts are made at those; a probe at start compares both ways, and texts are encoded
whole if they differ. Chat templates are in `template.py`.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Iterator
from hashlib import blake2b

from cachetools import LRUCache
from tokenizers import AddedToken, Tokenizer

#: What an entry takes besides its ids, in bytes: key, array, node of the list.
ENTRY_BYTES = 300


class CachedTokenizer:
    """A tokenizer that remembers segments. Safe in several threads.

    Args:
        tokenizer: as loaded from `tokenizer.json`; its truncation and padding are switched off.
        max_bytes: memory of the remembered segments.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_bytes: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._known: LRUCache[bytes, array[int]] = LRUCache(max_bytes, getsizeof=_size)
        self._lock = threading.Lock()
        self._specials, self._cuts = _pattern(list(tokenizer.get_added_tokens_decoder().values()))
        self._around = self._find_around()
        if self._cuts and not self._segments_agree():
            self._cuts = frozenset()

    @property
    def remembers(self) -> bool:
        """Whether segments are remembered; some tokenizers do not allow that."""
        return bool(self._cuts)

    @property
    def memory_bytes(self) -> int:
        """What the remembered segments take."""
        return int(self._known.currsize)

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """The ids of *text*."""
        if add_special_tokens and self._around is None:
            return array("I", self._tokenizer.encode(text, add_special_tokens=True).ids)
        before, after = self._around if add_special_tokens and self._around else ([], [])
        ids = array("I", before)
        for segment in self._encode_segments(list(self._segments(text))):
            ids.extend(segment)
        ids.extend(after)
        return ids

    def _segments(self, text: str) -> Iterator[str]:
        """*text* cut before every special token that allows it."""
        start = 0
        if self._cuts:
            for match in self._specials.finditer(text):
                if match[0] in self._cuts and match.start() > start:
                    yield text[start : match.start()]
                    start = match.start()
        if start < len(text):
            yield text[start:]

    def _encode_segments(self, segments: list[str]) -> list[array[int]]:
        keys = [blake2b(segment.encode(), digest_size=16).digest() for segment in segments]
        found: dict[bytes, array[int]] = {}
        with self._lock:
            for key in keys:
                ids = self._known.get(key)
                if ids is not None:
                    found[key] = ids
        missing = {key: segment for key, segment in zip(keys, segments, strict=True) if key not in found}
        if missing:
            encoded = self._tokenizer.encode_batch_fast(list(missing.values()), add_special_tokens=False)
            for key, one in zip(missing, encoded, strict=True):
                found[key] = array("I", one.ids)
            with self._lock:
                for key in missing:
                    if _size(found[key]) <= self._known.maxsize:
                        self._known[key] = found[key]
        return [found[key] for key in keys]

    def _find_around(self) -> tuple[list[int], list[int]] | None:
        """The ids that the tokenizer adds before and after a text; None if they depend on it."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for at in range(len(full) - len(plain) + 1):
            if plain and full[at : at + len(plain)] == plain:
                return full[:at], full[at + len(plain) :]
        return None

    def _segments_agree(self) -> bool:
        """Whether a text with all special tokens has the same ids whole and in segments."""
        fillers = ("user\n Hello,  world ", "\n", " é", "a", "")
        probe = "start " + "".join(cut + fillers[i % len(fillers)] for i, cut in enumerate(sorted(self._cuts) * 2))
        whole = self._tokenizer.encode(probe, add_special_tokens=False).ids
        parts = self._tokenizer.encode_batch_fast(list(self._segments(probe)), add_special_tokens=False)
        return whole == [id for part in parts for id in part.ids]


def _pattern(added: list[AddedToken]) -> tuple[re.Pattern[str], frozenset[str]]:
    """What finds the tokens as the tokenizer does (leftmost, then longest), and those before which text may be cut.

    Tokens found only after normalisation play no part: they are looked for between the others.
    """
    tokens = [token for token in added if not token.normalized and token.content]
    # A token that must stand alone looks at its neighbours, wherever the others are cut.
    if any(token.single_word for token in tokens):
        tokens = []
    words = sorted((token.content for token in tokens), key=len, reverse=True)
    cuts = frozenset(
        token.content
        for token in tokens
        if not (token.lstrip or token.rstrip) and token.content == token.content.strip()
    )
    return re.compile("|".join(map(re.escape, words)) or r"(?!)"), cuts


def _size(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + ENTRY_BYTES

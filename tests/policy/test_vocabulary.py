"""Pseudonyms of texts that must not be written down."""

from __future__ import annotations

from smetric.policy.builtin import bucket, hrw
from smetric.policy.vocabulary import key_of, pseudonym


def test_pseudonym_has_the_key_of_its_text() -> None:
    for text in ("a", "session 7", "#not-one", "\ud800", "ä" * 500):
        assert key_of(pseudonym(text)) == key_of(text)
        assert pseudonym(pseudonym(text)) == pseudonym(text)
    assert pseudonym("") == ""
    assert len({pseudonym(str(i)) for i in range(1000)}) == 1000


def test_pseudonym_is_placed_as_its_text() -> None:
    ids = [f"gpu-{i}" for i in range(8)]
    for text in ("session-1", "a tenant"):
        assert hrw(pseudonym(text), ids, 7) == hrw(text, ids, 7)
        assert bucket(pseudonym(text), 7) == bucket(text, 7)

"""What an emulated engine answers: filler words, the same ones for the same prompt, seed and choice."""

from __future__ import annotations

from random import Random

from xxhash import xxh3_64_intdigest

#: Words of three letters: with a space before it each is four bytes, hence one token wherever the reply is read again.
_LETTERS = (
    "theonetwosixtennewoldbignowandbutfornotcanmayhashadwasareallanyfew"
    "itsourherhissheyouwhohowwhyoutoffrunsetgetputletseesayasktryusefix"
    "addmapkeyrowlogbitendtoplowred"
)
_TOKENS = [f" {_LETTERS[at : at + 3]}" for at in range(0, len(_LETTERS), 3)]

#: Tokens of a reply that nobody limits: from the first to the sum of both, by the prompt.
SHORTEST, SPREAD = 64, 192


def digest(prompt: bytes, seed: int | None, index: int) -> int:
    """A number that stands for this prompt, seed and choice."""
    return xxh3_64_intdigest(b"%d:%d:" % (seed or 0, index) + prompt)


def natural_length(key: int) -> int:
    """Tokens after which the reply ends by itself."""
    return SHORTEST + key % (SPREAD + 1)


def text(key: int, tokens: int) -> str:
    """A reply of exactly *tokens* tokens, four ASCII bytes each."""
    return "".join(Random(key).choices(_TOKENS, k=tokens))

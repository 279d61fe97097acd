"""Words of a statement with the comments between them, and the spaces that belong between words.

Where lines break is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smetric.policy.lexer import CLOSERS, OPENERS, OPERAND_ENDS
from smetric.policy.parser import tokens_of
from smetric.policy.token import Token

#: What `-` is called where it is a sign and no subtraction.
SIGN = "SIGN"
#: No space stands behind these, and none before those.
_GLUES_RIGHT = frozenset({*OPENERS, "DOT", "RANGE", SIGN})
_GLUES_LEFT = frozenset({*CLOSERS, "COMMA", "COLON", "DOT", "RANGE", "LSQB"})


@dataclass(frozen=True, slots=True)
class Comment:
    """One comment, from its `#` on. `own_line` is false where it ends a line of code."""

    text: str
    own_line: bool


@dataclass(slots=True)
class Word:
    """A token, and the comments between it and the next one of its statement."""

    type: str
    text: str
    comments: list[Comment] = field(default_factory=list)


def words_of(tokens: Sequence[Token], text: str) -> list[Word]:
    """The words of one statement of *text*. Comments behind its last token are not the statement's."""
    words: list[Word] = []
    for token in tokens:
        sign = token.type == "MINUS" and (not words or words[-1].type not in OPERAND_ENDS)
        words.append(Word(SIGN if sign else token.type, str(token)))
    for word, token, following in zip(words, tokens, tokens[1:], strict=False):
        lines = [line.strip() for line in text[token.end : following.start].split("\n")]
        word.comments = [Comment(line, at > 0) for at, line in enumerate(lines) if line]
    return words


def space_between(previous: Word | None, word: Word) -> str:
    """What stands between two neighbours on one line; nothing before the first of all."""
    if previous is None or previous.type in _GLUES_RIGHT or word.type in _GLUES_LEFT:
        return ""
    return "" if word.type == "LPAR" and previous.type == "NAME" else " "  # a call


def spaced(words: Sequence[Word]) -> str:
    """The words on one line, without their comments."""
    return "".join(space_between(before, word) + word.text for before, word in zip((None, *words), words, strict=False))


def spaced_text(text: str) -> str:
    """A piece of policy text on one line, without its comments; empty where it holds what no policy may."""
    found = tokens_of(text)
    return "" if found.errors else spaced(words_of(found.tokens, text))


def commented(words: Sequence[Word]) -> bool:
    """Whether a comment stands between two of the words."""
    return any(word.comments for word in words[:-1])


def outside_brackets(words: Sequence[Word]) -> Iterator[tuple[int, Word]]:
    """The words that stand in no bracket, brackets themselves left out, with their places."""
    depth = 0
    for place, word in enumerate(words):
        depth -= word.type in CLOSERS
        if not depth and word.type not in OPENERS and word.type not in CLOSERS:
            yield place, word
        depth += word.type in OPENERS


def split_at(words: Sequence[Word], places: Sequence[int]) -> list[Sequence[Word]]:
    """The words cut before each of the places; the first piece may be empty."""
    return [words[start:end] for start, end in zip((0, *places), (*places, len(words)), strict=True)]

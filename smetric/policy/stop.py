"""Where a parse stopped: the token nobody expected, what stands around it, and the words that say so.

What it means is told in `syntax_error` and `case_error`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smetric.policy.diagnostic import Diagnostic, clip
from smetric.policy.lexer import same_line
from smetric.policy.token import Token


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a parse stopped: `place` in `tokens` (their length at the end), and the terminals that would do there."""

    tokens: Sequence[Token]
    place: int
    accepted: frozenset[str]

    @property
    def token(self) -> Token | None:
        """The token nobody expected; None at the end of the statement."""
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    @property
    def previous(self) -> Token | None:
        """The token before it."""
        return self.tokens[self.place - 1] if self.place else None

    @property
    def following(self) -> Token | None:
        """The token behind it."""
        return self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else None

    @property
    def starts_line(self) -> bool:
        """Whether the token is the first on its line and could be meant as a statement."""
        return self.token is not None and self.previous is not None and not same_line(self.previous, self.token)

    @property
    def in_test(self) -> bool:
        """Whether the statement is a test block."""
        return self.tokens[0].type == "TEST"


def unexpected(token: Token, help_text: str) -> Diagnostic:
    """That *token* stands where it cannot."""
    return Diagnostic("syntax", f"did not expect `{clip(token)}` here", token.span, help_text)

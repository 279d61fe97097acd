"""Where a parse stopped: the token nobody expected, what stands around it, and the words that say so.

What it means is told in `syntax_error` and `case_error`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smetric.policy.diagnostic import Diagnostic, clip
from smetric.policy.token import END, Token


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a parse stopped: `place` in `tokens` (their length at the end), and the terminals that would do there.

    It is never the first place: a statement starts with its keyword.
    """

    tokens: Sequence[Token]
    place: int
    accepted: frozenset[str]

    @property
    def token(self) -> Token:
        """The token nobody expected; `END` at the end of the statement."""
        return self.tokens[self.place] if self.place < len(self.tokens) else END

    @property
    def before(self) -> Sequence[Token]:
        """The tokens before it."""
        return self.tokens[: self.place]

    @property
    def previous(self) -> Token:
        """The token before it."""
        return self.tokens[self.place - 1]

    @property
    def second_last(self) -> Token:
        """The token before the previous one; `END` where there is none."""
        return self.tokens[self.place - 2] if self.place > 1 else END

    @property
    def following(self) -> Token:
        """The token behind it; `END` where there is none."""
        return self.tokens[self.place + 1] if self.place + 1 < len(self.tokens) else END

    @property
    def in_test(self) -> bool:
        """Whether the statement is a test block."""
        return self.tokens[0].type == "TEST"


def unexpected(token: Token, help_text: str) -> Diagnostic:
    """That *token* stands where it cannot."""
    return Diagnostic("syntax", f"did not expect `{clip(token)}` here", token.span, help_text)

"""Words and marks of a policy text, divided by the terminals of the grammar: as Lark does it, in a third of the time.

What is wrong with a text that they do not cover is the lexer's business.
"""

from __future__ import annotations

import re

from lark import Lark

from smetric.policy.span import Span


class Token(str):
    """One word or mark: its text.

    Args:
        type: the terminal that it is.
        start: where it stands in the text.
        line: its line, from 0.
    """

    __slots__ = ("line", "start", "type")

    type: str
    start: int
    line: int

    def __new__(cls, text: str, type: str, start: int, line: int) -> Token:
        """A token; `str` takes the text alone."""
        made = super().__new__(cls, text)
        made.type, made.start, made.line = type, start, line
        return made

    @property
    def end(self) -> int:
        """Where the text goes on."""
        return self.start + len(self)

    @property
    def span(self) -> Span:
        """Its place."""
        return Span(self.start, self.start + len(self))


#: What Lark puts behind the last token; it stands where there is none.
END = Token("", "$END", 0, 0)


class Scanner:
    """Divides texts by the terminals of a grammar, the longest pattern of the highest priority first, as Lark does.

    Args:
        lark: the grammar.
    """

    def __init__(self, lark: Lark) -> None:
        patterns = {terminal.name: terminal.pattern for terminal in lark.terminals}
        #: Terminals that a text may spell as a name does: they are told from names once one is found.
        self._words = {
            pattern.value: name
            for name, pattern in patterns.items()
            if pattern.type == "str" and re.fullmatch(patterns["NAME"].value, pattern.value)
        }
        ordered = sorted(
            (each for each in lark.terminals if each.name not in {*self._words.values(), *lark.ignore_tokens}),
            key=lambda each: (-each.priority, -each.pattern.max_width, -len(each.pattern.value), each.name),
        )
        ignored = "|".join(patterns[name].to_regexp() for name in lark.ignore_tokens)
        told = "|".join(f"(?P<{each.name}>{each.pattern.to_regexp()})" for each in ordered)
        # Possessive: what is ignored is never tried in a second way.
        self._gap = re.compile(f"(?:{ignored})*+")
        self._next = re.compile(f"(?:{ignored})*+(?:{told})")

    def scan(self, text: str, start: int) -> tuple[list[Token], int]:
        """The tokens of *text* from *start* on, and where they end: the end of the text, or what is no token."""
        tokens: list[Token] = []
        match, words = self._next.match, self._words
        line, seen = text.count("\n", 0, start), start
        while found := match(text, start):
            kind = found.lastgroup or ""
            begin, start = found.span(kind)
            value = text[begin:start]
            line += text.count("\n", seen, begin)
            seen = begin
            tokens.append(Token(value, words.get(value, kind) if kind == "NAME" else kind, begin, line))
        gap = self._gap.match(text, start)
        return tokens, gap.end() if gap else start

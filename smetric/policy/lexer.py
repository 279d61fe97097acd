"""Policy text to tokens, with every lexical error, the bounds on nesting, and the cuts between statements.

The terminals are the grammar's; what their order means is the parser's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from smetric.policy.builder import magnitude
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, clip, quote
from smetric.policy.span import Span
from smetric.policy.token import Scanner, Token
from smetric.policy.vocabulary import LARGEST

#: Brackets, `not`s and signs that may be open at once.
MAX_NESTING = 32
#: Characters of a name.
MAX_NAME = 64

STATEMENTS = ("use", "param", "let", "def", "keep", "prefer", "route", "reject", "hold", "test")
HEADERS = ("policy", "library")
_CUTS = frozenset(word.upper() for word in (*HEADERS, *STATEMENTS))
#: A name must follow these, so a keyword behind one, on the same line, is a reserved word and no new statement.
BEFORE_NAMES = frozenset({"LET", "PARAM", "DEF", "AS", "POLICY", "LIBRARY", "USE", "DOT", "FAILING"})
OPENERS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
CLOSERS = frozenset(OPENERS.values())
#: Tokens that can end an operand; what follows one is no sign.
OPERAND_ENDS = frozenset({"NAME", "NUMBER", "DURATION", "STRING", "TRUE", "FALSE", *CLOSERS})

_HELP = {
    "!": "not equal is `!=`; negation is `not`",
    "&": "write `and`",
    "~": "negation is `not`",
    ";": "statements need no separator",
    "%": "shares are plain numbers: write 0.5 for 50%; there is no remainder",
    "^": "write a product: x * x",
    # As papers and word processors write them.
    "≤": "write `<=`",
    "≥": "write `>=`",
    "≠": "write `!=`",
    "−": "write `-`",
    "–": "write `-`",
    "×": "write `*`",
    "·": "write `*`",
    "÷": "write `/`",
    "\ufeff": "save the file as UTF-8 without a byte order mark",
}
#: Quotes of other languages and of word processors, and what closes each.
_QUOTES = {"'": "'", "‘": "’", "“": "”", "„": "“", "«": "»"}


@dataclass(slots=True)
class Piece:
    """The tokens of one statement; `broken` when an error inside it is already reported."""

    tokens: list[Token]
    broken: bool = False

    @property
    def word(self) -> str:
        """What it starts with."""
        return str(self.tokens[0])


@dataclass(slots=True)
class Tokens:
    """Everything the lexer found: tokens with absolute offsets, errors, and where text had to be skipped."""

    tokens: list[Token] = field(default_factory=list)
    errors: list[Diagnostic] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


def tokenize(scanner: Scanner, text: str) -> Tokens:
    """All tokens of *text*; what the terminals do not allow is reported and stepped over."""
    found = Tokens()
    place = 0
    while len(found.errors) <= MAX_DIAGNOSTICS:
        tokens, place = scanner.scan(text, place)
        found.tokens += tokens
        if place == len(text):
            break
        fault = _bad_text(text, place)
        found.errors.append(fault)
        found.skipped.append(place)
        place = fault.span.end
    for place, token in enumerate(found.tokens):
        fault_or_none = _bad_token(found.tokens, place, text)
        if fault_or_none is not None:
            found.errors.append(fault_or_none)
            if token.type == "DOT":
                found.skipped.append(token.start)
    return found


def cut(found: Tokens) -> list[Piece]:
    """Divide the tokens at statement keywords; the first piece holds whatever precedes the first keyword."""
    pieces: list[Piece] = []
    previous: Token | None = None
    for token in found.tokens:
        if not pieces or (token.type in _CUTS and not _holds_back(previous, token)):
            pieces.append(Piece([]))
        pieces[-1].tokens.append(token)
        previous = token
    starts = [piece.tokens[0].start for piece in pieces]
    for offset in found.skipped if pieces else ():
        pieces[max(0, bisect_right(starts, offset) - 1)].broken = True
    return pieces


def same_line(earlier: Token, later: Token) -> bool:
    """Whether both stand on one line of the text."""
    return earlier.line == later.line


def too_deep(tokens: Sequence[Token]) -> Token | None:
    """The token at which brackets, `not`s and signs nest deeper than `MAX_NESTING`, if they do."""
    prefixes = [0]
    previous = ""
    for token in tokens:
        if token.type in OPENERS:
            prefixes.append(0)
        elif token.type in CLOSERS:
            if len(prefixes) > 1:
                prefixes.pop()
            prefixes[-1] = 0
        elif token.type == "NOT" or (token.type == "MINUS" and previous not in OPERAND_ENDS):
            prefixes[-1] += 1
        elif token.type in OPERAND_ENDS:
            prefixes[-1] = 0
        if len(prefixes) - 1 + sum(prefixes) > MAX_NESTING:
            return token
        previous = token.type
    return None


def _holds_back(previous: Token | None, token: Token) -> bool:
    """Whether a statement keyword behind *previous* starts no statement."""
    if previous is None:
        return False
    if previous.type == "EXPECT" or (previous.type == "MINUS" and previous.end == token.start):  # as in my-policy
        return True
    return (previous.type in BEFORE_NAMES or previous.type in ("LPAR", "COMMA")) and same_line(previous, token)


def _bad_text(text: str, offset: int) -> Diagnostic:
    char = text[offset]
    if char == '"':
        end = text.find("\n", offset)
        end = len(text) if end < 0 else end
        span = Span(offset, offset + len(text[offset:end].rstrip()))
        return Diagnostic("unclosed-string", "this string is not closed", span, 'end it with `"` on the same line')
    end = offset + 1
    while end < len(text) and text[end] == char:
        end += 1
    help_text = _HELP.get(char, "")
    if char in _QUOTES:  # with what it quotes, or the quote behind that would be told of, too
        closing = text.find(_QUOTES[char], end)
        end = end if closing < 0 or "\n" in text[offset:closing] else closing + 1
        help_text = 'strings are written "…"'
    elif char.isalpha():
        while end < len(text) and (text[end].isalnum() or text[end] == "_"):
            end += 1  # the rest of the word
        help_text = "names have the letters a to z, digits and `_` only"
    shown = char if char.isprintable() else f"U+{ord(char):04X}"
    return Diagnostic("character", f"unexpected character `{shown}`", Span(offset, end), help_text)


def _bad_token(tokens: Sequence[Token], place: int, text: str) -> Diagnostic | None:
    token = tokens[place]
    span = token.span
    if token.type == "NAME" and len(token) > MAX_NAME:
        return Diagnostic("long-name", f"a name has at most {MAX_NAME} characters, this one {len(token)}", span)
    if token.type in ("NUMBER", "DURATION") and magnitude(token) > LARGEST:
        return Diagnostic("too-large", f"`{quote(text, span)}` is too large", span, "numbers are at most 1e15")
    if token.type == "DOT" and place + 1 < len(tokens) and tokens[place + 1].type == "NUMBER":
        follower = tokens[place + 1]
        if place and tokens[place - 1].type == "RANGE" and tokens[place - 1].end == span.start:
            return Diagnostic("syntax", "did not expect `.` here", span, "a range has two dots: `0..5`")
        if follower.start == span.end:
            return Diagnostic("bare-fraction", "a number starts with a digit", span, f"write `0.{clip(follower)}`")
    return None

"""Policy text to tokens: lexical errors, the cuts between statements, and the spaces between tokens."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import lark
from lark.exceptions import UnexpectedCharacters

from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, Span, clip, quote
from smetric.policy.vocabulary import LARGEST

#: Brackets, `not`s and signs that may be open at once.
MAX_NESTING = 32
#: Characters of a name.
MAX_NAME = 64

STATEMENTS = ("use", "param", "let", "def", "keep", "prefer", "route", "reject", "hold", "test")
HEADERS = ("policy", "library")
_CUTS = frozenset(word.upper() for word in (*HEADERS, *STATEMENTS))
#: A name must follow these. A keyword behind one, on the same line, is a reserved word and starts no statement.
BEFORE_NAMES = frozenset({"LET", "PARAM", "DEF", "AS", "POLICY", "LIBRARY", "USE", "DOT", "FAILING"})
OPENERS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
CLOSERS = frozenset(OPENERS.values())
#: Tokens that can end an operand. A `-` behind one of them is a subtraction, any other is a sign.
OPERAND_ENDS = frozenset({"NAME", "NUMBER", "DURATION", "STRING", "TRUE", "FALSE", *CLOSERS})
#: The type of a `-` that is a sign, where it matters.
SIGN = "SIGN"
#: No space follows these, and none precedes those.
_GLUES_RIGHT = frozenset({*OPENERS, "DOT", "RANGE", SIGN})
_GLUES_LEFT = frozenset({*CLOSERS, "COMMA", "COLON", "DOT", "RANGE", "LSQB"})

#: Tokens that an id without quotes in a test may consist of, as in gpu-6 and 10.0.0.1:8000; keywords too.
_ID_PARTS = frozenset({"NAME", "NUMBER", "DURATION", "MINUS", "DOT", "RANGE", "COLON", "SLASH"})

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_CHARACTER_HELP = {
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
#: Quotes of other languages and of word processors, with their counterparts.
_QUOTES = {"'": "'", "‘": "’", "“": "”", "„": "“", "«": "»"}

_PACKAGE = Path(__file__).resolve().parent.parent
#: An installed wheel holds the grammar in the package, a checkout beside it.
_GRAMMARS = (_PACKAGE / "_data" / "grammar" / "smetric.lark", _PACKAGE.parent / "grammar" / "smetric.lark")


def grammar_path() -> Path:
    """Return the place of the grammar file."""
    return next((path for path in _GRAMMARS if path.is_file()), _GRAMMARS[-1])


@functools.cache
def grammar() -> lark.Lark:
    """Return the grammar, which takes about 90 ms to build. It parses one statement at a time."""
    text = grammar_path().read_text("utf-8")
    return lark.Lark(text, parser="lalr", lexer="basic", start=["header", "item"], propagate_positions=True)


class Token(lark.Token):
    """Token of Lark whose place is always known."""

    __slots__ = ()

    @property
    def start(self) -> int:
        """Offset of its first character."""
        return self.start_pos or 0

    @property
    def end(self) -> int:
        """Offset behind its last character."""
        return self.end_pos or 0

    @property
    def span(self) -> Span:
        """Its place."""
        return Span(self.start, self.end)


#: The end of a statement, which has no place.
END = Token("$END", "")


@dataclass(slots=True)
class Tokens:
    """Tokens of a text, its lexical errors, and the offsets of the text that was skipped."""

    tokens: list[Token] = field(default_factory=list)
    errors: list[Diagnostic] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Piece:
    """The tokens of one statement; `broken` when an error inside it is already reported."""

    tokens: list[Token]
    broken: bool = False

    @property
    def word(self) -> str:
        """Its first word."""
        return str(self.tokens[0])

    @property
    def start(self) -> int:
        """Offset of its first token."""
        return self.tokens[0].start


def tokenize(text: str) -> Tokens:
    """Return the tokens of *text*. Text that is no token is reported and skipped."""
    found = Tokens()
    place = 0
    while place < len(text) and len(found.errors) <= MAX_DIAGNOSTICS:
        lines = text.count("\n", 0, place)  # Lark counts from where it starts
        rest = lark.TextSlice(text, place, len(text))
        lexer = grammar().parse_interactive(rest, start="item").lexer_thread  # `Lark.lex` builds one at each call
        try:
            for each in lexer.lex(None):  # type: ignore[no-untyped-call]
                token = Token.new_borrow_pos(each.type, str(each), each)
                token.line = lines + (each.line or 0)
                found.tokens.append(token)
            break
        except UnexpectedCharacters as stop:
            fault = _bad_text(text, stop.pos_in_stream)  # type: ignore[arg-type]  # declared as None
        found.errors.append(fault)
        found.skipped.append(fault.span.start)
        place = fault.span.end
    found.tokens = list(_with_ids(found.tokens))
    for at, token in enumerate(found.tokens):
        wrong = _bad_token(found.tokens, at, text)
        if wrong is not None:
            found.errors.append(wrong)
            if token.type == "DOT":
                found.skipped.append(token.start)
    return found


def cut(found: Tokens) -> list[Piece]:
    """Divide tokens at statement keywords. The first piece holds what precedes the first keyword."""
    pieces: list[Piece] = []
    previous: Token | None = None
    for token in found.tokens:
        if not pieces or (token.type in _CUTS and not _holds_back(previous, token)):
            pieces.append(Piece([]))
        pieces[-1].tokens.append(token)
        previous = token
    starts = [piece.start for piece in pieces]
    for offset in found.skipped if pieces else ():
        pieces[max(0, bisect_right(starts, offset) - 1)].broken = True
    return pieces


def _with_ids(tokens: Sequence[Token]) -> Iterator[Token]:
    """Yield *tokens*, in tests with one NAME for each id of an instance that consists of several of them."""
    in_test, place, before = False, 0, END
    while place < len(tokens):
        token, end = tokens[place], place + 1
        is_id = before.type in ("EXPECT", "OR") or not same_line(before, token)
        is_id |= before.type == "EQUAL" and place > 1 and tokens[place - 2] == "last"
        if in_test and is_id and token.type != "MINUS" and _is_id_part(token):
            while end < len(tokens) and tokens[end].start == tokens[end - 1].end and _is_id_part(tokens[end]):
                end += 1
        if end > place + 1:
            parts = tokens[place:end]
            token = Token("NAME", "".join(parts), token.start, token.line, end_pos=parts[-1].end)
        elif token.type in _CUTS and before.type != "EXPECT":
            in_test = token.type == "TEST"
        yield token
        place, before = end, tokens[end - 1]


def _is_id_part(token: Token) -> bool:
    return token.type in _ID_PARTS or token.isalpha()


def same_line(earlier: Token, later: Token) -> bool:
    """Whether both stand on one line of the text."""
    return earlier.line == later.line


def too_deep(tokens: Sequence[Token]) -> Token | None:
    """Return the token at which brackets, `not`s and signs nest deeper than `MAX_NESTING`, or None."""
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


def number_of(token: Token) -> float:
    """Return the value of a NUMBER or a DURATION (in seconds), at most `LARGEST`."""
    return min(_magnitude(token), LARGEST)


def types_of(tokens: Sequence[Token]) -> Iterator[str]:
    """Yield the types of *tokens*, `SIGN` for a `-` that is a sign."""
    for before, token in zip((END, *tokens), tokens, strict=False):
        yield SIGN if token.type == "MINUS" and before.type not in OPERAND_ENDS else token.type


def space_between(previous: str, following: str) -> str:
    """Return the space between two neighbours on one line, given their types."""
    if previous in _GLUES_RIGHT or following in _GLUES_LEFT:
        return ""
    return "" if following == "LPAR" and previous == "NAME" else " "  # a call


@functools.lru_cache(maxsize=1024)
def one_line(text: str) -> str:
    """Return a piece of policy text on one line, spaced as `smetric fmt` does and without comments.

    Text that holds a lexical error only has its white space collapsed.
    """
    found = tokenize(text)
    if found.errors or not found.tokens:
        return " ".join(text.split())
    gaps = [space_between(*pair) for pair in pairwise(types_of(found.tokens))]
    return "".join(token + gap for token, gap in zip(found.tokens, [*gaps, ""], strict=True))


def _magnitude(token: Token) -> float:
    """Return the value as written, infinite where no float holds it."""
    digits = token.rstrip("umsh")
    return float(digits) * _SECONDS.get(token[len(digits) :], 1.0)


def _holds_back(previous: Token | None, token: Token) -> bool:
    """Whether a statement keyword behind *previous* starts no statement."""
    if previous is None:
        return False
    if previous.type == "EXPECT" or (previous.type == "MINUS" and previous.end == token.start):  # as in my-policy
        return True
    return (previous.type in BEFORE_NAMES or previous.type in ("LPAR", "COMMA")) and same_line(previous, token)


def _bad_text(text: str, offset: int) -> Diagnostic:
    """Return the error of the text at *offset*, which starts no token; its span is skipped."""
    char = text[offset]
    if char == '"':
        end = text.find("\n", offset)
        end = len(text) if end < 0 else end
        span = Span(offset, offset + len(text[offset:end].rstrip()))
        return Diagnostic("unclosed-string", "this string is not closed", span, 'end it with `"` on the same line')
    end = offset + 1
    while end < len(text) and text[end] == char:
        end += 1
    help_text = _CHARACTER_HELP.get(char, "")
    if char in _QUOTES:  # skipped up to the closing quote, which would be an error of its own
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
    """Return the error of a token that can stand nowhere; None for a sound one."""
    token = tokens[place]
    span = token.span
    if token.type == "NAME" and len(token) > MAX_NAME and token.isidentifier():
        return Diagnostic("long-name", f"a name has at most {MAX_NAME} characters, this one {len(token)}", span)
    if token.type in ("NUMBER", "DURATION") and _magnitude(token) > LARGEST:
        return Diagnostic("too-large", f"`{quote(text, span)}` is too large", span, "numbers are at most 1e15")
    if token.type == "DOT" and place + 1 < len(tokens) and tokens[place + 1].type == "NUMBER":
        follower = tokens[place + 1]
        if place and tokens[place - 1].type == "RANGE" and tokens[place - 1].end == span.start:
            return Diagnostic("syntax", "did not expect `.` here", span, "a range has two dots: `0..5`")
        if follower.start == span.end:
            return Diagnostic("bare-fraction", "a number starts with a digit", span, f"write `0.{clip(follower)}`")
    return None

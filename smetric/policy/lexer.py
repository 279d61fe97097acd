# ruff: noqa: D102 - a method is named after the grammar rule it builds, which is its documentation
"""Policy text to tokens: keywords, lexical errors, and the cuts between statements."""

from __future__ import annotations

import enum
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lark import Lark

from smetric.policy import tree
from smetric.policy.diagnostic import MAX_DIAGNOSTICS, Diagnostic, Span, clip, quote
from smetric.policy.types import canonical
from smetric.policy.vocabulary import LARGEST

# The reserved words and the operators: how each is written and what it means, for the manual, hovers and completion.
#
# What the parser makes of them is the grammar's business.


class Role(enum.Enum):
    """Where a word stands."""

    HEADER = "header"
    STATEMENT = "statement"
    #: Within a statement.
    PART = "part"
    OPERATOR = "operator"
    LITERAL = "literal"
    #: Within a `test`.
    CASE = "case"


@dataclass(frozen=True, slots=True)
class Keyword:
    """A reserved word: how it is written with what belongs to it, and what that means, in one or two sentences."""

    word: str
    role: Role
    form: str
    doc: str


_ROWS = (
    Keyword("policy", Role.HEADER, "policy NAME", "The first line of a policy."),
    Keyword(
        "library",
        Role.HEADER,
        "library NAME",
        "The first line of a file that holds `param` and `def` for others to `use`; it decides nothing.",
    ),
    Keyword(
        "use", Role.STATEMENT, "use NAME (a, b)", "Takes definitions from the library NAME.policy beside this file."
    ),
    Keyword(
        "param",
        Role.STATEMENT,
        "param NAME = value in lo..hi",
        "A value that configuration may set within its range; `in {a, b}` lists choices. "
        "`param LOAD = requests in {requests, unprefilled}` chooses a feature; the file is typed once per choice, and "
        "`0 LOAD` has the unit of the chosen one.",
    ),
    Keyword(
        "let",
        Role.STATEMENT,
        "let NAME = expr",
        "Names a value: computed over the candidates left on its line, at most once, only when asked for.",
    ),
    Keyword(
        "def",
        Role.STATEMENT,
        "def NAME(a, b) = expr",
        "Names a formula; sees only names above it. Guards that are calls appear in traces by this name.",
    ),
    Keyword(
        "keep",
        Role.STATEMENT,
        "keep mask when cond as label",
        "Hard filter: leaving nobody answers 503, named after the filter.",
    ),
    Keyword(
        "prefer",
        Role.STATEMENT,
        "prefer mask when cond as label",
        "Soft filter: skipped when it would leave nobody.",
    ),
    Keyword("route", Role.STATEMENT, "route pick when cond as label", "The instance."),
    Keyword(
        "reject",
        Role.STATEMENT,
        'reject 429 "message" retry 2s when cond as label',
        "No instance: an error status, with Retry-After.",
    ),
    Keyword(
        "hold",
        Role.STATEMENT,
        "hold for 500ms when cond as label",
        "Not now: the request waits and is decided again, from the top, whenever the load changes. Once `req.held` "
        "reaches the time given, the rule counts as failed (guard `held`) and the next ones decide. It needs a `when`.",
    ),
    Keyword("test", Role.STATEMENT, 'test "sentence" …', "A test: a table of instances, and what is expected of it."),
    Keyword("when", Role.PART, "when cond", "The guards of a rule: conditions joined by `and`, tried left to right."),
    Keyword("as", Role.PART, "as label", "What traces and tests call a rule."),
    Keyword("for", Role.PART, "hold for 500ms", "How long at most."),
    Keyword("retry", Role.PART, "retry 2s", "What Retry-After says."),
    Keyword("per", Role.PART, "5 tokens per second", "Divides units."),
    Keyword(
        "where",
        Role.PART,
        "mean(v where m, default: x)",
        "Only the candidates for which it holds. A pick of them may be nobody: its rule is then skipped.",
    ),
    Keyword("if", Role.OPERATOR, "x if cond else y", "x where cond holds, y elsewhere."),
    Keyword("else", Role.OPERATOR, "x if cond else y", "x where cond holds, y elsewhere."),
    Keyword("or", Role.OPERATOR, "a or b", "Whether one of them holds."),
    Keyword("and", Role.OPERATOR, "a and b", "Whether both hold."),
    Keyword("not", Role.OPERATOR, "not a", "Whether it does not hold."),
    Keyword("in", Role.OPERATOR, 'role in {"decode", "both"}', "Whether it is one of the set; also `not in`."),
    Keyword("true", Role.LITERAL, "true", "Holds."),
    Keyword("false", Role.LITERAL, "false", "Does not hold."),
    Keyword("with", Role.CASE, "with OVERLOAD = 9", "Parameters of a test."),
    Keyword(
        "given",
        Role.CASE,
        "given turn = 3, last = a",
        "Request fields of a test, `?` for unknown; `last` is the last winner of every rotation.",
    ),
    Keyword(
        "instance",
        Role.CASE,
        "instance | hit_len | age(requests)",
        "The head of a test's table: features, one row per instance below; a cell may be `?`.",
    ),
    Keyword(
        "expect",
        Role.CASE,
        "expect a or b as label failing guard",
        "What is to be decided; also `expect reject 429` and `expect hold`.",
    ),
    Keyword("failing", Role.CASE, 'failing guard, failing "req.turn != 0"', "A guard that must have failed."),
)

#: Every reserved word.
KEYWORDS: Mapping[str, Keyword] = {row.word: row for row in _ROWS}

#: How operators are written and what they do, from the loosest to the tightest.
OPERATORS = (
    ("x if c else y", "chooses; c is one truth value, or one per instance"),
    ("a or b", "truth"),
    ("a and b", "truth"),
    ("not a", "truth"),
    ("== != <= >= < >", "compare equal units; they do not chain"),
    ('x in {"a", "b"}, x not in s', "membership in a set of strings"),
    ("x + y, x - y", "of equal units"),
    ("x * y, x / y", "units multiply and divide; a divisor must not be able to be 0"),
    ("-x", "sign"),
    ("v[s]", "the value of instance s"),
)


# Words and marks of a policy text, divided by the terminals of the grammar: as Lark does it, in a third of the time.
#
# What is wrong with a text that they do not cover is the lexer's business.


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


# From what the grammar reads to the nodes of `tree`: one method for each of its rules.
#
# Nothing is judged here; whatever the grammar lets through is built.

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def number_of(token: Token) -> float:
    """The value of a NUMBER or DURATION (in seconds), at most `LARGEST`; the lexer reports what exceeds it."""
    return min(magnitude(token), LARGEST)


def magnitude(token: Token) -> float:
    """The value of a NUMBER or DURATION as written, infinite where no float holds it."""
    digits = token.rstrip("umsh")
    return float(digits) * _SECONDS.get(token[len(digits) :], 1.0)


class Builder:
    """Makes one statement; children are nodes, tokens, or None where an optional part is absent.

    Children are `Any` because they come untyped; the grammar fixes what they are.
    """

    # ── header and declarations ──

    def policy(self, span: Span, parts: list[Any]) -> tree.Name:
        return _name(parts[0])

    library = policy

    def use(self, span: Span, parts: list[Any]) -> tree.Use:
        library, names = parts
        return tree.Use(span=span, library=_name(library), names=names)

    def param(self, span: Span, parts: list[Any]) -> tree.Param:
        name, value, domain = parts
        return tree.Param(span=span, name=str(name), name_span=name.span, value=value, domain=domain)

    def let(self, span: Span, parts: list[Any]) -> tree.Let:
        name, value = parts
        return tree.Let(span=span, name=str(name), name_span=name.span, value=value)

    def definition(self, span: Span, parts: list[Any]) -> tree.Def:
        name, arguments, body = parts
        return tree.Def(span=span, name=str(name), name_span=name.span, arguments=arguments, body=body)

    def names(self, span: Span, parts: list[Any]) -> tuple[tree.Name, ...]:
        return tuple(_name(token) for token in parts)

    def range(self, span: Span, parts: list[Any]) -> tree.Range:
        low, _, high = parts
        return tree.Range(span=span, low=low, high=high)

    def choices(self, span: Span, parts: list[Any]) -> tree.Choices:
        return tree.Choices(span=span, items=tuple(parts))

    # ── filters and outcomes ──

    def keep(self, span: Span, parts: list[Any]) -> tree.Filter:
        return self._filter("keep", span, parts)

    def prefer(self, span: Span, parts: list[Any]) -> tree.Filter:
        return self._filter("prefer", span, parts)

    def _filter(self, word: str, span: Span, parts: list[Any]) -> tree.Filter:
        mask, when, label = parts
        return tree.Filter(span=span, word=word, mask=mask, when=when, label=label and _name(label))

    def route(self, span: Span, parts: list[Any]) -> tree.Route:
        pick, when, label = parts
        return tree.Route(span=span, word="route", pick=pick, when=when, label=label and _name(label))

    def reject(self, span: Span, parts: list[Any]) -> tree.Reject:
        status, message, retry, when, label = parts
        return tree.Reject(
            span=span,
            word="reject",
            status=tree.Number(span=status.span, value=number_of(status)),
            message=tree.Text(span=message.span, value=str(message)[1:-1]),
            retry=retry,
            when=when,
            label=label and _name(label),
        )

    def hold(self, span: Span, parts: list[Any]) -> tree.Hold:
        patience, when, label = parts
        return tree.Hold(span=span, word="hold", patience=patience, when=when, label=label and _name(label))

    # ── literals ──

    def number(self, span: Span, parts: list[Any]) -> tree.Number:
        sign, literal, unit = parts
        made = self._literal(span, literal, unit)
        return replace(made, value=-made.value) if sign else made

    def quantity(self, span: Span, parts: list[Any]) -> tree.Number:
        return self._literal(span, *parts)

    duration = quantity

    def _literal(self, span: Span, literal: Token, unit: Any) -> tree.Number:
        if literal.type == "DURATION":
            name, place = canonical("seconds", unit or ""), unit and unit.span
        else:
            name, place = unit or ("", None)
        return tree.Number(span=span, value=number_of(literal), unit=str(name), unit_span=place)

    def unit(self, span: Span, parts: list[Any]) -> tuple[str, Span]:
        above, below = parts
        return canonical(str(above), str(below or "")), span

    def string(self, span: Span, parts: list[Any]) -> tree.Text:
        return tree.Text(span=span, value=str(parts[0])[1:-1])

    def true(self, span: Span, parts: list[Any]) -> tree.Truth:
        return tree.Truth(span=span, value=True)

    def false(self, span: Span, parts: list[Any]) -> tree.Truth:
        return tree.Truth(span=span, value=False)

    def name(self, span: Span, parts: list[Any]) -> tree.Name:
        return _name(parts[0])

    # ── expressions ──

    def if_(self, span: Span, parts: list[Any]) -> tree.IfElse:
        then, condition, otherwise = parts
        return tree.IfElse(span=span, then=then, condition=condition, otherwise=otherwise)

    def binary(self, span: Span, parts: list[Any]) -> tree.Binary:
        left, *operator, right = parts
        place = Span(operator[0].start, operator[-1].end)
        op = " ".join(operator)
        return tree.Binary(span=span, op=op, left=left, right=right, op_span=place)

    def unary(self, span: Span, parts: list[Any]) -> tree.Unary:
        op, operand = parts
        return tree.Unary(span=span, op=str(op), operand=operand)

    def at(self, span: Span, parts: list[Any]) -> tree.At:
        vector, pick = parts
        return tree.At(span=span, vector=vector, pick=pick)

    def field(self, span: Span, parts: list[Any]) -> tree.Field:
        base, name = parts
        return tree.Field(span=span, base=str(base), name=str(name))

    def set(self, span: Span, parts: list[Any]) -> tree.SetOf:
        return tree.SetOf(span=span, items=tuple(item for item in parts if item is not None))

    def call(self, span: Span, parts: list[Any]) -> tree.Call:
        name, arguments = parts
        return tree.Call(span=span, function=str(name), arguments=arguments or (), name_span=name.span)

    def args(self, span: Span, parts: list[Any]) -> tuple[tree.Argument, ...]:
        return tuple(
            part if isinstance(part, tree.Argument) else tree.Argument(span=part.span, value=part) for part in parts
        )

    def where(self, span: Span, parts: list[Any]) -> tree.Argument:
        value, mask = parts
        return tree.Argument(span=span, value=value, where=mask)

    def named(self, span: Span, parts: list[Any]) -> tree.Argument:
        name, value = parts
        return tree.Argument(span=span, value=value, name=str(name), name_span=name.span)

    # ── tests ──

    def test(self, span: Span, parts: list[Any]) -> tree.Test:
        sentence, settings, given, (columns, rows), expect = parts
        return tree.Test(
            span=span,
            sentence=str(sentence)[1:-1],
            settings=settings or (),
            given=given or (),
            columns=columns,
            rows=rows,
            expect=expect,
        )

    def with_(self, span: Span, parts: list[Any]) -> tuple[tree.Setting, ...]:
        return tuple(parts)

    given = with_

    def setting(self, span: Span, parts: list[Any]) -> tree.Setting:
        name, written = parts
        value, unit = written, ""
        if isinstance(written, tree.Number):
            value, unit = written.value, written.unit
        elif isinstance(written, tree.Text | tree.Truth):
            value = written.value
        elif isinstance(written, Token):
            value = tree.UNKNOWN
        return tree.Setting(span=span, name=str(name), value=value, unit=unit)

    def table(self, span: Span, parts: list[Any]) -> tuple[tuple[tree.Column, ...], tuple[tree.Row, ...]]:
        columns = tuple(part for part in parts if isinstance(part, tree.Column))
        return columns, tuple(part for part in parts if isinstance(part, tree.Row))

    def column(self, span: Span, parts: list[Any]) -> tree.Column:
        name, inner = parts
        if inner is None:
            return tree.Column(span=span, feature=str(name))
        # Only `age` may stand before the bracket; anything else is left as written, which no feature is called.
        feature = str(inner) if name == "age" else f"{name}({inner})"
        return tree.Column(span=span, feature=feature, of_age=name == "age")

    def row(self, span: Span, parts: list[Any]) -> tree.Row:
        name, *cells = parts
        made = (cell if isinstance(cell, tree.Cell) else tree.Cell(span=cell.span, value=cell.value) for cell in cells)
        return tree.Row(span=span, name=str(name), cells=tuple(made))

    def plain(self, span: Span, parts: list[Any]) -> tree.Cell:
        sign, literal = parts
        return tree.Cell(span=span, value=-number_of(literal) if sign else number_of(literal))

    def span(self, span: Span, parts: list[Any]) -> tree.Cell:
        return tree.Cell(span=span, value=number_of(parts[0]), unit="seconds")

    def strings(self, span: Span, parts: list[Any]) -> tree.Cell:
        return tree.Cell(span=span, value=parts[0])

    def set_(self, span: Span, parts: list[Any]) -> frozenset[str]:
        return frozenset(str(token)[1:-1] for token in parts if token is not None)

    def unknown(self, span: Span, parts: list[Any]) -> tree.Cell:
        return tree.Cell(span=span, value=tree.UNKNOWN)

    def expect(self, span: Span, parts: list[Any]) -> tree.Expect:
        outcome, rule, failing = parts
        guard: tree.Name | tree.Text | None = failing and _name(failing)
        if failing is not None and failing.type == "STRING":
            guard = tree.Text(span=failing.span, value=str(failing)[1:-1])
        return tree.Expect(
            span=span,
            kind=outcome.kind,
            instances=outcome.instances,
            status=outcome.status,
            rule=rule and _name(rule),
            failing=guard,
        )

    def expect_route(self, span: Span, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=span, kind="route", instances=tuple(_name(token) for token in parts))

    def expect_reject(self, span: Span, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=span, kind="reject", status=number_of(parts[0]))

    def expect_hold(self, span: Span, parts: list[Any]) -> tree.Expect:
        return tree.Expect(span=span, kind="hold")


def _name(token: Token) -> tree.Name:
    return tree.Name(span=token.span, name=str(token))


# Policy text to tokens, with every lexical error, the bounds on nesting, and the cuts between statements.
#
# The terminals are the grammar's; what their order means is the parser's.

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

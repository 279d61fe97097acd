"""Symbols of policy texts: where each name is defined and used, for navigation and renaming in editors.

Texts need not parse: symbols are read from tokens, statement by statement.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smetric.features import VOCABULARY
from smetric.policy.builtin import BUILTINS
from smetric.policy.diagnostic import Span
from smetric.policy.keywords import KEYWORDS
from smetric.policy.lexer import END, MAX_NAME, Token, cut, tokenize
from smetric.policy.parser import MAX_BYTES
from smetric.policy.types import base_unit
from smetric.routing.policy_files import further_tests_of, policy_of


class SymbolKind(enum.Enum):
    """Kind of a symbol; symbols of different kinds may have one name."""

    #: A `param`, `let`, `def`, or a name taken from a library.
    NAME = "name"
    #: An argument of a `def`.
    ARGUMENT = "argument"
    #: A rule or a filter.
    LABEL = "label"
    #: An instance of a test.
    INSTANCE = "instance"
    #: A library that is used.
    LIBRARY = "library"


@dataclass(frozen=True, slots=True)
class Symbol:
    """Symbol; *scope* is the start of the statement of an argument or an instance, else -1."""

    kind: SymbolKind
    text: str
    scope: int = -1


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Place of a symbol in a text."""

    symbol: Symbol
    span: Span
    is_definition: bool = False


def occurrences(text: str) -> list[Occurrence]:
    """Return all places of symbols in *text*, in order; none for a text that is too long."""
    if len(text) > MAX_BYTES:
        return []
    return [found for piece in cut(tokenize(text)) for found in _in_statement(piece.tokens)]


def _in_statement(tokens: Sequence[Token]) -> Iterator[Occurrence]:
    first, start = tokens[0].type, tokens[0].start
    closed = next((place for place, token in enumerate(tokens) if token.type == "RPAR"), 0)
    arguments = {str(token) for token in tokens[3:closed]} if first == "DEF" else set()
    part = first
    for place, token in enumerate(tokens):
        before, behind = tokens[place - 1] if place else END, (*tokens[place + 1 : place + 2], END)[0]
        if first == "TEST" and token.type in ("WITH", "GIVEN", "INSTANCE", "EXPECT", "AS", "FAILING"):
            part = token.type
        is_id = token.type == "NAME" or (token.type == "STRING" and first == "TEST")
        if not is_id or before.type == "DOT" or first in ("POLICY", "LIBRARY"):
            continue
        made = Symbol(SymbolKind.NAME, str(token))
        defines = place == 1 and first in ("PARAM", "LET", "DEF")
        if first == "TEST":
            found = _in_test(token, before, behind, part, start)
            if found is not None:
                yield found
            continue
        if before.type == "AS":
            made, defines = Symbol(SymbolKind.LABEL, str(token)), True
        elif first == "USE" and place == 1:
            made = Symbol(SymbolKind.LIBRARY, str(token))
        elif token in arguments:
            made, defines = Symbol(SymbolKind.ARGUMENT, str(token), start), place < closed
        elif behind.type == "COLON" or (before.type in ("NUMBER", "PER") and base_unit(token) is not None):
            continue  # the name of an argument, or a unit
        yield Occurrence(made, token.span, defines)


def _in_test(token: Token, before: Token, behind: Token, part: str, start: int) -> Occurrence | None:
    name = str(token)
    is_row = part == "INSTANCE" and behind.type == "VBAR" and before.type != "VBAR" and before.line != token.line
    if is_row or (part == "EXPECT" and before.type in ("EXPECT", "OR")):
        return Occurrence(Symbol(SymbolKind.INSTANCE, name.strip('"'), start), token.span, is_row)
    if token.type == "STRING":
        return None
    if part == "GIVEN":
        return Occurrence(Symbol(SymbolKind.INSTANCE, name, start), token.span) if before.type == "EQUAL" else None
    if part in ("AS", "FAILING", "WITH"):
        return Occurrence(Symbol(SymbolKind.LABEL if part == "AS" else SymbolKind.NAME, name), token.span)
    return None


class Unrenamable(Exception):
    """A symbol that cannot be renamed, or not to the given name; the text says why."""


class Workspace:
    """Policy files of one folder.

    Args:
        path: the text in the editor.
        read: returns the text of a file; empty if it cannot be read.
    """

    def __init__(self, path: Path, read: Callable[[Path], str]) -> None:
        self._path = path
        self._read = read

    def at(self, offset: int) -> Occurrence | None:
        """Return the symbol at *offset* of the text."""
        every = occurrences(self._read(self._path))
        return next((each for each in every if each.span.start <= offset <= each.span.end), None)

    def definition(self, symbol: Symbol) -> tuple[Path, Span] | None:
        """Return the file and the place that define *symbol*; None if nothing does."""
        if symbol.kind is SymbolKind.LIBRARY:
            library = self._path.with_name(f"{symbol.text}.policy")
            return (library, Span(0, 0)) if self._read(library) else None
        for path in self._files(symbol):
            for each in occurrences(self._read(path)):
                if each.symbol == symbol and each.is_definition:
                    return path, each.span
        return None

    def references(self, symbol: Symbol) -> dict[Path, list[Span]]:
        """Return all places of *symbol*, by file, its definition included."""
        found: dict[Path, list[Span]] = {}
        for path in self._files(symbol):
            spans = [each.span for each in occurrences(self._read(path)) if each.symbol == symbol]
            if spans:
                found[path] = spans
        return found

    def renamed(self, symbol: Symbol, name: str) -> dict[Path, list[Span]]:
        """Return the places at which *name* replaces *symbol*.

        Raises:
            Unrenamable: *name* is no name, is taken, or nothing here defines the symbol.
        """
        if symbol.kind is SymbolKind.LIBRARY or self.definition(symbol) is None:
            raise Unrenamable(f"no file here defines `{symbol.text}`")
        places = self.references(symbol)
        if symbol.kind is SymbolKind.INSTANCE:
            return places
        if not name.isidentifier() or not name.isascii() or len(name) > MAX_NAME or name in KEYWORDS:
            raise Unrenamable(f"`{name}` is not a name: letters, digits and `_`, and no reserved word")
        if symbol.kind is not SymbolKind.LABEL and (name in VOCABULARY.features or name in BUILTINS or name == "req"):
            raise Unrenamable(f"`{name}` is a feature or a built-in, which no name can hide")
        is_label = symbol.kind is SymbolKind.LABEL
        others = (each.symbol for path in places for each in occurrences(self._read(path)))
        if any(each.text == name and (each.kind is SymbolKind.LABEL) == is_label for each in others):
            raise Unrenamable(f"`{name}` is taken")
        return places

    def _files(self, symbol: Symbol) -> list[Path]:
        """Return the files in which *symbol* can occur, the one that defines it first."""
        if symbol.kind in (SymbolKind.ARGUMENT, SymbolKind.INSTANCE):
            return [self._path]
        policy = policy_of(self._path)
        home = policy
        if symbol.kind is SymbolKind.NAME:
            library = self._taken_from(policy, symbol.text)
            home = library or policy
        users = [path for path in sorted(policy.parent.glob("*.policy")) if self._taken_from(path, symbol.text) == home]
        policies = dict.fromkeys([home, *(users if symbol.kind is SymbolKind.NAME else ())])
        return [path for each in policies for path in (each, further_tests_of(each))]

    def _taken_from(self, policy: Path, name: str) -> Path | None:
        """Return the library from which *policy* takes *name*; None if it takes it from none."""
        text = self._read(policy)
        for piece in cut(tokenize(text)) if len(text) <= MAX_BYTES and "use" in text else ():
            if piece.word == "use" and name in piece.tokens[2:]:
                return policy.with_name(f"{piece.tokens[1]}.policy")
        return None

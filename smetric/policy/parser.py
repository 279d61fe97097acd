"""Policy text to a syntax tree, all syntax errors of a file in one run."""

from __future__ import annotations

import dataclasses
import functools
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lark import Lark
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_analysis import Shift

from smetric.policy import tree
from smetric.policy.diagnostic import Diagnostic, PolicyError, Span, clip
from smetric.policy.lexer import (
    END,
    HEADERS,
    MAX_NESTING,
    STATEMENTS,
    Builder,
    Piece,
    Scanner,
    Token,
    Tokens,
    cut,
    same_line,
    tokenize,
    too_deep,
)
from smetric.policy.syntax_error import DEFINING, Stop, explain, misplaced_start
from smetric.policy.tree import Comments
from smetric.policy.types import closest

# The automaton that Lark makes of the grammar, run over the tokens of one statement, each part with its place.
#
# Lark's own way is a tree with positions and then a walk over it, which takes three times as long; what the automaton
# does is the same. Why a statement does not parse is not said here.


@dataclass(frozen=True, slots=True)
class Reduced:
    """What Lark makes of a rule: its name, and its parts, None where an optional one is absent."""

    rule: str
    children: list[Any]


#: A rule that ends: how many parts it has, what is made of them, and its own symbol.
_Rule = tuple[int, Callable[[list[Any]], Any], str]


class Stuck(Exception):
    """The tokens are no sentence of the grammar."""


class Automaton:
    """Reads statements.

    Args:
        lark: the grammar, made with `Reduced` in place of Lark's trees. No rule of it is empty.
        starts: the rules that a statement may follow.
    """

    def __init__(self, lark: Lark, starts: Sequence[str]) -> None:
        made = {start: lark.parse_interactive("", start=start).parser_state.parse_conf for start in starts}
        self._ends = {start: (one.start_state, one.end_state) for start, one in made.items()}
        one = made[starts[0]]  # all have the same states

        #: By state and what comes next, a terminal or a rule, the state that follows; or what ends before a terminal.
        self._shifts: dict[int, dict[str, int]] = {}
        self._ended: dict[int, dict[str, _Rule]] = {}
        for state, moves in one.states.items():
            self._shifts[state] = {symbol: target for symbol, (action, target) in moves.items() if action is Shift}
            self._ended[state] = {
                symbol: (len(rule.expansion), one.callbacks[rule], rule.origin.name)
                for symbol, (action, rule) in moves.items()
                if action is not Shift
            }

    def run(self, start: str, tokens: Sequence[Token], rules: object) -> Any:
        """The node of a whole statement.

        Args:
            start: the rule that the tokens should follow.
            tokens: those of one statement, one at least.
            rules: makes the node of a rule by the method of its name, given its place and its parts.

        Raises:
            Stuck: they do not follow it.
        """
        shifts, ended = self._shifts, self._ended
        state, end_state = self._ends[start]
        path = [state]
        values: list[Any] = []
        starts: list[int] = []
        ends: list[int] = []
        for token in (*tokens, END):
            kind = token.type
            while (rule := ended[state].get(kind)) is not None:
                size, make, symbol = rule
                begin, end = starts[-size], ends[-1]
                made = make(values[-size:])
                if type(made) is Reduced and made.rule[0] != "_":  # Lark's own rules, of repetitions, start with one
                    made = getattr(rules, made.rule)(Span(begin, end), made.children)
                del path[-size:], values[-size:], starts[-size:], ends[-size:]
                state = shifts[path[-1]][symbol]
                if state == end_state:
                    return made
                path.append(state)
                values.append(made)
                starts.append(begin)
                ends.append(end)
            following = shifts[state].get(kind)
            if following is None:
                break
            state = following
            path.append(state)
            values.append(token)
            starts.append(token.start)
            ends.append(token.end)
        raise Stuck


# Policy text to `tree.File`, all syntax errors of a file in one run.
#
# Statement keywords occur nowhere else, so a file is cut at them and each piece is parsed alone: one error is never the
# echo of another. What names and numbers mean is the checker's business.

#: Bytes of a policy file.
MAX_BYTES = 64 * 1024

#: What a text holds that was decoded from something else than UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")
#: What a piece of a file may be, as the grammar calls it.
_STARTS = ("header", "item")
_PACKAGE = Path(__file__).resolve().parent.parent
#: In an installed wheel the grammar lies in the package, in a checkout beside it.
_GRAMMARS = (_PACKAGE / "_data" / "grammar" / "smetric.lark", _PACKAGE.parent / "grammar" / "smetric.lark")


def grammar_path() -> Path:
    """Where the grammar is."""
    return next((path for path in _GRAMMARS if path.is_file()), _GRAMMARS[-1])


def parse(text: str, path: str = "<policy>") -> tree.File:
    """Parse a policy.

    Args:
        text: the policy's source, at most `MAX_BYTES` in UTF-8.
        path: what reports call it.

    Raises:
        PolicyError: with every syntax error of the file.
    """
    file, errors = read(text, path)
    if errors:
        raise PolicyError(errors, text, path)
    return file


def tokens_of(text: str) -> Tokens:
    """The tokens of a text, or of a piece of one."""
    return tokenize(_scanner(), text)


def read(text: str, path: str = "<policy>", *, tests: bool = True) -> tuple[tree.File, list[Diagnostic]]:
    """Parse what can be parsed: the file, with a `Broken` in place of each statement that could not be, and the errors.

    Args:
        text: the source.
        path: what reports call it.
        tests: False skips the `test` blocks, and whatever is wrong in them.

    Raises:
        PolicyError: the text is too long to look at, or no UTF-8.
    """
    refuse_too_long(text, path, "this file is too long")
    foreign = _SURROGATE.search(text)
    if foreign is not None:
        fault = Diagnostic("encoding", "this character is no UTF-8", Span(*foreign.span()), "save the file as UTF-8")
        raise PolicyError([fault], text, path)
    found = tokens_of(text)
    errors = list(found.errors)
    comments = Comments(text)
    pieces = cut(found)
    stray = comments.stray(_start(piece) for piece in pieces)
    name = tree.Name(span=Span(0, 0), name="")
    doc, kind = "", "policy"
    behind: list[tree.Statement] = []
    if pieces and pieces[0].word not in STATEMENTS:
        name, behind = _header(pieces[0], errors)
        doc = comments.above(_start(pieces[0]))
        kind = "library" if pieces[0].word == "library" else kind
        del pieces[0]
    else:
        span = pieces[0].tokens[0].span if pieces else Span(0, 0)
        errors.append(Diagnostic("header", "a file starts with `policy NAME`", span, "write it above this line"))
    if not tests:
        pieces, errors = _without_tests(pieces, errors)
    for piece in pieces:
        behind += _statements(piece, comments.above(_start(piece)), errors)
    file = tree.File(
        name=name.name, name_span=name.span, doc=doc, statements=tuple(behind), text=text, path=path, kind=kind,
        stray=tuple(stray),
    )  # fmt: skip
    return file, errors


def refuse_too_long(text: str, path: str, why: str) -> None:
    """Raise `PolicyError`, which says *why*, where *text* is longer than a policy may be."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        fault = Diagnostic("too-long", f"{why}: a policy has at most {MAX_BYTES} bytes", Span(0, 0))
        raise PolicyError([fault], text[:200], path)


def _without_tests(pieces: list[Piece], errors: list[Diagnostic]) -> tuple[list[Piece], list[Diagnostic]]:
    """The pieces that are no `test` blocks, and the errors outside of those."""
    starts = [_start(piece) for piece in pieces]

    def in_test(error: Diagnostic) -> bool:
        owner = bisect_right(starts, error.span.start) - 1
        return owner >= 0 and pieces[owner].word == "test"

    return [piece for piece in pieces if piece.word != "test"], [error for error in errors if not in_test(error)]


@functools.cache
def _lark() -> Lark:
    """The parser of the grammar; building it takes some 60 ms, so it is built once a process."""
    return Lark(
        grammar_path().read_text("utf-8"),
        parser="lalr",
        lexer="basic",
        start=list(_STARTS),
        tree_class=Reduced,
    )


@functools.cache
def _scanner() -> Scanner:
    return Scanner(_lark())


@functools.cache
def _automaton() -> Automaton:
    return Automaton(_lark(), _STARTS)


def _header(piece: Piece, errors: list[Diagnostic]) -> tuple[tree.Name, list[tree.Statement]]:
    """The name of a file, and what stands below it and was meant as a statement."""
    first = piece.tokens[0]
    if piece.word not in HEADERS:
        message = f"a file starts with `policy NAME`, not with `{clip(first)}`"
        errors.append(Diagnostic("header", message, first.span, "e.g. policy my_policy"))
    made = None if piece.broken or piece.word not in HEADERS else _parse(piece, "header", errors)
    if isinstance(made, tree.Name):
        return made, []
    place = _mistyped(piece, errors)
    if place:
        return _header(Piece(piece.tokens[:place]), errors)[0], [_broken(piece.tokens[place:])]
    return tree.Name(span=first.span, name=""), []


def _statements(piece: Piece, doc: str, errors: list[Diagnostic]) -> list[tree.Statement]:
    """The statement of a piece; two, where a line in it starts with what was meant as a keyword."""
    tokens = piece.tokens
    if piece.word in HEADERS:
        message = f"did not expect `{piece.word}` here"
        errors.append(Diagnostic("header", message, tokens[0].span, "a file has one header, its first line"))
    elif not piece.broken:
        made = _parse(piece, "item", errors)
        if isinstance(made, tree.Statement):
            return [_with_doc(made, doc)]
        place = _mistyped(piece, errors)
        if place:
            return [*_statements(Piece(tokens[:place]), doc, errors), _broken(tokens[place:])]
    return [_broken(tokens, doc)]


def _mistyped(piece: Piece, errors: list[Diagnostic]) -> int:
    """Where in a piece that did not parse a line starts with what was meant as a keyword; 0 where none does."""
    if piece.broken or not errors or errors[-1].code != "statement":
        return 0
    return next((i for i, token in enumerate(piece.tokens) if i and token.span == errors[-1].span), 0)


def _broken(tokens: list[Token], doc: str = "") -> tree.Broken:
    """What stands for a statement that could not be parsed: what it probably was, and the names it would define."""
    first = str(tokens[0])
    word = first if first in (*HEADERS, *STATEMENTS) else closest(first, STATEMENTS)
    names = [str(token) if token.type == "NAME" else "" for token in tokens]
    if word == "use":
        meant = names[2:]
    elif len(tokens) > 1 and tokens[1].type in ("EQUAL", "COLON"):
        meant = names[:1]
    else:
        meant = names[1:2] if word in ("param", "let", "def") or first in DEFINING else []
    span = Span(tokens[0].start, tokens[-1].end)
    return tree.Broken(span=span, doc=doc, word=word, names=tuple(filter(None, meant)))


def _parse(piece: Piece, rule: str, errors: list[Diagnostic]) -> object:
    """Parse one piece by *rule*; None, and one more error, when that fails."""
    tokens = piece.tokens
    deep = too_deep(tokens)
    if deep is not None:
        message = f"this nests deeper than {MAX_NESTING} brackets, `not`s and signs"
        errors.append(Diagnostic("too-deep", message, deep.span, "name the inner parts with `let`"))
        return None
    if not any(_poses_as_unit(tokens, place) for place in range(len(tokens))):
        try:
            return _automaton().run(rule, tokens, Builder())
        except Stuck:
            pass
    errors.append(_fault(tokens, rule))
    return None


def _fault(tokens: list[Token], rule: str) -> Diagnostic:
    """Why the tokens are no *rule*."""
    parser = _lark().parse_interactive("", start=rule)
    place = 0
    try:
        for place, token in enumerate(tokens):
            if _poses_as_unit(tokens, place):
                return misplaced_start(token, Stop(tokens, place, frozenset()).following)
            parser.feed_token(token)  # type: ignore[arg-type]  # of a token Lark reads the type alone
        place = len(tokens)
        parser.feed_eof()  # type: ignore[no-untyped-call]
    except UnexpectedToken:
        accepted = frozenset(parser.accepts())  # type: ignore[no-untyped-call]
        return explain(Stop(tokens, place, accepted))
    raise AssertionError("these tokens parse")


def _poses_as_unit(tokens: list[Token], place: int) -> bool:
    """Whether a name starts the line after a number: a mistyped keyword, for a unit stands on its number's own line."""
    if place == 0 or tokens[place].type != "NAME" or tokens[place - 1].type != "NUMBER" or tokens[0].type == "TEST":
        return False
    return not same_line(tokens[place - 1], tokens[place])


def _with_doc(statement: tree.Statement, doc: str) -> tree.Statement:
    return dataclasses.replace(statement, doc=doc) if doc else statement


def _start(piece: Piece) -> int:
    return piece.tokens[0].start

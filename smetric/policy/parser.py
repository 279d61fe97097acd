"""Policy text to a syntax tree, with all syntax errors of a file in one run.

Statement keywords occur nowhere else, so a file is cut at them and each statement is parsed alone: an error in one
statement leaves the others.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lark import Transformer_NonRecursive, v_args
from lark.exceptions import UnexpectedToken
from lark.tree import Meta

from smetric.policy import tree
from smetric.policy.diagnostic import Diagnostic, PolicyError, Span, clip
from smetric.policy.lexer import (
    END,
    HEADERS,
    MAX_NESTING,
    STATEMENTS,
    Piece,
    Token,
    cut,
    grammar,
    number_of,
    same_line,
    tokenize,
    too_deep,
)
from smetric.policy.types import canonical, closest

#: Bytes of a policy file.
MAX_BYTES = 64 * 1024

#: Characters of a text that was decoded from something else than UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse(text: str, path: str = "<policy>") -> tree.File:
    """Parse a policy.

    Args:
        text: the policy's source, at most `MAX_BYTES` in UTF-8.
        path: its name in reports.

    Raises:
        PolicyError: with every syntax error of the file.
    """
    file, errors = read(text, path)
    if errors:
        raise PolicyError(errors, text, path)
    return file


def read(text: str, path: str = "<policy>", *, tests: bool = True) -> tuple[tree.File, list[Diagnostic]]:
    """Return a file and its syntax errors, with a `Broken` in place of each statement that does not parse.

    Args:
        text: the source.
        path: its name in reports.
        tests: False skips the `test` blocks and their errors.

    Raises:
        PolicyError: the text is too long, or not UTF-8.
    """
    refuse_too_long(text, path, "this file is too long")
    foreign = _SURROGATE.search(text)
    if foreign is not None:
        fault = Diagnostic(
            "encoding", "this character is not valid UTF-8", Span(*foreign.span()), "save the file as UTF-8"
        )
        raise PolicyError([fault], text, path)
    found = tokenize(text)
    errors = list(found.errors)
    comments = tree.Comments(text)
    pieces = cut(found)
    stray = comments.stray(piece.start for piece in pieces)
    name = tree.Name(span=Span(0, 0), name="")
    doc, kind = "", "policy"
    statements: list[tree.Statement] = []
    if pieces and pieces[0].word not in STATEMENTS:
        first = pieces.pop(0)
        name, statements = _header(first, errors)
        doc = comments.above(first.start)
        kind = "library" if first.word == "library" else kind
    else:
        span = pieces[0].tokens[0].span if pieces else Span(0, 0)
        errors.append(Diagnostic("header", "a file starts with `policy NAME`", span, "write it above this line"))
    if not tests:
        pieces, errors = _without_tests(pieces, errors)
    for piece in pieces:
        statements += _statements(piece, comments.above(piece.start), errors)
    file = tree.File(name.name, name.span, doc, tuple(statements), text, path, kind, tuple(stray))
    return file, errors


def refuse_too_long(text: str, path: str, why: str) -> None:
    """Raise `PolicyError` with the reason *why* if *text* is longer than a policy may be."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        fault = Diagnostic("too-long", f"{why}: a policy has at most {MAX_BYTES} bytes", Span(0, 0))
        raise PolicyError([fault], text[:200], path)


def _without_tests(pieces: list[Piece], errors: list[Diagnostic]) -> tuple[list[Piece], list[Diagnostic]]:
    """Return the pieces and errors outside of `test` blocks."""
    starts = [piece.start for piece in pieces]

    def in_test(error: Diagnostic) -> bool:
        owner = bisect_right(starts, error.span.start) - 1
        return owner >= 0 and pieces[owner].word == "test"

    return [piece for piece in pieces if piece.word != "test"], [error for error in errors if not in_test(error)]


def _header(piece: Piece, errors: list[Diagnostic]) -> tuple[tree.Name, list[tree.Statement]]:
    """Return the name of a file, and the broken statement behind it if its keyword is misspelt."""
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
    """Return the statement of a piece; two, if a line in it starts with a misspelt keyword."""
    tokens = piece.tokens
    if piece.word in HEADERS:
        message = f"did not expect `{piece.word}` here"
        errors.append(Diagnostic("header", message, tokens[0].span, "a file has one header, its first line"))
    elif not piece.broken:
        made = _parse(piece, "item", errors)
        if isinstance(made, tree.Statement):
            return [replace(made, doc=doc) if doc else made]
        place = _mistyped(piece, errors)
        if place:
            return [*_statements(Piece(tokens[:place]), doc, errors), _broken(tokens[place:])]
    return [_broken(tokens, doc)]


def _mistyped(piece: Piece, errors: list[Diagnostic]) -> int:
    """Return the place of the misspelt keyword at which a piece failed to parse; 0 if there is none."""
    if piece.broken or not errors or errors[-1].code != "statement":
        return 0
    return next((i for i, token in enumerate(piece.tokens) if i and token.span == errors[-1].span), 0)


def _broken(tokens: list[Token], doc: str = "") -> tree.Broken:
    """Return the node of a statement that does not parse, with its likely keyword and the names it defines."""
    from smetric.policy.syntax_error import DEFINING  # most texts parse

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


def _parse(piece: Piece, rule: str, errors: list[Diagnostic]) -> Any:
    """Return the node of a piece that follows *rule*; None, and one more error, if it does not."""
    tokens = piece.tokens
    deep = too_deep(tokens)
    if deep is not None:
        message = f"this nests deeper than {MAX_NESTING} brackets, `not`s and signs"
        errors.append(Diagnostic("too-deep", message, deep.span, "name the inner parts with `let`"))
        return None
    parser = grammar().parse_interactive(start=rule)
    made: Any = None
    for place, token in enumerate((*tokens, END)):
        if _poses_as_unit(tokens, place):
            errors.append(_fault(tokens, place, None))
            return None
        try:
            made = parser.feed_token(token)
        except UnexpectedToken:
            errors.append(_fault(tokens, place, frozenset(parser.accepts())))  # type: ignore[no-untyped-call]
            return None
    return _Builder().transform(made)


def _fault(tokens: list[Token], place: int, accepted: frozenset[str] | None) -> Diagnostic:
    """Return why a parse stopped at *place*, where *accepted* would do; None if a statement should start there."""
    from smetric.policy.syntax_error import ParseStop, explain, misplaced_start  # most texts parse

    stop = ParseStop(tokens, place, accepted or frozenset())
    return misplaced_start(stop.token, stop.following) if accepted is None else explain(stop)


def _poses_as_unit(tokens: list[Token], place: int) -> bool:
    """Whether a name starts the line after a number: a misspelt keyword, as a unit follows on its number's own line."""
    if not 0 < place < len(tokens) or tokens[0].type == "TEST":
        return False
    number, name = tokens[place - 1], tokens[place]
    return number.type == "NUMBER" and name.type == "NAME" and not same_line(number, name)


def _with_span(method: Callable[..., Any], _rule: str, parts: list[Any], meta: Meta) -> Any:
    """Call the method of a rule with its place and its parts."""
    return method(Span(meta.start_pos, meta.end_pos), *parts)


def _rule(word: str) -> Callable[..., tree.Rule]:
    """Return the method that builds the rules with the keyword *word*."""

    def build(_: _Builder, span: Span, value: Any, when: tree.Expr | None, label: Token | None) -> tree.Rule:
        return tree.Rule(span=span, word=word, value=value, when=when, label=_name_if(label))

    return build


@v_args(wrapper=_with_span)
class _Builder(Transformer_NonRecursive[Token, Any]):
    """Builder of the nodes of `tree`. Parts are nodes, tokens, or None in place of an absent optional part."""

    # ── header and declarations ──

    def policy(self, span: Span, name: Token) -> tree.Name:
        return _name(name)

    library = policy

    def use(self, span: Span, library: Token, names: tuple[tree.Name, ...]) -> tree.Use:
        return tree.Use(span=span, library=_name(library), names=names)

    def param(self, span: Span, name: Token, value: tree.Expr, domain: tree.Range | tree.Choices | None) -> tree.Param:
        return tree.Param(span=span, name=str(name), name_span=name.span, value=value, domain=domain)

    def let(self, span: Span, name: Token, value: tree.Expr) -> tree.Let:
        return tree.Let(span=span, name=str(name), name_span=name.span, value=value)

    def definition(self, span: Span, name: Token, arguments: tuple[tree.Name, ...], body: tree.Expr) -> tree.Def:
        return tree.Def(span=span, name=str(name), name_span=name.span, arguments=arguments, body=body)

    def names(self, span: Span, *names: Token) -> tuple[tree.Name, ...]:
        return tuple(map(_name, names))

    def range(self, span: Span, low: tree.Number, _dots: Token, high: tree.Number | None) -> tree.Range:
        return tree.Range(span=span, low=low, high=high)

    def choices(self, span: Span, *items: tree.Expr) -> tree.Choices:
        return tree.Choices(span=span, items=items)

    # ── filters and outcomes ──

    keep, prefer, route, hold = map(_rule, ("keep", "prefer", "route", "hold"))

    def reject(
        self,
        span: Span,
        status: Token,
        message: Token,
        retry: tree.Expr | None,
        when: tree.Expr | None,
        label: Token | None,
    ) -> tree.Rule:
        made: tree.Rule = _rule("reject")(self, span, retry, when, label)
        number = tree.Number(span=status.span, value=number_of(status))
        return replace(made, status=number, message=_text(message))

    # ── literals ──

    def number(self, span: Span, sign: Token | None, literal: Token, unit: Any) -> tree.Number:
        made = self._literal(span, literal, unit)
        return replace(made, value=-made.value) if sign else made

    def quantity(self, span: Span, literal: Token, unit: Any) -> tree.Number:
        return self._literal(span, literal, unit)

    duration = quantity

    def _literal(self, span: Span, literal: Token, unit: Any) -> tree.Number:
        """Build a number from a NUMBER with its `unit`, or from a DURATION with the name behind its `per`."""
        if literal.type == "DURATION":
            name, place = canonical("seconds", unit or ""), unit and unit.span
        else:
            name, place = unit or ("", None)
        return tree.Number(span=span, value=number_of(literal), unit=name, unit_span=place)

    def unit(self, span: Span, above: Token, below: Token | None) -> tuple[str, Span]:
        return canonical(str(above), str(below or "")), span

    def string(self, span: Span, text: Token) -> tree.Text:
        return _text(text)

    def true(self, span: Span) -> tree.Truth:
        return tree.Truth(span=span, value=True)

    def false(self, span: Span) -> tree.Truth:
        return tree.Truth(span=span, value=False)

    def name(self, span: Span, name: Token) -> tree.Name:
        return _name(name)

    # ── expressions ──

    def if_(self, span: Span, then: tree.Expr, condition: tree.Expr, otherwise: tree.Expr) -> tree.IfElse:
        return tree.IfElse(span=span, then=then, condition=condition, otherwise=otherwise)

    def binary(self, span: Span, left: tree.Expr, *rest: Any) -> tree.Binary:
        *words, right = rest  # two words for `not in`
        place = Span(words[0].start, words[-1].end)
        return tree.Binary(span=span, op=" ".join(words), left=left, right=right, op_span=place)

    def unary(self, span: Span, op: Token, operand: tree.Expr) -> tree.Unary:
        return tree.Unary(span=span, op=str(op), operand=operand)

    def at(self, span: Span, vector: tree.Expr, pick: tree.Expr) -> tree.AtExpr:
        return tree.AtExpr(span=span, vector=vector, pick=pick)

    def field(self, span: Span, base: Token, name: Token) -> tree.FieldExpr:
        return tree.FieldExpr(span=span, base=str(base), name=str(name))

    def set(self, span: Span, *items: tree.Expr | None) -> tree.SetOf:
        return tree.SetOf(span=span, items=tuple(item for item in items if item is not None))

    def call(self, span: Span, name: Token, arguments: tuple[tree.Argument, ...] | None) -> tree.CallExpr:
        return tree.CallExpr(span=span, function=str(name), arguments=arguments or (), name_span=name.span)

    def args(self, span: Span, *parts: tree.Argument | tree.Expr) -> tuple[tree.Argument, ...]:
        return tuple(
            part if isinstance(part, tree.Argument) else tree.Argument(span=part.span, value=part) for part in parts
        )

    def where(self, span: Span, value: tree.Expr, mask: tree.Expr) -> tree.Argument:
        return tree.Argument(span=span, value=value, where=mask)

    def named(self, span: Span, name: Token, value: tree.Expr) -> tree.Argument:
        return tree.Argument(span=span, value=value, name=str(name), name_span=name.span)

    # ── tests ──

    def test(
        self,
        span: Span,
        sentence: Token,
        settings: tuple[tree.Setting, ...] | None,
        given: tuple[tree.Setting, ...] | None,
        table: tuple[tuple[tree.TestColumn, ...], tuple[tree.Row, ...]],
        expect: tree.Expect,
    ) -> tree.Test:
        columns, rows = table
        return tree.Test(
            span=span,
            sentence=str(sentence)[1:-1],
            settings=settings or (),
            given=given or (),
            columns=columns,
            rows=rows,
            expect=expect,
        )

    def with_(self, span: Span, *settings: tree.Setting) -> tuple[tree.Setting, ...]:
        return settings

    given = with_

    def setting(self, span: Span, name: Token, written: Any) -> tree.Setting:
        value, unit = written, ""
        if isinstance(written, tree.Number):
            value, unit = written.value, written.unit
        elif isinstance(written, tree.Text | tree.Truth):
            value = written.value
        elif isinstance(written, Token):
            value = tree.UNKNOWN
        return tree.Setting(span=span, name=str(name), value=value, unit=unit)

    def table(self, span: Span, *parts: tree.Node) -> tuple[tuple[tree.TestColumn, ...], tuple[tree.Row, ...]]:
        columns = tuple(part for part in parts if isinstance(part, tree.TestColumn))
        return columns, tuple(part for part in parts if isinstance(part, tree.Row))

    def column(self, span: Span, name: Token, inner: Token | None) -> tree.TestColumn:
        if inner is None:
            return tree.TestColumn(span=span, feature=str(name))
        # Only `age` takes a feature. Anything else stays as written, and no feature has such a name.
        feature = str(inner) if name == "age" else f"{name}({inner})"
        return tree.TestColumn(span=span, feature=feature, of_age=name == "age")

    def row(self, span: Span, name: Token, *cells: Any) -> tree.Row:
        made = (cell if isinstance(cell, tree.Cell) else tree.Cell(span=cell.span, value=cell.value) for cell in cells)
        return tree.Row(span=span, name=_id(name).name, cells=tuple(made))

    def plain(self, span: Span, sign: Token | None, literal: Token) -> tree.Cell:
        return tree.Cell(span=span, value=-number_of(literal) if sign else number_of(literal))

    def span(self, span: Span, literal: Token) -> tree.Cell:
        return tree.Cell(span=span, value=number_of(literal), unit="seconds")

    def strings(self, span: Span, strings: frozenset[str]) -> tree.Cell:
        return tree.Cell(span=span, value=strings)

    def set_(self, span: Span, *strings: Token | None) -> frozenset[str]:
        return frozenset(str(token)[1:-1] for token in strings if token is not None)

    def unknown(self, span: Span, _mark: Token) -> tree.Cell:
        return tree.Cell(span=span, value=tree.UNKNOWN)

    def expect(self, span: Span, outcome: tree.Expect, rule: Token | None, failing: Token | None) -> tree.Expect:
        is_text = failing is not None and failing.type == "STRING"
        guard = _text(failing) if failing is not None and is_text else _name_if(failing)
        return replace(outcome, span=span, rule=_name_if(rule), failing=guard)

    def expect_route(self, span: Span, *names: Token) -> tree.Expect:
        return tree.Expect(span=span, kind="route", instances=tuple(map(_id, names)))

    def expect_reject(self, span: Span, status: Token) -> tree.Expect:
        return tree.Expect(span=span, kind="reject", status=number_of(status))

    def expect_hold(self, span: Span) -> tree.Expect:
        return tree.Expect(span=span, kind="hold")


def _name(token: Token) -> tree.Name:
    return tree.Name(span=token.span, name=str(token))


def _id(token: Token) -> tree.Name:
    """Return the id of an instance, with or without quotes."""
    return tree.Name(span=token.span, name=str(token).strip('"'))


def _name_if(token: Token | None) -> tree.Name | None:
    return None if token is None else _name(token)


def _text(token: Token) -> tree.Text:
    return tree.Text(span=token.span, value=str(token)[1:-1])

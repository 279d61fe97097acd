"""Diagnostics of statements that do not parse: the token that stopped the parser, and the help for it.

Each rule looks at one habit of other languages or one slip. They are tried in order, and the last one fits anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from smetric.policy.advice import ASK_KNOWN, NOTHINGS
from smetric.policy.builtin import BUILTINS
from smetric.policy.diagnostic import Diagnostic, clip
from smetric.policy.lexer import BEFORE_NAMES, CLOSERS, END, OPENERS, OPERAND_ENDS, STATEMENTS, Token, same_line
from smetric.policy.types import BEHIND_NUMBERS, NUMBERS, PRODUCT, base_unit, closest, did_you_mean, truth

_CONDITION = "a condition follows what it decides: `route … when …`"
_NO_LOOPS = "there are no loops: `requests + 1` is one value per instance, `mean(requests)` is over all"
_LAST = "the last `route`, without a `when`, applies otherwise"
#: Marks and words of other languages. The parser may stop at either part of one that is two tokens.
_FOREIGN = {
    "||": "write `or`",
    "//": "comments start with `#`",
    "/*": "comments start with `#`",
    "--": "comments start with `#`",
    "<>": "write `!=`",
    "=<": "write `<=`",
    "**": "write a product: x * x",
    "?": "write `x if c else y`",
    "if": "write `x if c else y`",
    "isnot": "compare with `!=`",
    **{f"{word}{nothing}": ASK_KNOWN for word in ("is", "isnot") for nothing in NOTHINGS},
    "key=": "there is no `key`: write the score itself, e.g. argmin(requests + waiting)",
    "is": "compare with `==`",
}
#: Keywords that define a name in other languages.
DEFINING = {
    "const": "write `param` or `let`",
    "var": "write `let`",
    "fn": "write `def`",
    "func": "write `def`",
    "function": "write `def`",
}
#: Words that start a statement in other languages.
_FOREIGN_STARTS = {
    "if": _CONDITION,
    "else": _CONDITION,
    "elif": _CONDITION,
    "when": _CONDITION,
    "default": _LAST,
    "otherwise": _LAST,
    "filter": "write `keep` or `prefer`",
    "require": "write `keep …`",
    "assert": "to require it of instances write `keep …`, of decisions a `test`",
    "while": _NO_LOOPS,
    "for": _NO_LOOPS,
    "return": "write `route …`",
    "import": "write `use NAME (…)`",
    "from": "write `use NAME (…)`",
    **DEFINING,
}
_STATEMENT_LIST = f"a statement starts with {', '.join(STATEMENTS[:-1])} or {STATEMENTS[-1]}"

_VALUES = frozenset({"NAME", "NUMBER", "DURATION", "STRING", "TRUE", "FALSE", "LBRACE", "LPAR"})
_WORD_OPERATORS = frozenset({"IN", "AND", "OR", "NOT", "IF"})
_OPERATORS = _WORD_OPERATORS | {"PLUS", "MINUS", "STAR", "SLASH", "COMPARE", "LSQB"}
#: Names of the arguments of built-ins.
_ARGUMENTS = frozenset(name for row in BUILTINS.values() for name in row.named)
_MARKS = {
    "EQUAL": "`=`",
    "COMMA": "`,`",
    "COLON": "`:`",
    "DOT": "`.`",
    "VBAR": "`|`",
    "RANGE": "`..`",
    "UNKNOWN": "`?`",
    "MINUS": "`-`",
    "RPAR": "`)`",
    "RSQB": "`]`",
    "RBRACE": "`}`",
    "LPAR": "`(`",
    "LSQB": "`[`",
    "LBRACE": "`{`",
    "NAME": "a name",
    "STRING": "a string",
    "NUMBER": "a number",
    "DURATION": "a duration",
}
#: The words that begin the parts of a test.
_TEST_PARTS = ("with", "given", "instance", "expect")


class ParseStop:
    """Place where a parse stopped; never the first token, as a statement starts with its keyword.

    Args:
        tokens: of the statement.
        place: index of the unexpected one, their number at the end.
        accepted: the terminals accepted there.

    Attributes:
        token: the unexpected token; `END` at the end of the statement.
        before: the tokens before it.
        previous, second_last, following: the tokens around it, or `END`.
        types: types of the second last token, the previous one, and the unexpected one.
        in_test: whether the statement is a test block.
    """

    def __init__(self, tokens: Sequence[Token], place: int, accepted: frozenset[str]) -> None:
        self.tokens = tokens
        self.place = place
        self.accepted = accepted
        self.before = tokens[:place]
        self.token, self.following = self.next(0), self.next(1)
        self.previous, self.second_last = self.next(-1), self.next(-2)
        self.types = (self.second_last.type, self.previous.type, self.token.type)
        self.in_test = tokens[0].type == "TEST"

    def next(self, count: int) -> Token:
        """Return the token *count* places behind the unexpected one, or `END`."""
        at = self.place + count
        return self.tokens[at] if 0 <= at < len(self.tokens) else END

    def around(self) -> Iterator[tuple[Token, Token, Token]]:
        """Yield each token but the first, up to the unexpected one, with its neighbours."""
        return islice(zip(self.tokens, self.tokens[1:], (*self.tokens[2:], END), strict=False), self.place)


def explain(stop: ParseStop) -> Diagnostic:
    """Return the diagnostic for *stop*."""
    return next(found for rule in _RULES if (found := rule(stop)) is not None)


def misplaced_start(token: Token, follower: Token) -> Diagnostic:
    """Return the diagnostic for a name in place of a keyword."""
    to_name = f"to name a value write `let {clip(token)} = …`"
    meant = closest(token, STATEMENTS) or closest(token, BEHIND_NUMBERS)
    if follower.type == "EQUAL":
        help_text = to_name
    elif token in _FOREIGN_STARTS:
        help_text = _FOREIGN_STARTS[token]
    elif meant:
        help_text = f"did you mean `{meant}`?"
    else:
        help_text = to_name if follower.type == "COLON" else _STATEMENT_LIST
    return Diagnostic("statement", f"a statement cannot start with `{clip(token)}`", token.span, help_text)


def _unexpected(token: Token, help_text: str) -> Diagnostic:
    return Diagnostic("syntax", f"did not expect `{clip(token)}` here", token.span, help_text)


# ── tests ────────────────────────────────────────────────────────────────────


def _table(stop: ParseStop) -> Diagnostic | None:
    """A `|` before the first cell of a row or behind the last, a misspelt part of a test, or a unit in a cell."""
    if not stop.in_test:
        return None
    for before, token, behind in stop.around():
        if token.type == "VBAR" and not same_line(before, token):
            return _unexpected(token, "a row starts with the name of its instance, without a `|`")
        if token.type == "VBAR" and (behind is END or not same_line(token, behind)):
            return _unexpected(token, "a row ends with its last cell, without a `|`")
    for before, token, behind in stop.around():
        if token.type == "NAME" and not same_line(before, token) and behind.type not in ("VBAR", "EQUAL"):
            meant = closest(token, ("test",) if behind.type == "STRING" else _TEST_PARTS)
            if meant:
                return _unexpected(token, f"did you mean `{meant}`?")
    for before, token, _ in stop.around():
        if token.type == "NAME" and before.type == "NUMBER" and _in_table(stop, token):
            return _unexpected(token, "cells have no unit: a column has the unit of its feature")
    return None


def _in_table(stop: ParseStop, token: Token) -> bool:
    """Whether *token* follows a `|` of its own line."""
    return any(each.type == "VBAR" and same_line(each, token) and each.start < token.start for each in stop.tokens)


def _bare_word(stop: ParseStop) -> Diagnostic | None:
    """A string without quotes in a cell, or a field of the request in `given` or in a guard without quotes."""
    token = stop.token
    if not stop.in_test:
        return None
    if token.type == "NAME" and stop.previous.type in ("VBAR", "LBRACE", "COMMA"):
        if stop.accepted.isdisjoint({"UNKNOWN", "STRING"}):
            return None
        help_text = truth(token) or f'quote it if it is a string, "{clip(token)}"; an unknown value is `?`'
        return _unexpected(token, help_text)
    if token.type != "DOT" or stop.previous != "req":
        return None
    if any(earlier.type == "FAILING" for earlier in stop.before):
        return _unexpected(token, 'quote a guard that is an expression: failing "req.turn != 0"')
    return _unexpected(token, f"`given` sets fields of the request: write `{stop.following or 'turn'} = …`")


# ── words and marks ──────────────────────────────────────────────────────────


def _brackets(stop: ParseStop) -> Diagnostic | None:
    """A bracket without its counterpart."""
    opened: list[Token] = []
    for token in stop.tokens:
        if token.type in OPENERS:
            opened.append(token)
        elif token.type in CLOSERS:
            if not opened:
                return Diagnostic("bracket", f"`{token}` closes nothing", token.span)
            if OPENERS[opened[-1].type] != token.type:
                help_text = f"`{opened[-1]}` is still open"
                return Diagnostic("bracket", f"did not expect `{token}` here", token.span, help_text)
            opened.pop()
    return Diagnostic("bracket", f"`{opened[-1]}` is not closed", opened[-1].span) if opened else None


def _reserved(stop: ParseStop) -> Diagnostic | None:
    """A keyword in place of a name."""
    token, previous = stop.token, stop.previous
    if token.type != token.upper() or not token.isalpha():
        return None
    if previous.type in BEFORE_NAMES or (stop.accepted == {"NAME"} and previous.type in ("LPAR", "COMMA")):
        return Diagnostic("reserved", f"`{token}` is a reserved word", token.span, "choose another name")
    return None


def _start(stop: ParseStop) -> Diagnostic | None:
    """A line that starts with a misspelt keyword."""
    token = stop.token
    if token.type not in ("NAME", "IF", "ELSE", "WHEN", "FOR") or same_line(stop.previous, token) or stop.in_test:
        return None
    if token.type == "WHEN" and any(earlier.type == "WHEN" for earlier in stop.before):
        return _unexpected(token, "conditions are joined by `and`")
    if token not in _FOREIGN_STARTS and closest(token, _keywords(stop.accepted)):
        return None
    return misplaced_start(token, stop.following)


def _foreign(stop: ParseStop) -> Diagnostic | None:
    """A mark or word of another language."""
    token, previous = stop.token, stop.previous
    if token is END or stop.in_test:
        return None
    if token == "?" and previous.type == "COMPARE":
        return _unexpected(token, "ask `known(…)`: it is whether a value is known")
    if previous == "lambda":
        return _unexpected(previous, "name the formula: `def f(x) = …`; it works on all instances at once")
    both = f"{token}{stop.following}"
    for text in (f"{both}{stop.next(2)}", both, f"{previous}{token}", str(token)):
        if text in _FOREIGN:
            return _unexpected(token, _FOREIGN[text])
    return None


def _sign(stop: ParseStop) -> Diagnostic | None:
    """`=` for `==` or for the colon of a named argument, and other slips around a name."""
    token, previous = stop.token, stop.previous
    if token is END:
        return None
    if previous in _ARGUMENTS and "COLON" in stop.accepted:
        return _unexpected(token, f"an argument is named with a colon: `{previous}: …`")
    if token.type == "EQUAL" and "COMPARE" in stop.accepted:
        return _unexpected(token, "compare with `==`; `=` only follows a name being defined")
    return None


def _chain(stop: ParseStop) -> Diagnostic | None:
    """`a < b < c`."""
    token, previous = stop.token, stop.previous
    if token.type not in ("COMPARE", "IN") or previous.type not in OPERAND_ENDS:
        return None
    depth = 0
    for earlier in reversed(stop.before):
        depth += (earlier.type in CLOSERS) - (earlier.type in OPENERS)
        if depth < 0 or (depth == 0 and earlier.type in ("AND", "OR", "IF", "ELSE", "WHEN", "AS", "COMMA", "WHERE")):
            return None
        if depth == 0 and earlier.type in ("COMPARE", "IN"):
            return Diagnostic("chain", "comparisons do not chain", token.span, "write `a < b and b < c`")
    return None


def _set(stop: ParseStop) -> Diagnostic | None:
    """`in [0, 5]` of a parameter, `x in ["a", "b"]`, or `x in ("a", "b")`."""
    token = stop.token
    if token is not END and stop.tokens[0].type == "PARAM" and stop.previous.type == "IN":
        return _unexpected(token, "a range is written `0..5` or `0..`, choices `{a, b}`")
    if token.type not in ("LSQB", "COMMA"):
        return None
    before = list(stop.before)
    if token.type == "COMMA":
        while before and before[-1].type == "STRING":
            before.pop()
        if not before or before.pop().type != "LPAR":
            return None
    return _unexpected(token, 'a set is written {"a", "b"}') if before and before[-1].type == "IN" else None


def _comma(stop: ParseStop) -> Diagnostic | None:
    """Two values in a row in a call, a set, `with` or `given`."""
    token = stop.token
    if "COMMA" in stop.accepted and stop.in_test and token.type == "EQUAL" and stop.previous.type == "NAME":
        return _unexpected(stop.previous, "a comma is missing before it")
    if "COMMA" not in stop.accepted or token.type not in _VALUES or stop.previous.type not in OPERAND_ENDS:
        return None
    if token.type == "NAME" and closest(token, _keywords(stop.accepted)):
        return None
    return _unexpected(token, "a comma is missing before it")


# ── numbers ──────────────────────────────────────────────────────────────────


def _separator(stop: ParseStop) -> Diagnostic | None:
    """`1,000`, or `0,9`."""
    token, before = stop.token, stop.previous
    if token.type != "COMMA" or before.type != "NUMBER":
        return None
    parts, end = [str(before)], before.end
    for comma, behind in zip(stop.tokens[stop.place :: 2], stop.tokens[stop.place + 1 :: 2], strict=False):
        if (comma.type, comma.start, behind.type, behind.start) != ("COMMA", end, "NUMBER", comma.end):
            break
        parts.append(str(behind))
        end = behind.end
    if len(parts) == 1:
        return None
    if len(parts) == 2 and (len(parts[1]) != 3 or parts[0] == "0"):
        return _unexpected(token, f"decimals follow a dot: write {'.'.join(parts)}")
    return _unexpected(token, f"numbers have no separators: write {''.join(parts)}")


def _number(stop: ParseStop) -> Diagnostic | None:
    """A slip in a number or its unit."""
    number, word, token = stop.second_last, stop.previous, stop.token
    touches = number.end == word.start
    match stop.types:
        case ("NUMBER", "NAME", "NAME") if touches:  # 4k tokens
            return Diagnostic("unit", f"unknown unit `{clip(word)}`", word.span, NUMBERS)
        case ("NUMBER", "NAME", "LPAR") if word.end == token.start:  # 3 norm(v)
            return _unexpected(word, f"{PRODUCT} {clip(number)} * {clip(word)}(…)")
        case ("NUMBER", "NAME", _) if base_unit(word) is None and (meant := did_you_mean(word, BEHIND_NUMBERS)):
            return Diagnostic("unit", f"unknown unit `{clip(word)}`", word.span, meant)  # 2 annd x
        case (_, "NUMBER", "PER"):  # 5 per second
            help_text = "e.g. 5 requests per second"
            return Diagnostic("unit", "a unit is missing before `per`", token.span, help_text)
        case ("NUMBER", "NAME", "SLASH"):  # 5 tokens/s
            return _unexpected(token, "units divide with `per`: 5 tokens per second")
        case (_, "NUMBER", "DOT") if word.end == token.start:  # 1.
            return _unexpected(token, f"a digit follows the dot: write {clip(word)}.0, or {clip(word)}")
    return None


# ── statements ───────────────────────────────────────────────────────────────


def _order(stop: ParseStop) -> Diagnostic | None:
    """Parts of a statement in the wrong order, or that it does not have."""
    token = stop.token
    earlier = {each.type for each in stop.before}
    if token.type == "RETRY" and earlier & {"WHEN", "AS"}:
        return _unexpected(token, 'the condition follows it: reject 429 "…" retry … when … as …')
    if token.type == "WHEN" and stop.second_last.type == "AS":
        return _unexpected(token, "the label comes last: … when … as …")
    if token.type == "ELSE" and "IF" not in earlier:
        return _unexpected(token, _CONDITION)
    if token.type == "RPAR" and stop.tokens[0].type == "DEF" and stop.place == 3:
        message = "a definition takes at least one argument"
        return Diagnostic("arguments", message, token.span, "use `let` for a value without arguments")
    if token.type == "WHERE":
        return _unexpected(token, "`where` belongs inside a call: argmin(… where …)")
    return None


def _name(stop: ParseStop) -> Diagnostic | None:
    """A name in quotes, or with a hyphen or a dot in it, in a header, a label or a table."""
    token = stop.token
    if token.type == "STRING" and stop.accepted == {"NAME"}:
        return _unexpected(token, "a name is written without quotes")
    if token.type not in ("MINUS", "DOT") or stop.previous.type != "NAME" or not same_line(stop.previous, token):
        return None
    if stop.in_test or stop.second_last.type == "AS" or stop.tokens[0].type in ("POLICY", "LIBRARY"):
        return _unexpected(token, "names have letters, digits and `_` only")
    return None


def _end(stop: ParseStop) -> Diagnostic | None:
    """A statement that ends too early."""
    if stop.token is not END:
        return None
    first, last = stop.tokens[0], stop.tokens[-1]
    help_text = _expected(stop, stop.accepted - _OPERATORS or stop.accepted)
    if first.type == "USE" and stop.accepted == {"LPAR"}:
        help_text = f"name what it takes: use {clip(last)} (a, b)"
    elif "ELSE" in stop.accepted and any(token.type == "IF" for token in stop.tokens):
        help_text += "; the condition of a rule or a filter follows `when`"
    return Diagnostic("unfinished", f"this `{clip(first)}` is not finished", last.span, help_text)


def _anything(stop: ParseStop) -> Diagnostic:
    token = stop.token
    if token.type == "NAME":
        meant = closest(token, _keywords(stop.accepted))
        if meant:
            return _unexpected(token, f"did you mean `{meant}`?")
        if stop.previous.type == "NAME" and closest(stop.previous, ("not",)):
            return _unexpected(stop.previous, "did you mean `not`?")
    return _unexpected(token, _expected(stop, stop.accepted))


_RULES: tuple[Callable[[ParseStop], Diagnostic | None], ...] = (
    _table,
    _bare_word,
    _brackets,
    _reserved,
    _start,
    _foreign,
    _sign,
    _chain,
    _set,
    _separator,
    _number,
    _comma,
    _order,
    _name,
    _end,
    _anything,
)


def _keywords(accepted: frozenset[str]) -> list[str]:
    """Return the keywords among terminals."""
    marks = _MARKS.keys() | (_OPERATORS - _WORD_OPERATORS)
    return [name.lower() for name in accepted if name.isalpha() and name not in marks]


def _expected(stop: ParseStop, accepted: frozenset[str]) -> str:
    """Return what of *accepted* would do, in words; empty if the list is long."""
    parts: list[str] = []
    is_unit = stop.previous.type == "NUMBER" and "VBAR" not in accepted  # a name would be a unit there
    rest = accepted - {"$END", "NAME" if is_unit else ""}
    if rest >= _VALUES:
        parts.append("a value")
        rest -= _VALUES | {"MINUS", "NOT"}
    if len(rest & _OPERATORS) > 3:
        rest -= _OPERATORS
    parts += sorted(_MARKS.get(name, f"`{name.lower()}`") for name in rest if name in _MARKS or name.isalpha())
    if not parts or len(parts) > 6:
        return ""
    return f"expected {', '.join(parts[:-1])} or {parts[-1]}" if len(parts) > 1 else f"expected {parts[0]}"

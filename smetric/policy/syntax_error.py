"""Help for statements that do not parse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from smetric.policy.builtin import BUILTINS
from smetric.policy.diagnostic import Diagnostic, clip
from smetric.policy.lexer import BEFORE_NAMES, CLOSERS, END, OPENERS, OPERAND_ENDS, STATEMENTS, Token, same_line
from smetric.policy.types import BEHIND_NUMBERS, NUMBERS, PRODUCT, base_unit, closest, did_you_mean, truth

# What other languages write, and what is written here instead.
#
# Where it stops the parser, and what is said of anything else, is in `syntax_error`.

#: What other languages write, and what is written here instead; where it is two marks, the parser stops at either.
FOREIGN = {
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
    "is": "compare with `==`",
}
CONDITION = "a condition stands behind what it decides: `route … when …`"
_LAST = "the last `route`, without a `when`, is what applies otherwise"
#: What names something in other languages, and what does here.
DEFINING = {
    "const": "write `param` or `let`",
    "var": "write `let`",
    "fn": "write `def`",
    "func": "write `def`",
    "function": "write `def`",
}
#: What statements start with in other languages, and what stands here instead.
ELSEWHERE = {
    "if": CONDITION,
    "else": CONDITION,
    "elif": CONDITION,
    "when": CONDITION,
    "default": _LAST,
    "otherwise": _LAST,
    "filter": "write `keep` or `prefer`",
    "require": "write `keep …`",
    "return": "write `route …`",
    "import": "write `use NAME (…)`",
    "from": "write `use NAME (…)`",
    **DEFINING,
}


# Where a parse stopped: the token nobody expected, what stands around it, and the words that say so.
#
# What it means is told in `syntax_error` and `case_error`.


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


# What to tell somebody who writes a number as it is written elsewhere, where that does not parse.
#
# What parses all the same, as `4k` does, is the checker's of units.


def explain_number(stop: Stop) -> Diagnostic | None:
    """The diagnostic for *stop*; None where no number is the reason."""
    return next((found for rule in _RULES if (found := rule(stop)) is not None), None)


def _separator(stop: Stop) -> Diagnostic | None:
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
        return unexpected(token, f"decimals follow a dot: write {'.'.join(parts)}")
    return unexpected(token, f"numbers have no separators: write {''.join(parts)}")


def _thousands(stop: Stop) -> Diagnostic | None:
    """`4k tokens`: the unit stands behind what was taken for one."""
    number, unit = stop.second_last, stop.previous
    if stop.token.type != "NAME" or unit.type != "NAME" or number.type != "NUMBER" or number.end != unit.start:
        return None
    return Diagnostic("unit", f"unknown unit `{clip(unit)}`", unit.span, NUMBERS)


def _product(stop: Stop) -> Diagnostic | None:
    """`3 norm(v)`: a call, taken for a unit."""
    token, word, number = stop.token, stop.previous, stop.second_last
    if token.type != "LPAR" or word.type != "NAME" or word.end != token.start:
        return None
    return unexpected(word, f"{PRODUCT} {clip(number)} * {clip(word)}(…)") if number.type == "NUMBER" else None


def _mistyped(stop: Stop) -> Diagnostic | None:
    """`2 annd mean(requests) < 3`: the word was taken for a unit."""
    word = stop.previous
    if word.type != "NAME" or stop.second_last.type != "NUMBER":
        return None
    meant = did_you_mean(word, BEHIND_NUMBERS) if base_unit(word) is None else ""
    return Diagnostic("unit", f"unknown unit `{clip(word)}`", word.span, meant) if meant else None


def _bare_per(stop: Stop) -> Diagnostic | None:
    if stop.token.type != "PER" or stop.previous.type != "NUMBER":
        return None
    return Diagnostic("unit", "a unit is missing before `per`", stop.token.span, "e.g. 5 requests per second")


def _divided(stop: Stop) -> Diagnostic | None:
    """`5 tokens/s`, where no division can stand."""
    if (stop.second_last.type, stop.previous.type, stop.token.type) != ("NUMBER", "NAME", "SLASH"):
        return None
    return unexpected(stop.token, "units divide with `per`: 5 tokens per second")


def _bare_point(stop: Stop) -> Diagnostic | None:
    """`1.`"""
    token, number = stop.token, stop.previous
    if token.type != "DOT" or number.type != "NUMBER" or number.end != token.start:
        return None
    return unexpected(token, f"a digit follows the dot: write {clip(number)}.0, or {clip(number)}")


_RULES: tuple[Callable[[Stop], Diagnostic | None], ...] = (
    _separator,
    _thousands,
    _product,
    _mistyped,
    _bare_per,
    _divided,
    _bare_point,
)


# What to tell somebody whose `test` does not parse: habits from other tables, words and values.
#
# What is told of any statement is in `syntax_error`.

#: The words that begin the parts of a test.
_PARTS = ("with", "given", "instance", "expect")


def explain_case(stop: Stop) -> Diagnostic | None:
    """The diagnostic for a *stop* in a test; None where it is in another statement, or like those there."""
    return next((found for rule in _CASE_RULES if (found := rule(stop)) is not None), None) if stop.in_test else None


def _outer_bar(stop: Stop) -> Diagnostic | None:
    """A `|` before the first cell of a row, or behind the last."""
    for before, token, behind in _around(stop):
        if token.type != "VBAR":
            continue
        if not same_line(before, token):
            return unexpected(token, "a row starts with the name of its instance, without a `|`")
        if behind is END or not same_line(token, behind):
            return unexpected(token, "a row ends with its last cell, without a `|`")
    return None


def _part(stop: Stop) -> Diagnostic | None:
    """A word that begins no part of a test, but was meant to."""
    for before, token, behind in _around(stop):
        starts = token.type == "NAME" and not same_line(before, token)
        is_other = behind.type in ("VBAR", "EQUAL")  # a row, or a setting
        is_next = behind.type == "STRING"  # the sentence of another test
        meant = closest(token, ("test",) if is_next else _PARTS) if starts and not is_other else ""
        if meant:
            return unexpected(token, f"did you mean `{meant}`?")
    return None


def _unit(stop: Stop) -> Diagnostic | None:
    """A unit in a cell."""
    for before, token, _ in _around(stop):
        if token.type == "NAME" and before.type == "NUMBER" and _in_table(stop, token):
            return unexpected(token, "cells carry no unit: a column has that of its feature")
    return None


def _bare_word(stop: Stop) -> Diagnostic | None:
    """A string without quotes in a cell."""
    token, previous = stop.token, stop.previous
    if token.type != "NAME" or previous.type not in ("VBAR", "LBRACE", "COMMA"):
        return None
    if "UNKNOWN" not in stop.accepted and "STRING" not in stop.accepted:
        return None
    help_text = truth(token) or f'quote it if it is a string, "{clip(token)}"; what nobody knows is `?`'
    return unexpected(token, help_text)


def _field(stop: Stop) -> Diagnostic | None:
    """`req.` in `given`, or in a guard without quotes."""
    token = stop.token
    if token.type != "DOT" or stop.previous != "req":
        return None
    if any(earlier.type == "FAILING" for earlier in stop.before):
        return unexpected(token, 'quote what is no name: failing "req.turn != 0"')
    return unexpected(token, f"`given` is of the request, so write `{stop.following or 'turn'} = …`")


_CASE_RULES: tuple[Callable[[Stop], Diagnostic | None], ...] = (_outer_bar, _part, _unit, _bare_word, _field)


def _around(stop: Stop) -> Iterator[tuple[Token, Token, Token]]:
    """Each token up to where the parse stopped, but the first, with its neighbours."""
    tokens = stop.tokens
    return islice(zip(tokens, tokens[1:], (*tokens[2:], END), strict=False), stop.place)


def _in_table(stop: Stop, token: Token) -> bool:
    """Whether *token* stands behind a `|` of its own line."""
    return any(each.type == "VBAR" and same_line(each, token) and each.start < token.start for each in stop.tokens)


# What to tell somebody whose statement does not parse: from the token that stopped the parser to a diagnostic.
#
# The rules stand in the order in which they are tried; the last one fits anything.

STATEMENT_LIST = f"a statement starts with {', '.join(STATEMENTS[:-1])} or {STATEMENTS[-1]}"

_VALUES = frozenset({"NAME", "NUMBER", "DURATION", "STRING", "TRUE", "FALSE", "LBRACE", "LPAR"})
_OPERATORS = frozenset({"PLUS", "MINUS", "STAR", "SLASH", "COMPARE", "IN", "AND", "OR", "NOT", "IF", "LSQB"})
#: The names that arguments of built-ins have.
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


def explain(stop: Stop) -> Diagnostic:
    """The diagnostic for *stop*."""
    return next(found for rule in _STATEMENT_RULES if (found := rule(stop)) is not None)


def misplaced_start(token: Token, follower: Token) -> Diagnostic:
    """A name where a statement should start."""
    if follower.type == "EQUAL":
        help_text = _to_name(token)
    elif token in ELSEWHERE:
        help_text = ELSEWHERE[token]
    else:
        meant = closest(token, STATEMENTS) or closest(token, BEHIND_NUMBERS)
        help_text = f"did you mean `{meant}`?" if meant else STATEMENT_LIST
        if not meant and follower.type == "COLON":
            help_text = _to_name(token)
    return Diagnostic("statement", f"a statement cannot start with `{clip(token)}`", token.span, help_text)


def _to_name(token: Token) -> str:
    return f"to name a value write `let {clip(token)} = …`"


def _brackets(stop: Stop) -> Diagnostic | None:
    """An opening bracket that nothing closes, or a closing one that nothing opened."""
    open_: list[Token] = []
    for token in stop.tokens:
        if token.type in OPENERS:
            open_.append(token)
        elif token.type in CLOSERS:
            if not open_:
                return Diagnostic("bracket", f"`{token}` closes nothing", token.span)
            if OPENERS[open_[-1].type] != token.type:
                return Diagnostic(
                    "bracket", f"did not expect `{token}` here", token.span, f"`{open_[-1]}` is still open"
                )
            open_.pop()
    if open_:
        return Diagnostic("bracket", f"`{open_[-1]}` is not closed", open_[-1].span)
    return None


def _reserved(stop: Stop) -> Diagnostic | None:
    token, previous = stop.token, stop.previous
    if not _is_word(token):
        return None
    if previous.type in BEFORE_NAMES or (stop.accepted == {"NAME"} and previous.type in ("LPAR", "COMMA")):
        return Diagnostic("reserved", f"`{token}` is a reserved word", token.span, "choose another name")
    return None


def _start(stop: Stop) -> Diagnostic | None:
    token = stop.token
    if token.type not in ("NAME", "IF", "ELSE", "WHEN") or same_line(stop.previous, token) or stop.in_test:
        return None
    if token.type == "WHEN" and any(earlier.type == "WHEN" for earlier in stop.before):
        return unexpected(token, "conditions are joined by `and`")
    if token not in ELSEWHERE and closest(token, _words(stop.accepted)):
        return None
    return misplaced_start(token, stop.following)


def _equals(stop: Stop) -> Diagnostic | None:
    token = stop.token
    if token.type != "EQUAL" or "COMPARE" not in stop.accepted:
        return None
    return unexpected(token, "compare with `==`; `=` only follows a name being defined")


def _argument(stop: Stop) -> Diagnostic | None:
    """The name of an argument without its colon."""
    if stop.token is END or stop.previous not in _ARGUMENTS or "COLON" not in stop.accepted:
        return None
    return unexpected(stop.token, f"an argument is named with a colon: `{stop.previous}: …`")


def _foreign(stop: Stop) -> Diagnostic | None:
    """A mark or word of another language."""
    token, previous = stop.token, stop.previous
    if token is END or stop.in_test:
        return None
    if token == "?" and previous.type == "COMPARE":
        return unexpected(token, "whether it is known is asked with `known(…)`")
    for text in (f"{token}{stop.following}", f"{previous}{token}", str(token)):
        if text in FOREIGN:
            return unexpected(token, FOREIGN[text])
    return None


def _chain(stop: Stop) -> Diagnostic | None:
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


def _range(stop: Stop) -> Diagnostic | None:
    if stop.token is END or stop.tokens[0].type != "PARAM" or stop.previous.type != "IN":
        return None
    return unexpected(stop.token, "a range is written `0..5` or `0..`, choices `{a, b}`")


def _set(stop: Stop) -> Diagnostic | None:
    """`x in ["a", "b"]`, or `x in ("a", "b")`."""
    token = stop.token
    if token.type not in ("LSQB", "COMMA"):
        return None
    before = list(stop.before)
    if token.type == "COMMA":
        while before and before[-1].type == "STRING":
            before.pop()
        if not before or before.pop().type != "LPAR":
            return None
    return unexpected(token, 'a set is written {"a", "b"}') if before and before[-1].type == "IN" else None


def _label(stop: Stop) -> Diagnostic | None:
    """A `when` behind the label, or a `retry` behind either."""
    token = stop.token
    if token.type == "RETRY" and any(earlier.type in ("WHEN", "AS") for earlier in stop.before):
        return unexpected(token, 'the condition follows it: reject 429 "…" retry … when … as …')
    if token.type != "WHEN" or stop.second_last.type != "AS":
        return None
    return unexpected(token, "the label comes last: … when … as …")


def _else(stop: Stop) -> Diagnostic | None:
    """An `else` of no `if` in this statement."""
    if stop.token.type != "ELSE" or any(earlier.type == "IF" for earlier in stop.before):
        return None
    return unexpected(stop.token, CONDITION)


def _no_arguments(stop: Stop) -> Diagnostic | None:
    if stop.token.type != "RPAR" or stop.tokens[0].type != "DEF" or stop.place != 3:
        return None
    return Diagnostic(
        "arguments",
        "a definition takes at least one argument",
        stop.token.span,
        "a value without arguments is a `let`",
    )


def _where(stop: Stop) -> Diagnostic | None:
    if stop.token.type != "WHERE":
        return None
    return unexpected(stop.token, "`where` stands inside a call: argmin(… where …)")


def _unquoted_name(stop: Stop) -> Diagnostic | None:
    """A hyphen in a name that the header, a label or a table gives, or quotes around it."""
    token = stop.token
    if token.type == "STRING" and stop.accepted == {"NAME"}:
        return unexpected(token, "a name is written without quotes")
    if token.type not in ("MINUS", "DOT") or stop.previous.type != "NAME" or not same_line(stop.previous, token):
        return None
    if stop.in_test or stop.second_last.type == "AS" or stop.tokens[0].type in ("POLICY", "LIBRARY"):
        return unexpected(token, "names have letters, digits and `_` only")
    return None


def _end(stop: Stop) -> Diagnostic | None:
    if stop.token is not END:
        return None
    first, last = stop.tokens[0], stop.tokens[-1]
    help_text = _expected(stop, stop.accepted - _OPERATORS or stop.accepted)
    if first.type == "USE" and stop.accepted == {"LPAR"}:
        help_text = f"say what it takes: use {clip(last)} (a, b)"
    elif "ELSE" in stop.accepted and any(token.type == "IF" for token in stop.tokens):
        help_text += "; the condition of a rule or a filter follows `when`"
    return Diagnostic("unfinished", f"this `{clip(first)}` is not finished", last.span, help_text)


def _anything(stop: Stop) -> Diagnostic:
    token = stop.token
    if token.type == "NAME":
        meant = closest(token, _words(stop.accepted))
        if meant:
            return unexpected(token, f"did you mean `{meant}`?")
        if stop.previous.type == "NAME" and closest(stop.previous, ("not",)):
            return unexpected(stop.previous, "did you mean `not`?")
    return unexpected(token, _expected(stop, stop.accepted))


_STATEMENT_RULES: tuple[Callable[[Stop], Diagnostic | None], ...] = (
    explain_case,
    _brackets,
    _reserved,
    _start,
    _foreign,
    _argument,
    _equals,
    _chain,
    _range,
    _set,
    explain_number,
    _label,
    _else,
    _no_arguments,
    _where,
    _unquoted_name,
    _end,
    _anything,
)


def _is_word(token: Token) -> bool:
    return token.type == token.upper() and token.isalpha()


def _words(accepted: frozenset[str]) -> list[str]:
    """The keywords among terminals."""
    return [
        name.lower()
        for name in accepted
        if name not in _MARKS and name.isalpha() and name not in _OPERATORS - {"AND", "OR", "IN", "NOT", "IF"}
    ]


def _expected(stop: Stop, accepted: frozenset[str]) -> str:
    """What of *accepted* would do, in words; empty where the list would help nobody."""
    parts: list[str] = []
    is_unit = stop.previous.type == "NUMBER" and "VBAR" not in accepted  # what a name would be there; it helps nobody
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

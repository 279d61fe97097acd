"""What to tell somebody whose statement does not parse: from the token that stopped the parser to a diagnostic.

The rules stand in the order in which they are tried; the last one fits anything.
"""

from __future__ import annotations

from collections.abc import Callable

from smetric.policy.builtin import BUILTINS
from smetric.policy.case_error import explain_case
from smetric.policy.diagnostic import Diagnostic, clip
from smetric.policy.foreign import CONDITION, ELSEWHERE, FOREIGN
from smetric.policy.lexer import BEFORE_NAMES, CLOSERS, OPENERS, OPERAND_ENDS, STATEMENTS, same_line
from smetric.policy.number_error import explain_number
from smetric.policy.stop import Stop, unexpected
from smetric.policy.suggestion import BEHIND_NUMBERS, closest
from smetric.policy.token import END, Token

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
    return next(found for rule in _RULES if (found := rule(stop)) is not None)


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


_RULES: tuple[Callable[[Stop], Diagnostic | None], ...] = (
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

"""Keywords and operators of the language: forms and meanings, for the manual, hovers and completion."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class Role(enum.Enum):
    """Role of a keyword."""

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
    """Keyword: its form, and its meaning in one or two sentences."""

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
        "`param LOAD = requests in {requests, unprefilled}` chooses a feature. The file is checked with each choice; "
        "`0 LOAD` has the chosen feature's unit.",
    ),
    Keyword(
        "let",
        Role.STATEMENT,
        "let NAME = expr",
        "Names a value. It is computed when it is first used, once, over the candidates left where it is defined.",
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
        "Hard filter. If no candidate is left, the answer is 503, named after the filter.",
    ),
    Keyword(
        "prefer",
        Role.STATEMENT,
        "prefer mask when cond as label",
        "Soft filter. It is skipped if it would leave no candidate.",
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
    Keyword("as", Role.PART, "as label", "Names a rule in traces and tests."),
    Keyword("for", Role.PART, "hold for 500ms", "The longest time that a request is held."),
    Keyword("retry", Role.PART, "retry 2s", "Value of the header Retry-After."),
    Keyword("per", Role.PART, "5 tokens per second", "Divides units."),
    Keyword(
        "where",
        Role.PART,
        "mean(v where m, default: x)",
        "Only the candidates for which it holds. A pick of them may be empty: its rule is then skipped.",
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
        "The expected decision; also `expect reject 429` and `expect hold`.",
    ),
    Keyword("failing", Role.CASE, 'failing guard, failing "req.turn != 0"', "A guard that must have failed."),
)

#: Every reserved word.
KEYWORDS: Mapping[str, Keyword] = {row.word: row for row in _ROWS}

#: Forms and meanings of the operators, from the loosest to the tightest.
OPERATORS = (
    ("x if c else y", "chooses; c is one truth value, or one per instance"),
    ("a or b", "truth"),
    ("a and b", "truth"),
    ("not a", "truth"),
    ("== != <= >= < >", "compare equal units; they do not chain"),
    ('x in {"a", "b"}, x not in s', "membership in a set of strings"),
    ("x + y, x - y", "of equal units"),
    ("x * y, x / y", "units multiply and divide; the range of a divisor must exclude 0"),
    ("-x", "sign"),
    ("v[s]", "the value of instance s"),
)

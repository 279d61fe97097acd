"""The codes of findings: stable names for tools, each with what it is about.

A code is never given another meaning; messages and helps may change.
"""

from __future__ import annotations

from collections.abc import Mapping

#: What stops a policy from loading.
ERRORS: Mapping[str, str] = {
    "arguments": "A call has arguments that its function does not take, or lacks some.",
    "bare-fraction": "A number starts with a dot.",
    "bracket": "A bracket is not closed, or closes nothing.",
    "branches": "Both sides of `if … else …` must be of one kind and unit.",
    "chain": "Comparisons do not chain.",
    "character": "A character has no meaning here.",
    "choices": "A parameter that names a feature must list its choices.",
    "column": "A test's table has a column twice.",
    "condition": "A condition must be one truth value.",
    "default": "A parameter's default is outside its own range or choices.",
    "divisor": "A divisor may be 0.",
    "domain": "A parameter's range or choices do not fit its default.",
    "duration": "A number of seconds is needed.",
    "encoding": "The file is not UTF-8.",
    "expect": "What a test expects cannot be.",
    "filter-order": "A filter stands below a pick.",
    "given": "A test gives something twice, or `last` is no instance of its table.",
    "header": "A file starts with `policy NAME` or `library NAME`, once.",
    "hidden": "A name hides a feature or a built-in.",
    "hold": "A `hold` without a `when` would hold everything.",
    "label": "Two rules have one label.",
    "library": "A library holds something else than `param`, `def` and `use`, or is asked to decide.",
    "long-name": "A name is too long.",
    "lookup": "Only a value per instance can be looked up, and only by an instance.",
    "mask": "A filter needs a truth value per instance.",
    "maybe": "An instance that may be absent is looked up.",
    "nobody": "A number over nobody needs a `default:`.",
    "operand": "An operator does not take this kind of value.",
    "overflow": "A number could grow past 1e300.",
    "range": "A number could lie outside what its place allows.",
    "redefined": "A name is defined twice.",
    "reserved": "A reserved word is used as a name.",
    "route": "`route` needs an instance.",
    "row": "A row of a test's table does not fit it.",
    "set": "A set holds strings only.",
    "setting": "A configured value, or one of a test's `with`, does not fit its parameter.",
    "statement": "A statement starts with something that is no keyword.",
    "status": "`reject` needs an error status.",
    "syntax": "A word or sign stands where it cannot.",
    "test": "Two tests have one sentence.",
    "too-deep": "Expressions nest too deeply.",
    "too-large": "A number or the policy itself is too large.",
    "too-long": "The file is too long.",
    "too-many-errors": "More errors follow.",
    "unclosed-string": "A string is not closed on its line.",
    "undecided": "The policy may decide nothing.",
    "unfinished": "A statement ends too early.",
    "unit": "A unit is unknown or missing.",
    "units": "Values of different units meet.",
    "unknown-feature": "There is no such feature.",
    "unknown-field": "A request has no such field.",
    "unknown-function": "There is no such function.",
    "unknown-name": "There is no such name.",
    "unreachable": "Nothing can reach a statement.",
    "use": "A library is not there, cannot be used, or does not define a name.",
    "value": "A value of a test does not fit its feature or field.",
    "where": "`where` stands where it cannot.",
}

#: What does no harm.
WARNINGS: Mapping[str, str] = {
    "constant": "A condition is the same in every decision.",
    "late-guard": "Every decision looks something up before a guard that could spare it.",
    "stray-doc": "A `##` comment documents nothing.",
    "unfilled": "A feature is read that no configured source fills.",
    "unused": "A name is never used.",
}

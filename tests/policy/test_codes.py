"""The codes of findings are a fixed list."""

from __future__ import annotations

import re
from pathlib import Path

import smetric.policy
from smetric.policy.diagnostic import ERRORS, WARNINGS, WAYS_OUT

_MADE = re.compile(r"(?:\.error|\.warn|Bad|Diagnostic)\(\s*\"([a-z0-9-]+)\"")


def test_every_code_that_is_given_is_listed_and_every_listed_one_is_given() -> None:
    package = Path(smetric.policy.__file__).parent
    made = {code for path in package.rglob("*.py") for code in _MADE.findall(path.read_text())}
    assert made == {*ERRORS, *WARNINGS}


def test_a_code_is_an_error_or_a_warning_and_says_what_it_is_about() -> None:
    assert not ERRORS.keys() & WARNINGS.keys()
    assert list(ERRORS) == sorted(ERRORS)
    assert list(WARNINGS) == sorted(WARNINGS)
    assert list(WAYS_OUT) == [*ERRORS, *WARNINGS]
    assert all(text.endswith(".") for text in (*ERRORS.values(), *WARNINGS.values()))


def test_the_manual_lists_every_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "language.md").read_text()
    rows = [(code, "error", text) for code, text in ERRORS.items()]
    rows += [(code, "warning", text) for code, text in WARNINGS.items()]
    assert [row for row in rows if "| `{}` | {} | {} |\n".format(*row) not in page] == []

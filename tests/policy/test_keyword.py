"""The table of reserved words is the grammar's."""

import re

from smetric.policy.lexer import HEADERS, KEYWORDS, STATEMENTS, Role
from smetric.policy.parser import grammar_path


def test_every_reserved_word_of_the_grammar_has_a_row_and_none_else() -> None:
    assert set(KEYWORDS) == set(re.findall(r'"([a-z]+)"', grammar_path().read_text()))


def test_headers_and_statements_are_those_the_lexer_cuts_at() -> None:
    assert tuple(word for word, row in KEYWORDS.items() if row.role is Role.HEADER) == HEADERS
    assert tuple(word for word, row in KEYWORDS.items() if row.role is Role.STATEMENT) == STATEMENTS


def test_a_row_shows_its_word_in_use() -> None:
    for word, row in KEYWORDS.items():
        assert word in row.form.replace("|", " ").replace(",", " ").split(), word
        assert row.doc.endswith(".")

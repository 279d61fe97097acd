"""Table of keywords."""

import re

from smetric.policy.keywords import KEYWORDS, Role
from smetric.policy.lexer import HEADERS, STATEMENTS, grammar_path


def test_keywords_are_the_reserved_words_of_the_grammar() -> None:
    assert set(KEYWORDS) == set(re.findall(r'"([a-z]+)"', grammar_path().read_text()))


def test_keywords_are_those_the_lexer_cuts_at() -> None:
    assert tuple(word for word, row in KEYWORDS.items() if row.role is Role.HEADER) == HEADERS
    assert tuple(word for word, row in KEYWORDS.items() if row.role is Role.STATEMENT) == STATEMENTS


def test_keyword_form_shows_the_keyword() -> None:
    for word, row in KEYWORDS.items():
        assert word in row.form.replace("|", " ").replace(",", " ").split(), word
        assert row.doc.endswith(".")

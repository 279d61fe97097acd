"""Reference of the language: complete in every format, and short."""

import json
import re

import pytest

from smetric.features import VOCABULARY
from smetric.fleet.fleet import SCRAPED, Candidates, Fleet
from smetric.fleet.instance import Instance
from smetric.policy import load
from smetric.policy.builtin import BUILTINS
from smetric.policy.keywords import KEYWORDS, OPERATORS
from smetric.policy.layout import format_text
from smetric.policy.testing import suite_of
from smetric.policy.types import BASES
from smetric.policy.vocabulary import Unknown
from smetric.tools.reference import MAX_LINES, REFERENCE_FORMATS, chapters, unknown_of


@pytest.mark.parametrize("form", REFERENCE_FORMATS)
def test_reference_has_every_word_operator_builtin_unit_feature_and_field(form: str) -> None:
    text = REFERENCE_FORMATS[form]()
    if form == "json":
        text = "\n".join(str(chapter) for chapter in json.loads(text).values())
    wanted = [
        *KEYWORDS,
        *BASES.values(),
        *(row.signature for row in BUILTINS.values()),
        *VOCABULARY.features,
        *(f"req.{name}" for name in VOCABULARY.request),
    ]
    assert [word for word in wanted if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)] == []
    assert [form for form, _ in OPERATORS if form not in text] == []


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_reference_is_short_enough_for_a_prompt(form: str) -> None:
    assert REFERENCE_FORMATS[form]().count("\n") + 1 < MAX_LINES


def test_reference_example_passes_its_tests_and_is_formatted() -> None:
    (code,) = [chapter.code for chapter in chapters() if chapter.code]
    load(code, VOCABULARY)
    assert [result.failure for result in suite_of(code, VOCABULARY).run()] == [""]
    assert format_text(code) == code


def test_reference_in_json_names_the_columns_of_each_row() -> None:
    found = json.loads(REFERENCE_FORMATS["json"]())
    rows = {row["feature"]: row for row in found["features"]["rows"]}
    assert rows["hit_len L"]["unit"] == "tokens"
    assert rows["hit_len L"]["range"] == "0..req.prompt_len"
    assert rows["requests"]["range"] == "0.."
    assert rows["healthy"]["range"] == "bool"


def test_reference_in_markdown_escapes_bars_in_tables() -> None:
    text = REFERENCE_FORMATS["markdown"]()
    assert "`instance \\| hit_len \\| age(requests)`" in text
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.M)
    for table in tables:
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1, table


@pytest.mark.parametrize("name", [name for name in SCRAPED if VOCABULARY.features[name].unknown is Unknown.MEAN])
def test_reference_states_the_value_that_the_fleet_takes_for_an_unknown_load(name: str) -> None:
    fleet = Fleet([Instance("a", "http://a")], VOCABULARY)
    fleet["a"].charge(3, 10)
    told = unknown_of(VOCABULARY.features[name])
    assert told.startswith("the mean of the known, ")
    is_counted = told.endswith("at least the router's own count")
    assert is_counted or told.endswith("else `0`")
    assert fleet.snapshot(Candidates(fleet.instances), [name]).columns[name] == [3 if is_counted else 0]

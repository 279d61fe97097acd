from __future__ import annotations

import re
from pathlib import Path

import smetric
from smetric import names

GOLDEN = Path(__file__).with_name("names.golden")
TYPES = {"string", "int", "double", "bool", "string[]"}


def test_attribute_names_are_no_prefixes_of_each_other() -> None:
    every = [attribute.name for attribute in names.ATTRIBUTES]
    assert len(every) == len(set(every))
    assert not [(a, b) for a in every for b in every if b.startswith(a + ".")]


def test_names_have_a_type_and_a_sentence() -> None:
    for attribute in names.ATTRIBUTES:
        assert attribute.type in TYPES
        assert attribute.doc.endswith(".")
    for metric in names.METRICS:
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.doc.endswith(".")
    assert all(doc.endswith(".") for doc in names.EVENTS.values())


def golden() -> list[str]:
    """Every name as one line: what it is, how it is called, and what else others rely on."""
    return sorted(
        [
            *(f"attribute {each.name} {each.type} {each.unit}".rstrip() for each in names.ATTRIBUTES),
            *(f"event {name}" for name in names.EVENTS),
            *(f"metric {each.name} {each.kind} {','.join(each.labels)}".rstrip() for each in names.METRICS),
            *(f"span {name}" for name in names.SPANS),
            *(
                f"value {group} {value}"
                for group, values in {
                    "outcome": names.OUTCOMES,
                    "reason": names.REASONS,
                    "origin": names.ORIGINS,
                    "result": names.RESULTS,
                    "kept": names.KEPT,
                }.items()
                for value in values
            ),
        ]
    )


def test_names_are_those_of_the_golden_file() -> None:
    written = GOLDEN.read_text().splitlines()
    told = "dashboards, alerts and queries rest on names: add the new ones to names.golden, and change none"
    assert golden() == written, told


def test_log_events_are_all_in_the_table() -> None:
    written: set[str] = set()
    for path in Path(smetric.__file__).parent.rglob("*.py"):
        written |= set(re.findall(r"\blog\.(?:debug|info|warning|error|exception)\(\s*\"([^\"]+)\"", path.read_text()))
    assert written
    assert written <= names.EVENTS.keys()

"""Regular expressions that are applied to the bytes of others: none keeps a way back for each byte."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from re import _constants, _parser  # there is no public parser of patterns
from typing import Any

import pytest

import smetric

ROOMS = ("admin", "fleet", "http", "proxy", "request", "sources", "telemetry")
REPEATS = {_constants.MAX_REPEAT, _constants.MIN_REPEAT}
#: A group may be repeated so many times without being possessive: its ways back are few.
FEW = 64


def patterns() -> Iterator[Any]:
    """Yield each compiled pattern of the modules that meet bytes from outside, with its module's name."""
    for module in pkgutil.walk_packages(smetric.__path__, "smetric."):
        if module.name.split(".")[1] in ROOMS:
            for name, value in vars(importlib.import_module(module.name)).items():
                yield from (pytest.param(one, id=f"{module.name}.{name}") for one in compiled(value))


def compiled(value: object) -> Iterator[re.Pattern[Any]]:
    """Yield the patterns in *value*."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, Mapping):
        yield from (one for each in value.values() for one in compiled(each))
    elif isinstance(value, tuple):
        yield from (one for each in value for one in compiled(each))


def repeated_groups(parsed: Any) -> Iterator[str]:
    """Yield each group that holds a branch or a repetition and is repeated often, but not possessively."""
    for operation, argument in parsed:
        if operation in REPEATS:
            _, most, body = argument
            inner = {one for one, _ in flat(body)}
            if most > FEW and inner & {_constants.BRANCH, *REPEATS, _constants.POSSESSIVE_REPEAT}:
                yield str(body)
        for part in parts(argument):
            yield from repeated_groups(part)


def flat(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """Yield all operations in *parsed*."""
    for operation, argument in parsed:
        yield operation, argument
        for part in parts(argument):
            yield from flat(part)


def parts(argument: Any) -> Iterator[Any]:
    """Yield the patterns within an operation's *argument*."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for each in argument:
            yield from parts(each)


@pytest.mark.parametrize("pattern", list(patterns()))
def test_pattern_repeats_groups_only_possessively(pattern: re.Pattern[Any]) -> None:
    assert list(repeated_groups(_parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE))) == []


def test_rule_finds_a_repeated_branch() -> None:
    assert list(repeated_groups(_parser.parse(r'"(?:[^"\\]|\\.)*"')))
    assert not list(repeated_groups(_parser.parse(r'"(?:[^"\\]|\\.)*+"')))

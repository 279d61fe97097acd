"""Settings of all tests: logging is reset after each, fault rows are marked by priority and routers' tests as slow.

Hypothesis has no deadline: machines are busy.
"""

from __future__ import annotations

import gc
import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from smetric.telemetry import logs

TESTS = Path(__file__).parent
#: Folders whose tests start routers, engines or processes.
SLOW = {"faults", "integration", "e2e"}
ROWS = tomllib.loads((TESTS / "faults" / "matrix.toml").read_text())

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the golden files of the tests that are run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW.intersection(item.path.relative_to(TESTS).parts):
            item.add_marker("slow")
        row = re.match(r"test_([a-i]\d+)_", item.name)
        if row is not None and row[1].upper() in ROWS:  # else test_matrix.py fails
            item.add_marker(ROWS[row[1].upper()]["priority"].lower())


def pytest_collection_finish() -> None:
    """Keep the collected tests out of garbage collections, which many tests ask for: each would take 0.3 s longer."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    structlog.reset_defaults()
    root.setLevel(level)
    logs.shutdown()

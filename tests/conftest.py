"""For all tests: whatever a test sets up of logging ends with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from smetric.telemetry.logs import LibraryHandler


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    structlog.reset_defaults()
    root.setLevel(level)
    for handler in [each for each in root.handlers if isinstance(each, LibraryHandler)]:
        root.removeHandler(handler)

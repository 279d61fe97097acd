"""For folders whose tests run the whole product: on the loop it runs on, and logging is left as it was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping

import pytest
import structlog
import uvloop

from smetric.telemetry.logs import LibraryHandler


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    structlog.reset_defaults()
    root.setLevel(level)
    for handler in [each for each in root.handlers if isinstance(each, LibraryHandler)]:
        root.removeHandler(handler)

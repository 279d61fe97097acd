"""Tests of the whole product. Those that take minutes run on demand:

pytest -m soak -o faulthandler_timeout=0 tests/faults
"""

from __future__ import annotations

import pytest

from tests.product import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with -m soak -o faulthandler_timeout=0"))

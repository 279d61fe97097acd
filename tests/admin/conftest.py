"""These tests run the whole product."""

from tests.product import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]

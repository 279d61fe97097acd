"""These tests run the whole product."""

from tests.product import logging_as_before, pytest_asyncio_loop_factories

__all__ = ["logging_as_before", "pytest_asyncio_loop_factories"]

"""What takes minutes runs on demand: `pytest -m soak tests/policy`."""

from tests.faults.conftest import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from smetric.doctor import knowledge, lmcache
from tests.doctor.lab import Lab, set_up


@pytest.fixture
async def lab(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    """A set-up without faults; the checks have short timeouts."""
    monkeypatch.setattr(knowledge, "CONNECT_S", 0.5)
    monkeypatch.setattr(knowledge, "ARRIVES_S", 0.3)
    monkeypatch.setattr(lmcache, "FOUND_WITHIN_S", 0.5)
    monkeypatch.setattr(knowledge, "KNOWN_WITHIN_S", 1.0)
    async with set_up() as made:
        yield made

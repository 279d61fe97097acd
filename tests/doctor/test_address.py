from __future__ import annotations

import pytest

from smetric.doctor.address import resolve


@pytest.mark.parametrize("host", ["engine..example", "two words"])
async def test_a_name_that_is_none_has_no_address(host: str) -> None:
    assert await resolve(f"http://{host}:8000") is None

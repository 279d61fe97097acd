from __future__ import annotations

import pytest

from smetric.doctor.site import is_own, resolve


@pytest.mark.parametrize("host", ["engine..example", "two words"])
async def test_a_name_that_is_none_has_no_address(host: str) -> None:
    assert await resolve(f"http://{host}:8000") is None


@pytest.mark.parametrize(
    ("ip", "host", "is_it"),
    [
        ("127.0.0.1", "0.0.0.0", True),
        ("::1", "0.0.0.0", False),
        ("127.0.0.1", "::", True),
        ("::1", "::", True),
        ("192.0.2.1", "::", False),
        ("127.0.0.1", "127.0.0.2", False),
    ],
)
async def test_an_address_is_the_routers_own_where_it_listens(ip: str, host: str, is_it: bool) -> None:
    assert await is_own((ip, 8000), host, 8000) is is_it
    assert not await is_own((ip, 8001), host, 8000)

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from smetric.http import addresses as module
from smetric.http.addresses import MAX_ADDRESSES, Addresses
from tests.resolver import Resolver


def answering_at(*here: str) -> Callable[[str], Awaitable[str]]:
    """Connects to the addresses *here* and to no other."""

    async def to(address: str) -> str:
        if address not in here:
            raise ConnectionRefusedError
        return address

    return to


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TTL_S", 0.0)
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)


@pytest.mark.parametrize("number", ["127.0.0.1", "::1", "fe80::1%eth0"])
async def test_addresses_do_not_resolve_an_ip_address(number: str) -> None:
    resolver = Resolver()
    assert await Addresses(number, 80, resolver).find() == (number,)
    assert len(resolver.asked) == 0


async def test_addresses_keep_an_answer_for_its_ttl() -> None:
    resolver = Resolver("10.0.0.1", "10.0.0.2")
    addresses = Addresses("engine", 80, resolver)
    assert [await addresses.find() for _ in range(5)] == [("10.0.0.1", "10.0.0.2")] * 5
    assert len(resolver.asked) == 1
    with pytest.raises(ConnectionRefusedError):
        await addresses.connect(answering_at(), 1.0)
    assert await addresses.connect(answering_at("10.0.0.2"), 1.0) == "10.0.0.2"
    assert len(resolver.asked) == 2


async def test_addresses_that_all_fail_are_resolved_again_for_the_same_connection() -> None:
    resolver = Resolver("10.0.0.1")
    addresses = Addresses("engine", 80, resolver)
    await addresses.connect(answering_at("10.0.0.1"), 1.0)
    await asyncio.sleep(0.01)
    resolver.found = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert await addresses.connect(answering_at("10.0.0.3"), 1.0) == "10.0.0.3"
    assert await addresses.find() == ("10.0.0.3", "10.0.0.1", "10.0.0.2")
    await asyncio.sleep(0.01)
    with pytest.raises(ConnectionRefusedError):
        await addresses.connect(answering_at("10.0.0.4"), 1.0)
    assert len(resolver.asked) == 3


async def test_d13_addresses_follow_the_name_and_keep_the_last_answer_while_the_resolver_fails(short: None) -> None:
    resolver = Resolver("10.0.0.1")
    addresses = Addresses("engine", 80, resolver)
    assert await addresses.find() == ("10.0.0.1",)
    resolver.found = ("10.0.0.2",)
    assert await addresses.find() == ("10.0.0.2",)
    resolver.found = ()
    assert [await addresses.find() for _ in range(3)] == [("10.0.0.2",)] * 3
    resolver.found = ("10.0.0.3",)
    assert await addresses.find() == ("10.0.0.3",)


async def test_d13_addresses_that_are_known_do_not_wait_for_a_hanging_resolver(short: None) -> None:
    resolver = Resolver("10.0.0.1")
    addresses = Addresses("engine", 80, resolver)
    await addresses.find()
    resolver.gate.clear()
    assert await asyncio.gather(*(addresses.find() for _ in range(20))) == [("10.0.0.1",)] * 20
    assert len(resolver.asked) == 2
    began = asyncio.get_running_loop().time()
    for _ in range(100):
        assert await addresses.find() == ("10.0.0.1",)
    assert asyncio.get_running_loop().time() - began < 100 * module.PATIENCE_S / 10  # nor one after the other
    assert len(resolver.asked) == 2
    resolver.found = ("10.0.0.2",)
    resolver.gate.set()
    await asyncio.sleep(0)  # the look-up goes on without its first caller
    assert await addresses.find() == ("10.0.0.2",)


async def test_addresses_prefer_the_one_that_accepted_last(short: None) -> None:
    resolver = Resolver("10.0.0.1", "10.0.0.2", "10.0.0.3")
    addresses = Addresses("engine", 80, resolver)
    await addresses.connect(answering_at("10.0.0.2", "10.0.0.3"), 1.0)
    assert [await addresses.find() for _ in range(2)] == [("10.0.0.2", "10.0.0.1", "10.0.0.3")] * 2
    resolver.found = ("10.0.0.3", "10.0.0.1")
    assert await addresses.find() == ("10.0.0.3", "10.0.0.1")


async def test_addresses_of_an_unknown_name_raise_and_are_resolved_again() -> None:
    resolver = Resolver()
    addresses = Addresses("engine", 80, resolver)
    for _ in range(2):
        with pytest.raises(OSError, match="cannot be resolved"):
            await addresses.find()
    resolver.found = ("10.0.0.1",)
    assert await addresses.find() == ("10.0.0.1",)
    assert len(resolver.asked) == 3


async def test_look_up_goes_on_when_a_caller_is_cancelled() -> None:
    resolver = Resolver("10.0.0.1")
    resolver.gate.clear()
    addresses = Addresses("engine", 80, resolver)
    leaving, staying = asyncio.create_task(addresses.find()), asyncio.create_task(addresses.find())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    resolver.gate.set()
    assert await staying == ("10.0.0.1",)
    assert len(resolver.asked) == 1


async def test_addresses_keep_a_limited_number() -> None:
    found = await Addresses("engine", 80, Resolver(*(f"10.0.0.{n}" for n in range(100)))).find()
    assert len(found) == MAX_ADDRESSES


async def test_resolve_gives_localhost_and_refuses_an_invalid_name() -> None:
    assert "127.0.0.1" in await module.resolve("localhost", 80)
    with pytest.raises(OSError, match="not a host name"):
        await module.resolve("a" * 70 + ".example", 80)

"""Lists of models: when they are read, who waits for them, and what is known of an instance."""

from __future__ import annotations

import asyncio

import pytest

from smetric.errors import UNREADABLE
from smetric.fleet.instance import Instance
from smetric.sources.models import INTERVAL_S, LEAST_INTERVAL_S, WAIT_S, ModelLists, Unread, read_cards
from tests.clock import Clock


class Bench:
    """Lists of two instances, `a` and `b`, whose answers a test sets. An answer of None never comes."""

    def __init__(self, **fixed: list[str]) -> None:
        self.a, self.b = (Instance(name, f"http://{name}", models=fixed.get(name)) for name in "ab")
        self.answers: dict[Instance, bytes | Unread | None] = {self.a: listed("m"), self.b: listed("m", "fr")}
        self.asked: list[str] = []
        self.clock = Clock()
        self.lists = ModelLists([self.a, self.b], self.get, self.clock)

    async def get(self, instance: Instance, path: str, most_bytes: int) -> bytes:
        self.asked.append(instance.id)
        answer = self.answers[instance]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Unread):
            raise answer
        assert isinstance(answer, bytes)
        return answer


def names(instance: Instance) -> set[str]:
    return set(instance.models or ())


def listed(*ids: str) -> bytes:
    cards = [b'{"id":"%b","x":1}' % name.encode() for name in ids]
    return b'{"object":"list","data":[%b]}' % b",".join(cards)


async def test_lists_are_read_again_once_a_second_for_any_number_of_requests() -> None:
    bench = Bench()
    await asyncio.gather(*(bench.lists.renew() for _ in range(30)))
    assert (bench.asked, names(bench.a), names(bench.b)) == (["a", "b"], {"m"}, {"m", "fr"})
    bench.answers[bench.a] = listed("new")
    bench.clock.now += LEAST_INTERVAL_S / 2
    await bench.lists.renew()
    assert names(bench.a) == {"m"}
    bench.clock.now += LEAST_INTERVAL_S / 2
    await asyncio.gather(*(bench.lists.renew() for _ in range(30)))
    assert (len(bench.asked), names(bench.a)) == (4, {"new"})


async def test_lists_of_an_instance_that_hangs_are_waited_for_once() -> None:
    bench = Bench()
    await bench.lists.renew()
    bench.answers[bench.a] = None
    bench.clock.now += LEAST_INTERVAL_S
    waiting = asyncio.create_task(bench.lists.renew())
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    bench.clock.now += WAIT_S
    async with asyncio.timeout(WAIT_S / 2):
        await bench.lists.renew()  # the read goes on, and nothing waits for it any more
    bench.lists.close()
    bench.answers[bench.a] = Unread("timeout")
    bench.clock.now += INTERVAL_S
    await bench.lists.renew()
    bench.answers[bench.a] = None
    bench.clock.now += LEAST_INTERVAL_S
    async with asyncio.timeout(WAIT_S / 2):
        await bench.lists.renew()
    assert names(bench.a) == {"m"}
    assert list(bench.lists.cards(bench.a) or ()) == ["m"]
    bench.lists.close()


async def test_lost_model_is_sent_nowhere_until_it_is_listed() -> None:
    bench = Bench(b=["fr"])
    await bench.lists.renew()
    bench.lists.lost(bench.a, "m")
    assert (names(bench.a), bench.lists.cards(bench.a)) == (set(), {})
    bench.lists.lost(bench.b, "fr")
    assert names(bench.b) == {"fr"}, "configured names stay"
    bench.clock.now += LEAST_INTERVAL_S
    await bench.lists.renew()
    assert names(bench.a) == {"m"}


async def test_cards_are_those_of_the_names_that_an_instance_serves() -> None:
    bench = Bench(b=["fr", "more"])
    assert bench.lists.cards(bench.a) is None
    await bench.lists.renew()
    cards = {name: dict(card) for name, card in (bench.lists.cards(bench.b) or {}).items()}
    assert (set(cards), set(cards["fr"])) == ({"fr", "more"}, {"id", "x"})
    assert cards["more"] == {"id": "more", "object": "model"}


@pytest.mark.parametrize(("status", "needs_key"), [(401, True), (403, True), (500, False)])
async def test_list_behind_a_key_is_known_as_such(status: int, needs_key: bool) -> None:
    bench = Bench()
    bench.answers[bench.a] = Unread("http_error", status)
    await bench.lists.renew()
    assert (bench.lists.needs_key(bench.a), names(bench.a)) == (needs_key, set())


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data":[]}', b'{"data":[{"id":5}]}', b'{"data":[{"id":"\xff"}]}'])
def test_list_without_a_name_is_none(body: bytes) -> None:
    with pytest.raises((ValueError, *UNREADABLE)):
        read_cards(body)

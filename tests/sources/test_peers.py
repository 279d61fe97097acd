"""Sidecars that tell each other what they placed: what arrives, what is refused, and what a loss leads to."""

from __future__ import annotations

import asyncio
import itertools
from array import array

import msgspec
import pytest
from structlog.testing import capture_logs

from smetric.http.listener import address_of, listen
from smetric.log_limit import CHANGES_TOLD
from smetric.request.prompt import Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.prefix_index.persistence import VERSION, pack
from smetric.sources.shared import peers
from smetric.sources.shared import peers as catch_up
from smetric.sources.shared import peers as peer
from smetric.sources.shared.peers import BATCH_BYTES, MAX_QUEUED, Peers, Placement, UnreadableBatch, encode_batch
from tests.fakes import Call, FakeEngine, hang, until
from tests.sources.sidecars import Sidecar, asked, running

pytestmark = pytest.mark.slow


async def test_what_one_places_all_others_know_and_nobody_passes_it_on() -> None:
    left, right = Sidecar(), Sidecar()
    async with running(left, right) as urls:
        middle = Sidecar(*urls)
        await middle.peers.start()
        middle.serve("b", "x")
        await until(lambda: left.hits("x") == right.hits("x") == [0, 2])
        await middle.peers.stop()
    figures = middle.peers.figures()
    assert figures.up == dict.fromkeys(urls, True)
    assert figures.placements == {"sent": 2, "dropped": 0, "received": 0, "refused": 0}
    assert left.peers.figures().placements["received"] == 1


async def test_blocks_of_token_ids_are_shared_with_those_that_cut_them_alike_and_refused_by_others() -> None:
    asked = InferenceRequest(prompt=Prompt([b"text"], 4.0), token_ids=array("I", range(100)))

    class Tokens(Sidecar):
        def __init__(self, block: int, *urls: str) -> None:
            super().__init__(*urls)
            self.tokens = PrefixIndex(block_tokens=block)
            self.peers = Peers(PrefixIndexes([self.tokens, self.index]), self.fleet, urls, interval_s=0.01)

        def held(self) -> list[int]:
            return self.tokens.least(asked, self.fleet.instances)

    alike, other, none = Tokens(16), Tokens(32), Sidecar()
    async with running(alike, other, none) as urls:
        sender = Tokens(16, *urls)
        await sender.peers.start()
        sender.tokens.prefilled(asked, sender.fleet["b"])
        sender.serve("a", "x")
        await until(lambda: all(each.hits("x") == [2, 0] for each in (alike, other, none)))
        assert (alike.held(), other.held()) == ([0, 96], [0, 0])
        assert [each.peers.figures().placements["refused"] for each in (alike, other, none)] == [0, 1, 1]
        late = Tokens(16, urls[0])
        await late.peers.start()
        assert late.held() == [0, 96]
        for each in (sender, late):
            await each.peers.stop()


async def test_a_peer_that_is_named_twice_is_one_peer() -> None:
    other = Sidecar()
    async with running(other) as (url,):
        one = Sidecar(url, url)
        await one.peers.start()
        one.serve("a", "x")
        await until(lambda: other.hits("x") == [2, 0])
        await one.peers.stop()
    assert (one.peers.figures().placements["sent"], other.peers.figures().placements["received"]) == (1, 1)


async def test_a_router_that_stands_in_its_own_list_takes_itself_out() -> None:
    port = listen("127.0.0.1", 0)
    url = address_of(port)
    port.close()
    one = Sidecar(url)
    async with running(one, ports=[int(url.rpartition(":")[2])]):
        with capture_logs() as lines:
            await one.peers.start()
            one.serve("a", "x")
            await until(lambda: one.peers.figures().up == {})
            await one.peers.stop()
    assert one.peers.figures().placements["received"] == 0
    assert [line["log_level"] for line in lines if line["event"] == "smetric.peer.own"] == ["info"]


async def test_the_last_placements_go_out_at_the_end() -> None:
    old = Sidecar()
    async with running(old) as urls:
        new = Sidecar(*urls)
        await new.peers.start()
        new.serve("a", "x")
        await until(lambda: old.hits("x") == [2, 0])
        new.serve("a", "y")
        await new.peers.stop()
        assert old.hits("y") == [2, 0]


@pytest.mark.parametrize(
    ("id", "started_at"), [("nobody", 1000.0), ("a", 2000.0), ("a", None)], ids=["no instance", "restarted", "unknown"]
)
async def test_a_placement_of_another_instance_or_process_is_refused_and_counted(
    id: str, started_at: float | None
) -> None:
    one = Sidecar()
    block = pack(asked("x", 1).prompt.hashes.blocks)  # type: ignore[union-attr]
    await one.peers.receive(encode_batch("s", 0, [Placement(id, started_at, block)]))
    assert 1 not in one.hits("x", 1)
    assert one.peers.figures().placements["refused"] == 1


async def test_what_is_sent_to_an_instance_or_in_blocks_that_are_not_known_here_is_told_once_and_may_be_missed() -> (
    None
):
    one = Sidecar()
    block = pack(asked("x", 1).prompt.hashes.blocks)  # type: ignore[union-attr]
    with capture_logs() as logs:
        await one.peers.receive(encode_batch("s", 0, [Placement("a", 1000.0, block, 32)] * 3))
        assert one.hits("x", 1) == [0, 0]
        await one.peers.receive(encode_batch("s", 1, [Placement("c", 1000.0, block)] * 3))
        assert one.hits("x", 1) == [None, None]
    told = [(line["event"], line["instance"], line["problem"]) for line in logs]
    assert told == [("smetric.peer.refused", "a", "blocks"), ("smetric.peer.refused", "c", "instance")]


async def test_what_a_peer_sent_to_a_new_process_before_it_was_known_here_is_missed_and_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catch_up, "EVERY_S", 0.0)
    ahead = Sidecar(started_at=2000.0)
    async with running(ahead) as urls:
        one = Sidecar(*urls, heartbeat_s=0.02)
        await one.peers.start()
        ahead.serve("a", "x")
        block = pack(asked("x", 2).prompt.hashes.blocks)  # type: ignore[union-attr]
        await one.peers.receive(encode_batch("s", 0, [Placement("a", 2000.0, block)]))
        assert one.hits("x") == [0, 0]
        instance = one.fleet["a"]
        instance.started_at, instance.incarnation = 2000.0, instance.incarnation + 1
        await until(lambda: one.hits("x") == [2, 0])
        assert one.hits("y") == [None, 0]
        await one.peers.stop()


async def test_while_a_peer_refuses_what_is_told_misses_are_unknown() -> None:
    guarded = Sidecar(token="t" * 16, heartbeat_s=0.02)
    async with running(guarded) as urls:
        one = Sidecar(*urls, token="u" * 16, heartbeat_s=0.02)
        await one.peers.start()
        one.serve("a", "x")
        await until(lambda: one.hits("x") == [2, None])
        await one.peers.stop()


async def test_a_missing_batch_makes_misses_unknown_and_what_is_known_stays() -> None:
    one = Sidecar()
    one.serve("a", "x")
    for number in (0, 1):
        await one.peers.receive(encode_batch("s", number, []))
    assert one.hits("x") == [2, 0]
    await one.peers.receive(encode_batch("s", 3, []))
    assert one.hits("x") == [2, None]


async def test_a_peer_that_falls_silent_makes_misses_unknown_and_one_that_says_goodbye_does_not() -> None:
    listener = Sidecar(heartbeat_s=0.02)
    await listener.peers.start()
    async with running(listener) as urls:
        ended = Sidecar(*urls, heartbeat_s=0.02)
        await ended.peers.start()
        ended.serve("a", "x")
        await until(lambda: listener.hits("x") == [2, 0])
        await ended.peers.stop()
        with capture_logs() as logs:
            await asyncio.sleep(0.2)
            assert listener.hits("x") == [2, 0]
            await listener.peers.receive(encode_batch("cut off", 0, []))
            await until(lambda: listener.hits("x") == [2, None])
    assert [(line["event"], line["sender"]) for line in logs] == [("smetric.peer.silent", "cut off")]
    await listener.peers.stop()


async def test_a_peer_that_takes_what_it_is_told_and_tells_nothing_makes_misses_unknown() -> None:
    deaf = Sidecar()
    async with running(deaf) as urls:
        one = Sidecar(*urls, heartbeat_s=0.05)
        with capture_logs() as logs:
            await one.peers.start()
            one.serve("a", "x")
            await until(lambda: one.hits("x") == [2, None])
            await one.peers.stop()
    told = [(line["taking"], line["heard"]) for line in logs if line["event"] == "smetric.peer.unheard"]
    assert told == [(1, 0)]


async def test_peers_that_hear_each_other_know_what_is_not_held() -> None:
    ports = [listen("127.0.0.1", 0) for _ in range(2)]
    urls = [address_of(port) for port in ports]
    for port in ports:
        port.close()
    pair = [Sidecar(*urls, heartbeat_s=0.05) for _ in range(2)]
    async with running(*pair, ports=[int(url.rpartition(":")[2]) for url in urls]):
        for one in pair:
            await one.peers.start()
        pair[0].serve("a", "x")
        await until(lambda: pair[1].hits("x") == [2, 0])
        await asyncio.sleep(0.5)
        assert [one.hits("x") for one in pair] == [[2, 0], [2, 0]]
        for one in pair:
            await one.peers.stop()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"{}",
        encode_batch("s", 0, [])[:-1],
        encode_batch("s", 0, [Placement("a", None, b"123")]),
        encode_batch("s", 0, [Placement("a", 1000.0, pack([5, 6, 5]))]),
        encode_batch("s" * 1000, 0, []),
        msgspec.msgpack.encode([VERSION + 1, "s", 0, [], False]),
    ],
)
async def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableBatch):
        await Sidecar().peers.receive(data)


async def test_a_peer_that_is_down_costs_placements_that_are_counted_and_nothing_else() -> None:
    port = listen("127.0.0.1", 0)
    url = address_of(port)
    port.close()
    one = Sidecar(url, heartbeat_s=0.05)
    with capture_logs() as logs:
        await one.peers.start()
        one.serve("a", "x")
        await until(lambda: one.peers.figures().placements["dropped"] == 1)
        assert one.peers.figures().up == {url: False}
        back = Sidecar()
        async with running(back, ports=[int(url.rpartition(":")[2])]):
            await until(lambda: one.peers.figures().up == {url: True})
            one.serve("b", "!")
            await until(lambda: back.hits("!") == [None, 2])
        await one.peers.stop()
    changes = [line["is_up"] for line in logs if line["event"] == "smetric.peer.changed"]
    assert changes[:2] == [False, True]
    assert changes[2:] in ([], [False])


async def test_a_peer_that_takes_too_long_to_say_what_it_knows_is_told_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "IMAGE_S", 0.1)
    slow = FakeEngine(hang)
    await slow.start()
    one = Sidecar(slow.url)
    with capture_logs() as logs:
        await one.peers.start()
    told = [(line["log_level"], line["reason"]) for line in logs if line["event"] == "smetric.peer.no_image"]
    assert told == [("warning", "timeout")]
    await one.peers.stop()
    await slow.stop()


async def test_what_a_peer_knows_is_taken_in_though_it_takes_longer_to_say_than_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TIMEOUT_S", "START_S"):
        monkeypatch.setattr(peers, name, 0.05)
    old, said = Sidecar(), asyncio.Event()
    old.serve("a", "x")
    image = old.peers.image

    async def slowly() -> bytes:
        await said.wait()
        return await image()

    monkeypatch.setattr(old.peers, "image", slowly)
    async with running(old) as urls:
        new = Sidecar(*urls)
        await new.peers.start()
        assert new.hits("x") == [0, 0]
        await asyncio.sleep(0.1)  # longer than a batch may take
        said.set()
        await until(lambda: new.hits("x") == [2, 0])
        await new.peers.stop()


async def test_what_waits_for_a_peer_is_bounded_and_the_oldest_goes_first() -> None:
    one = Sidecar("http://127.0.0.1:1")
    assert one.index.on_placed is not None
    for _ in range(MAX_QUEUED + 5):
        one.index.on_placed(one.fleet["a"], array("Q", bytes(BATCH_BYTES)), 0)
    assert one.peers.figures().placements["dropped"] == 5


async def test_only_who_knows_the_token_is_heard() -> None:
    guarded = Sidecar(token="t" * 16)
    guarded.serve("a", "x")
    async with running(guarded) as urls:
        for token, is_heard in (("", False), ("u" * 16, False), ("t" * 16, True)):
            other = Sidecar(*urls, token=token)
            await other.peers.start()
            assert other.hits("x") == ([2, 0] if is_heard else [0, 0])
            other.serve("b", token or "none")
            await until(lambda other=other: sum(other.peers.figures().placements.values()) > 0)  # type: ignore[misc]
            await other.peers.stop()
    assert guarded.peers.figures().placements["received"] == 1


async def test_a_peer_that_comes_and_goes_does_not_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PAUSE_S", 0.001)
    answered = itertools.count()

    async def flap(call: Call) -> None:
        await call.answer(503 if next(answered) % 2 else 204, b"")

    peer = FakeEngine(flap)
    await peer.start()
    one = Sidecar(peer.url, heartbeat_s=0.001)
    with capture_logs() as logs:
        await one.peers.start()
        await until(lambda: len(peer.calls) > 40)
        await one.peers.stop()
    await peer.stop()
    assert [line["event"] for line in logs].count("smetric.peer.changed") == CHANGES_TOLD

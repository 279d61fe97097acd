"""Routers that share placements: what arrives, what is refused, and what follows from a loss."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from contextlib import AsyncExitStack

import msgspec
import pytest
from structlog.testing import capture_logs

from smetric.log_limit import CHANGE_LINES
from smetric.request.prompt import Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.prefix_index.persistence import VERSION, pack
from smetric.sources.shared import UnreadableBatch, peers
from smetric.sources.shared.peers import (
    ASKED_AT_A_TIME,
    BATCH_BYTES,
    GONE_S,
    MAX_QUEUED,
    MAX_SENDERS,
    Peer,
    Peers,
    Placement,
    Senders,
    encode_batch,
)
from tests.clock import Clock
from tests.fakes import Call, FakeEngine, hang, until
from tests.ports import free_port, free_ports
from tests.sources.shared.routers import Sidecar, asked, exchanging, running

pytestmark = pytest.mark.slow


async def test_placements_reach_all_peers_and_are_not_passed_on() -> None:
    left, right = Sidecar(), Sidecar()
    async with running(left, right) as urls:
        middle = Sidecar(*urls)
        async with exchanging(middle):
            middle.serve("b", "x")
            await until(lambda: left.hits("x") == right.hits("x") == [0, 2])
    figures = middle.peers.figures()
    assert figures.up == dict.fromkeys(urls, True)
    assert figures.placements == {"sent": 2, "dropped": 0, "received": 0, "refused": 0}
    assert left.peers.figures().placements["received"] == 1


async def test_placements_of_token_blocks_need_the_same_block_size() -> None:
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
        sender, late = Tokens(16, *urls), Tokens(16, urls[0])
        async with exchanging(sender):
            sender.tokens.prefilled(asked, sender.fleet["b"])
            sender.serve("a", "x")
            await until(lambda: all(each.hits("x") == [2, 0] for each in (alike, other, none)))
            assert (alike.held(), other.held()) == ([0, 96], [0, 0])
            assert [each.peers.figures().placements["refused"] for each in (alike, other, none)] == [0, 1, 1]
            async with exchanging(late):
                assert late.held() == [0, 96]


async def test_peer_named_twice_is_one_peer() -> None:
    other = Sidecar()
    async with running(other) as (url,):
        one = Sidecar(url, url)
        async with exchanging(one):
            one.serve("a", "x")
            await until(lambda: other.hits("x") == [2, 0])
    assert (one.peers.figures().placements["sent"], other.peers.figures().placements["received"]) == (1, 1)


async def test_router_in_its_own_list_removes_itself() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    one = Sidecar(url)
    async with running(one, ports=[port]):
        with capture_logs() as lines:
            async with exchanging(one):
                one.serve("a", "x")
                await until(lambda: one.peers.figures().up == {})
    assert one.peers.figures().placements["received"] == 0
    assert [line["log_level"] for line in lines if line["event"] == "smetric.peer.own"] == ["info"]


async def test_last_placements_are_sent_at_shutdown() -> None:
    old = Sidecar()
    async with running(old) as urls:
        new = Sidecar(*urls)
        async with exchanging(new):
            new.serve("a", "x")
            await until(lambda: old.hits("x") == [2, 0])
            new.serve("a", "y")
        assert old.hits("y") == [2, 0]


@pytest.mark.parametrize(
    ("id", "started_at"), [("nobody", 1000.0), ("a", 2000.0), ("a", None)], ids=["no instance", "restarted", "unknown"]
)
async def test_placement_for_another_instance_or_process_is_refused_and_counted(
    id: str, started_at: float | None
) -> None:
    one = Sidecar()
    block = pack(asked("x", 1).prompt.hashes.blocks)  # type: ignore[union-attr]
    await one.peers.receive(encode_batch("s", 0, [Placement(id, started_at, block)]))
    assert 1 not in one.hits("x", 1)
    assert one.peers.figures().placements["refused"] == 1


async def test_refused_placements_are_logged_once_and_may_make_misses_unknown() -> None:
    one = Sidecar()
    block = pack(asked("x", 1).prompt.hashes.blocks)  # type: ignore[union-attr]
    with capture_logs() as logs:
        await one.peers.receive(encode_batch("s", 0, [Placement("a", 1000.0, block, 32)] * 3))
        assert one.hits("x", 1) == [0, 0]
        await one.peers.receive(encode_batch("s", 1, [Placement("c", 1000.0, block)] * 3))
        assert one.hits("x", 1) == [None, None]
    told = [(line["event"], line["instance"], line["problem"]) for line in logs]
    assert told == [("smetric.peer.refused", "a", "blocks"), ("smetric.peer.refused", "c", "instance")]


async def test_placements_for_a_process_that_becomes_known_later_are_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "EVERY_S", 0.0)
    ahead = Sidecar(started_at=2000.0)
    async with running(ahead) as urls:
        one = Sidecar(*urls, heartbeat_s=0.02)
        async with exchanging(one):
            ahead.serve("a", "x")
            block = pack(asked("x", 2).prompt.hashes.blocks)  # type: ignore[union-attr]
            await one.peers.receive(encode_batch("s", 0, [Placement("a", 2000.0, block)]))
            assert one.hits("x") == [0, 0]
            instance = one.fleet["a"]
            instance.started_at, instance.incarnation = 2000.0, instance.incarnation + 1
            await until(lambda: one.hits("x") == [2, 0])
            assert one.hits("y") == [None, 0]


async def test_misses_are_unknown_while_a_peer_refuses() -> None:
    guarded = Sidecar(token="t" * 16, heartbeat_s=0.02)
    async with running(guarded) as urls:
        one = Sidecar(*urls, token="u" * 16, heartbeat_s=0.02)
        async with exchanging(one):
            one.serve("a", "x")
            await until(lambda: one.hits("x") == [2, None])


async def test_missing_batch_makes_misses_unknown_and_keeps_hits() -> None:
    one = Sidecar()
    one.serve("a", "x")
    for number in (0, 1):
        await one.peers.receive(encode_batch("s", number, []))
    assert one.hits("x") == [2, 0]
    await one.peers.receive(encode_batch("s", 3, []))
    assert one.hits("x") == [2, None]


async def test_silent_peer_makes_misses_unknown_unless_it_ended() -> None:
    listener = Sidecar(heartbeat_s=0.02)
    async with exchanging(listener):
        async with running(listener) as urls:
            ended = Sidecar(*urls, heartbeat_s=0.02)
            async with exchanging(ended):
                ended.serve("a", "x")
                await until(lambda: listener.hits("x") == [2, 0])
            with capture_logs() as logs:
                await asyncio.sleep(0.2)
                assert listener.hits("x") == [2, 0]
                await listener.peers.receive(encode_batch("cut off", 0, []))
                await until(lambda: listener.hits("x") == [2, None])
        assert [(line["event"], line["sender"]) for line in logs] == [("smetric.peer.silent", "cut off")]


async def test_peer_that_sends_nothing_makes_misses_unknown() -> None:
    deaf = Sidecar()
    async with running(deaf) as urls:
        one = Sidecar(*urls, heartbeat_s=0.05)
        with capture_logs() as logs:
            async with exchanging(one):
                one.serve("a", "x")
                await until(lambda: one.hits("x") == [2, None])
    told = [(line["taking"], line["heard"]) for line in logs if line["event"] == "smetric.peer.unheard"]
    assert told == [(1, 0)]


async def test_misses_are_known_while_peers_hear_each_other() -> None:
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    pair = [Sidecar(*urls, heartbeat_s=0.05) for _ in range(2)]
    async with running(*pair, ports=ports), exchanging(*pair):
        pair[0].serve("a", "x")
        await until(lambda: pair[1].hits("x") == [2, 0])
        await asyncio.sleep(0.5)
        assert [one.hits("x") for one in pair] == [[2, 0], [2, 0]]


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
async def test_invalid_batch_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableBatch):
        await Sidecar().peers.receive(data)


async def test_peer_that_is_down_costs_only_counted_placements() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    one = Sidecar(url, heartbeat_s=0.05)
    with capture_logs() as logs:
        async with exchanging(one):
            one.serve("a", "x")
            await until(lambda: one.peers.figures().placements["dropped"] == 1)
            assert one.peers.figures().up == {url: False}
            back = Sidecar()
            async with running(back, ports=[port]):
                await until(lambda: one.peers.figures().up == {url: True})
                one.serve("b", "!")
                await until(lambda: back.hits("!") == [None, 2])
    changes = [line["is_up"] for line in logs if line["event"] == "smetric.peer.changed"]
    assert changes[:2] == [False, True]
    assert changes[2:] in ([], [False])


async def test_peer_image_times_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "IMAGE_S", 0.1)
    async with FakeEngine(hang) as slow:
        with capture_logs() as logs:
            async with exchanging(Sidecar(slow.url)):
                pass
    told = [(line["log_level"], line["reason"]) for line in logs if line["event"] == "smetric.peer.no_image"]
    assert told == [("warning", "timeout")]


async def test_peer_image_is_taken_in_after_the_start(
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
        async with exchanging(new):
            assert new.hits("x") == [0, 0]
            await asyncio.sleep(0.1)  # longer than a batch may take
            said.set()
            await until(lambda: new.hits("x") == [2, 0])


async def test_queue_of_an_exchange_counts_dropped_placements() -> None:
    one = Sidecar("http://127.0.0.1:1")
    assert one.index.on_placed is not None
    for _ in range(MAX_QUEUED + 5):
        one.index.on_placed(one.fleet["a"], array("Q", bytes(BATCH_BYTES)), 0)
    assert one.peers.figures().placements["dropped"] == 5


async def test_peers_need_the_shared_token() -> None:
    guarded = Sidecar(token="t" * 16)
    guarded.serve("a", "x")
    async with running(guarded) as urls:
        for token, is_heard in (("", False), ("u" * 16, False), ("t" * 16, True)):
            other = Sidecar(*urls, token=token)
            async with exchanging(other):
                assert other.hits("x") == ([2, 0] if is_heard else [0, 0])
                other.serve("b", token or "none")
                await until(lambda other=other: sum(other.peers.figures().placements.values()) > 0)  # type: ignore[misc]
    assert guarded.peers.figures().placements["received"] == 1


async def test_peer_that_flaps_does_not_fill_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PAUSE_S", 0.001)
    answered = itertools.count()

    async def flap(call: Call) -> None:
        await call.answer(503 if next(answered) % 2 else 204, b"")

    async with FakeEngine(flap) as peer:
        with capture_logs() as logs:
            async with exchanging(Sidecar(peer.url, heartbeat_s=0.001)):
                await until(lambda: len(peer.calls) > 40)
    assert [line["event"] for line in logs].count("smetric.peer.changed") == CHANGE_LINES


async def test_router_that_starts_catches_up() -> None:
    old = Sidecar()
    old.serve("a", "x")
    async with running(old) as urls:
        new = Sidecar(*urls, seen_empty=False)
        async with exchanging(new):
            assert new.hits("x") == [2, None]


async def test_router_catches_up_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "EVERY_S", 0.0)
    old = Sidecar()
    async with running(old) as urls:
        new = Sidecar(*urls, seen_empty=False)
        async with exchanging(new):
            old.serve("b", "x")
            await new.peers.receive(encode_batch("s", 7, []))
            await until(lambda: new.hits("x") == [None, 2])


async def test_router_catches_up_again_after_a_loss_during_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "EVERY_S", 0.0)
    old, has_said, may_arrive = Sidecar(), asyncio.Event(), asyncio.Event()

    async def give(call: Call) -> None:
        image = await old.peers.image()
        has_said.set()
        await may_arrive.wait()
        await call.answer(200, image)

    async with FakeEngine(give) as peer:
        new = Sidecar(peer.url, seen_empty=False)
        starting = asyncio.create_task(new.peers.start())
        await has_said.wait()
        old.serve("b", "x")
        await new.peers.receive(encode_batch("s", 7, []))
        may_arrive.set()
        await starting
        assert len(peer.calls) == 1  # the start waits for one round only
        await until(lambda: new.hits("x") == [None, 2])
        await new.peers.stop()


async def test_catch_up_asks_few_peers_at_a_time_and_bounds_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "START_S", 0.05)
    old, asked_now, most = Sidecar(), 0, 0
    old.serve("b", "x")
    image = await old.peers.image()

    async def give(call: Call) -> None:
        nonlocal asked_now, most
        if call.method == b"GET":
            asked_now += 1
            most = max(most, asked_now)
            await asyncio.sleep(0.1)
            asked_now -= 1
        await call.answer(200, image)

    async with AsyncExitStack() as stack:
        crowd = [await stack.enter_async_context(FakeEngine(give)) for _ in range(10)]
        new = Sidecar(*[peer.url for peer in crowd], seen_empty=False)
        async with exchanging(new):
            assert any(not peer.calls for peer in crowd)
            await until(lambda: new.hits("x") == [None, 2])
            await until(lambda: all(peer.calls for peer in crowd))
    assert most == ASKED_AT_A_TIME


async def test_catch_up_continues_after_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "EVERY_S", 0.0)
    old = Sidecar()
    old.serve("b", "x")
    async with running(old) as urls:
        new = Sidecar(*urls, seen_empty=False)
        with monkeypatch.context() as broken, capture_logs() as logs:
            broken.setattr(new.index, "restore", lambda image: 1 / 0)
            await new.peers.start()
        assert [line["task"] for line in logs if line["event"] == "smetric.peer.failed"] == ["catch-up"]
        await new.peers.receive(encode_batch("s", 7, []))
        await until(lambda: new.hits("x") == [None, 2])
        await new.peers.stop()


SILENCE_S = 6.0


def made() -> tuple[Senders, Clock]:
    clock = Clock()
    return Senders(silence_s=SILENCE_S, clock=clock), clock


@pytest.mark.parametrize(
    ("numbers", "missing"),
    [((0, 1, 3, 4), [False, False, True, False]), ((7,), [True]), ((0, 1, 0, 2), [False] * 4)],
    ids=["a jump", "first heard in the middle", "received twice"],
)
def test_sender_numbers_tell_missing_batches(numbers: tuple[int, ...], missing: list[bool]) -> None:
    senders, _ = made()
    assert [senders.heard("s", number, is_last=False) for number in numbers] == missing


def test_sender_silence_is_noticed_once_and_ends_when_heard_or_gone() -> None:
    senders, clock = made()
    senders.heard("s", 0, is_last=False)
    clock.now += 1
    senders.heard("t", 0, is_last=False)
    clock.now += SILENCE_S - 1
    assert senders.fallen_silent() == ["s"]
    assert senders.fallen_silent() == []
    assert senders.is_any_silent()
    senders.heard("s", 1, is_last=False)
    assert not senders.is_any_silent()
    clock.now += SILENCE_S
    assert senders.fallen_silent() == ["t", "s"]
    clock.now += GONE_S
    assert not senders.is_any_silent()


def test_sender_that_ended_is_not_silent_but_may_have_missing_batches() -> None:
    senders, clock = made()
    senders.heard("s", 0, is_last=False)
    assert not senders.heard("s", 1, is_last=True)
    senders.heard("t", 0, is_last=False)
    assert senders.heard("t", 2, is_last=True)
    clock.now += SILENCE_S
    assert not senders.is_any_silent()


def test_senders_are_bounded() -> None:
    senders, clock = made()
    for number in range(MAX_SENDERS + 5):
        senders.heard(f"s{number}", 0, is_last=False)
    clock.now += SILENCE_S
    assert senders.fallen_silent() == [f"s{number}" for number in range(5, MAX_SENDERS + 5)]


async def test_peer_queue_drops_its_oldest_batch() -> None:
    peer = Peer("http://127.0.0.1:1")
    batches = [(str(number).encode(), number) for number in range(1, MAX_QUEUED + 3)]
    assert [peer.put(*batch) for batch in batches] == [0] * MAX_QUEUED + [1, 2]
    assert [await peer.next_batch() for _ in range(MAX_QUEUED)] == batches[2:]


async def test_peer_is_idle_once_the_last_batch_is_done() -> None:
    peer = Peer("http://127.0.0.1:1")
    peer.put(b"one", 1)
    await peer.next_batch()
    assert not peer.idle.is_set()  # for it is being sent
    following = asyncio.create_task(peer.next_batch())
    await peer.idle.wait()
    peer.put(b"two", 2)
    assert not peer.idle.is_set()
    assert await following == (b"two", 2)

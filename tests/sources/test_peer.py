"""One peer; how several of them share what they place is in `test_peers.py`."""

import asyncio

from smetric.sources.shared.peers import MAX_QUEUED, Peer


async def test_batches_wait_in_order_and_the_oldest_is_dropped_for_a_newer_one() -> None:
    peer = Peer("http://127.0.0.1:1")
    batches = [(str(number).encode(), number) for number in range(1, MAX_QUEUED + 3)]
    assert [peer.put(*batch) for batch in batches] == [0] * MAX_QUEUED + [1, 2]
    assert [await peer.next_batch() for _ in range(MAX_QUEUED)] == batches[2:]


async def test_it_is_idle_once_the_last_batch_is_done() -> None:
    peer = Peer("http://127.0.0.1:1")
    peer.put(b"one", 1)
    await peer.next_batch()
    assert not peer.idle.is_set()  # for it is being sent
    following = asyncio.create_task(peer.next_batch())
    await peer.idle.wait()
    peer.put(b"two", 2)
    assert not peer.idle.is_set()
    assert await following == (b"two", 2)

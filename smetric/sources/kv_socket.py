"""The sockets of KV events: bounded, noticing peers that vanish; and the question for messages that were missed.

vLLM's replay socket is asked with an empty frame and the first number wanted. It answers with an empty frame, topic,
number and payload for each message it still has, then with the number 2⁶⁴ - 1.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

from smetric.sources.kv_message import Message, MessageError, decode

#: Messages that may wait in a socket. An engine step makes one; what is too much is dropped, and asked for again.
MOST_WAITING = 10_000
#: Largest message that is read, in bytes: a step of a million tokens is 5 MB.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
#: Longest silence of a replay, in seconds. Engines look at that socket every 100 ms.
REPLAY_SILENCE_S = 2.0
_END = 2**64 - 1


def configure(socket: zmq.asyncio.Socket, address: str) -> None:
    """Set what holds for every socket here, before it is connected to *address* or bound."""
    socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)


class OtherTopic(Exception):
    """A replay of messages that are published under a topic that is not listened to."""


async def replayed(
    context: zmq.asyncio.Context, address: str, start: int, topic: str
) -> AsyncGenerator[tuple[int, Message]]:
    """Number and message of all that the replay socket at *address* still has from *start* on.

    Raises:
        TimeoutError: it fell silent.
        MessageError: an answer cannot be read.
        OtherTopic: a message is of a topic that does not begin with *topic*, so that what follows it would never come.
    """
    with context.socket(zmq.DEALER) as dealer:
        configure(dealer, address)
        dealer.connect(address)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            if not await dealer.poll(int(REPLAY_SILENCE_S * 1000)):
                raise TimeoutError
            frames = await dealer.recv_multipart()
            if len(frames) < 3 or len(frames[-2]) != 8:
                raise MessageError("frames")
            seq = int.from_bytes(frames[-2], "big")
            if seq == _END:
                return
            if len(frames) > 3 and not frames[-3].startswith(topic.encode()):
                raise OtherTopic
            yield seq, decode(frames[-1])

from __future__ import annotations

import asyncio
import socket

from smetric.proxy.arrival import has_come
from tests.fakes import until


async def test_what_is_not_read_yet_has_come_and_so_has_the_end() -> None:
    near, far = socket.socketpair()
    with far:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(asyncio.Protocol, near)
        assert not has_come(transport)
        far.send(b"x")
        assert has_come(transport)
        await until(lambda: not has_come(transport))  # the loop reads it
        far.shutdown(socket.SHUT_WR)
        assert has_come(transport)
        transport.close()

"""Whether something has come over a connection that the loop has yet to read: what closes it now would reset it.

How it is read is `http1.py`'s.
"""

from __future__ import annotations

import asyncio
import select


def has_come(transport: asyncio.BaseTransport) -> bool:
    """Whether data, or the other side's end, wait to be read."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))

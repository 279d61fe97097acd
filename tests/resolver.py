"""A look-up of names that leads where a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class Resolver:
    """What every name leads to: the addresses *found*, which may be changed; nothing where there are none.

    It answers while its gate is set.
    """

    def __init__(self, *found: str) -> None:
        self.found: Sequence[str] = found
        self.asked: list[tuple[str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        await self.gate.wait()
        if not self.found:
            raise OSError("no such name")
        return self.found

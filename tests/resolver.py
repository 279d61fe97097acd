"""Fake resolver."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


class Resolver:
    """Addresses *found* of every name, which may be changed; empty for an unknown name.

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

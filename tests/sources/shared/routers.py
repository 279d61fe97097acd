"""Routers reduced to a prefix index and its exchange of placements."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.applications import Starlette

from smetric.admin.operations import placement_routes
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance
from smetric.http.limits import HttpLimits
from smetric.proxy.intake import Intake
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.prefix_index.index import PrefixIndex, PrefixIndexes
from smetric.sources.shared.peers import Peers
from tests.fakes import listening

BLOCK_TOKENS = BLOCK_BYTES / 4


class Sidecar:
    """An index and its exchange, with instances a and b."""

    def __init__(
        self, *urls: str, started_at: float = 1000.0, token: str = "", seen_empty: bool = True, heartbeat_s: float = 2.0
    ) -> None:
        instances = [Instance(id, f"http://{id}") for id in "ab"]
        for instance in instances:
            instance.started_at, instance.seen_empty = started_at, seen_empty
        self.fleet = Fleet(instances, VOCABULARY)
        self.index = PrefixIndex()
        self.peers = Peers(
            PrefixIndexes([self.index]), self.fleet, urls, token=token, interval_s=0.01, heartbeat_s=heartbeat_s
        )

    def serve(self, id: str, letter: str, blocks: int = 2) -> None:
        """Send *blocks* blocks of *letter* to the instance *id*."""
        self.index.prefilled(asked(letter, blocks), self.fleet[id])

    def hits(self, letter: str, blocks: int = 2) -> list[float | None]:
        """Hit lengths in blocks."""
        cells = self.index.lookup(asked(letter, blocks), self.fleet.instances)["hit_len"]
        return [None if cell is None else cell / BLOCK_TOKENS for cell in cells]


def asked(letter: str, blocks: int) -> InferenceRequest:
    return InferenceRequest(prompt=Prompt([letter.encode() * blocks * BLOCK_BYTES], 4.0))


@asynccontextmanager
async def exchanging(*sidecars: Sidecar) -> AsyncIterator[None]:
    """Exchange placements with the peers of *sidecars*."""
    for one in sidecars:
        await one.peers.start()
    yield
    for one in sidecars:
        await one.peers.stop()


@asynccontextmanager
async def running(*sidecars: Sidecar, ports: Sequence[int] = ()) -> AsyncIterator[list[str]]:
    """Serve the admin ports of *sidecars*; yield their URLs."""
    async with AsyncExitStack() as stack:
        urls = []
        for one, port in zip(sidecars, ports or [0] * len(sidecars), strict=True):
            app = Intake(Starlette(routes=placement_routes(one.peers)), HttpLimits())
            urls.append((await stack.enter_async_context(listening(app, port=port, drain_s=0.1))).url)
        yield urls

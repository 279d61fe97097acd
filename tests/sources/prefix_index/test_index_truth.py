"""Prefix index against engines whose caches are known, through restarts and unseen placements."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.fleet.instance import CacheConfig, Instance
from smetric.request.prompt import BLOCK_BYTES
from smetric.request.request import Usage
from smetric.sources.prefix_index.index import PrefixIndex
from smetric.sources.prefix_index.persistence import IndexImage, InstanceImage, decode_image, encode_image
from tests.sources.prefix_index.lettered import ENTRY, TOKENS_PER_BLOCK, hits, request

pytestmark = pytest.mark.slow

WARM_UP_S = 10.0
PROMPTS = ["".join(letters) for size in (1, 2) for letters in itertools.product("wxyz", repeat=size)]
PROMPT = st.sampled_from(PROMPTS)
STEP = st.tuples(
    st.sampled_from(
        ["sent", "sent", "sent", "settled", "told", "unheard", "restart", "save", "restore", "begin anew", "pass"]
    ),
    st.integers(0, 1),
    PROMPT,
)


class Engine:
    """Cache that evicts what was used longest ago, the end of a prompt first.

    Args:
        blocks: what it has room for; None for everything.
    """

    def __init__(self, blocks: int | None) -> None:
        self.blocks = blocks
        self.held: OrderedDict[str, None] = OrderedDict()

    def hit(self, prompt: str) -> int:
        return next((at for at in range(len(prompt)) if prompt[: at + 1] not in self.held), len(prompt))

    def run(self, prompt: str) -> int:
        """Compute *prompt* and a block of reply; how much of it was held."""
        hit = self.hit(prompt)
        for part in [*(prompt[:size] for size in range(len(prompt), 0, -1)), prompt + "."]:
            self.held[part] = None
            self.held.move_to_end(part)
        while self.blocks is not None and len(self.held) > self.blocks:
            self.held.popitem(last=False)
        return hit


class Site:
    """Two engines, a router in front of them, and another one that it hears of by and by."""

    def __init__(self, entries: int, blocks: int | None, is_sized: bool, before: list[str]) -> None:
        self.entries, self.blocks, self.is_sized = entries, blocks, is_sized
        self.has_room = entries > 4 * len(PROMPTS)
        self.now = 1000.0
        self.engines = [Engine(blocks), Engine(blocks)]
        for prompt in before:
            self.engines[0].run(prompt)
        self.started_at = [1.0, 2.0]
        self.images: list[list[InstanceImage]] = []
        self.begin()

    def begin(self) -> None:
        """Start another process of the router, which knows only what the engines report."""
        self.index = PrefixIndex(self.entries * ENTRY, warm_up_s=WARM_UP_S, clock=lambda: self.now)
        self.fleet = [Instance(name, f"http://{name}") for name in "ab"]
        #: Since when each may hold what is not known here; None for never. What is forgotten for want of room may
        #: have been from the start.
        self.unsure_since: list[float | None] = [
            None if self.has_room and not engine.held else self.now for engine in self.engines
        ]
        for instance, engine, started_at in zip(self.fleet, self.engines, self.started_at, strict=True):
            instance.started_at, instance.seen_empty = started_at, not engine.held
            if self.is_sized:
                instance.cache = CacheConfig(TOKENS_PER_BLOCK, self.blocks)

    def image(self) -> list[InstanceImage]:
        return decode_image(encode_image(IndexImage(0.0, BLOCK_BYTES, list(self.index.images())))).instances

    def step(self, what: str, which: int, prompt: str) -> None:
        instance, asked = self.fleet[which], request(prompt)
        match what:
            case "sent" | "settled":
                self.index.prefilled(asked, instance)
                held = self.engines[which].run(prompt)
                if what == "settled":
                    usage = Usage(len(prompt) * TOKENS_PER_BLOCK, 5, held * TOKENS_PER_BLOCK)
                    self.index.settled(asked, instance, usage)
            case "told" | "unheard":
                self.engines[which].run(prompt)
                if what == "told":
                    assert asked.prompt is not None
                    self.index.placed(instance, asked.prompt.hashes.blocks)
                else:
                    self.index.missed(self.fleet)
                    self.unsure_since = [self.now] * 2
            case "restart":
                self.engines[which] = Engine(self.blocks)
                self.started_at[which] += 50.0
                self.unsure_since[which] = None if self.has_room else self.now
                instance.restarted(self.started_at[which])
            case "save":
                self.images.append(self.image())
            case "restore" if self.images:
                self.index.restore(self.images[-1])
            case "begin anew":
                image = self.image()
                self.begin()
                self.index.restore(image)
            case "pass":
                self.now += WARM_UP_S / 3

    def check(self) -> None:
        """Check that no hit is reported as a miss, nor, if nothing is ever evicted, a miss as a hit.

        A miss counts as one in any case after the warm-up.
        """
        for prompt in PROMPTS:
            cells = hits(self.index, request(prompt), self.fleet)
            for cell, engine, since in zip(cells, self.engines, self.unsure_since, strict=True):
                if cell == 0 and (since is None or self.now < since + WARM_UP_S):
                    assert engine.hit(prompt) == 0
                if cell and self.blocks is None:
                    assert cell <= engine.hit(prompt)
        assert self.index.table.memory_bytes <= self.entries * ENTRY


@settings(max_examples=200)
@given(
    st.lists(STEP, max_size=40),
    st.sampled_from([2, 4, 1000]),
    st.sampled_from([None, 3, 6, 12]),
    st.booleans(),
    st.lists(PROMPT, max_size=3),
)
def test_index_never_reports_an_unknown_hit_as_zero(
    steps: list[tuple[str, int, str]],
    entries: int,
    blocks: int | None,
    is_sized: bool,
    before: list[str],
) -> None:
    site = Site(entries, blocks, is_sized, before)
    for what, which, prompt in steps:
        site.step(what, which, prompt)
        site.check()

"""What is believed of candidates that are asked about again and again is what would be believed of them anew."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import CacheConfig
from smetric.sources.prefix_index.index import PrefixIndex
from tests.clock import Clock
from tests.sources.lettered import ENTRY, TOKENS_PER_BLOCK, instances, request

WARM_UP_S = 10.0
PROMPT = st.text("xyz", max_size=5)
STEP = st.tuples(
    st.sampled_from(["sent", "sent", "sent", "placed", "forget", "restart", "missed", "pass", "empty", "restore"]),
    st.integers(0, 2),
    PROMPT,
)


@settings(max_examples=200)
@given(st.lists(STEP, max_size=25), st.integers(1, 4), st.none() | st.integers(1, 6))
def test_kept_or_found_anew_it_is_the_same(
    steps: list[tuple[str, int, str]], entries: int, capacity: int | None
) -> None:
    clock = Clock()
    fleet = Fleet(instances(3), VOCABULARY, clock=clock)
    index = PrefixIndex(entries * ENTRY, warm_up_s=WARM_UP_S, clock=clock)
    for one in fleet.instances:
        one.seen_empty = False
        one.cache = CacheConfig(TOKENS_PER_BLOCK, capacity)
    for what, which, blocks in steps:
        instance = fleet.instances[which]
        match what:
            case "sent":
                index.prefilled(request(blocks), instance)
            case "placed":
                index.placed(instance, list(request(blocks).prompt.hashes.blocks))  # type: ignore[union-attr]
            case "forget":
                index.forget(instance)
            case "restart":
                instance.restarted()
            case "missed":
                index.missed([instance])
            case "pass":
                clock.now += WARM_UP_S / 3
            case "empty":
                instance.seen_empty = True
            case "restore":
                index.restore(list(index.images()))
        for asked in (request(blocks), request("xy")):
            kept = index.lookup(asked, fleet.candidates(""))
            assert kept == index.lookup(asked, list(fleet.instances))
            assert kept == index.lookup(asked, fleet.candidates(""))

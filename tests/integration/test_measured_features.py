"""Features measured on requests, in the whole router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from smetric.config.settings import PrefillSettings, PrefixIndexSettings
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Candidates
from smetric.sources.measured import FEWEST, SOONEST_S
from tests.fakes import Call, FakeEngine, healthy
from tests.faults.harness import chat, running
from tests.product import pytest_asyncio_loop_factories  # noqa: F401

pytestmark = pytest.mark.slow

MEASURED = [name for name, feature in VOCABULARY.features.items() if feature.measured]
READS_ALL = """policy reads_all
let rates = (prefill_rate + fetch_rate) / (1 tokens per second) + qps / (1 requests per second)
let sizes = (cached_tokens + unprefilled_cost + hit_len) / (1 tokens) + decode_blocks / (1 blocks)
prefer lora_room or "sql" in loras
route rr_argmin(rates + sizes) when req.class_share > 0.5 and req.prefix != "" as alike
route rr_argmin(rates + sizes) as other
"""


async def slow(call: Call) -> None:
    """Answer as soon as a prefill would be over."""
    await asyncio.sleep(2 * SOONEST_S)
    await healthy(call)


async def test_streams_through_the_router_fill_measured_features(tmp_path: Path) -> None:
    policy = tmp_path / "reads_all.policy"
    policy.write_text(READS_ALL)
    async with running(
        FakeEngine(slow),
        policy=str(policy),
        prefix_index=PrefixIndexSettings(warm_up=0.0),
        prefill=PrefillSettings(attention_tokens=1000, fetch_rate=40_000),
    ) as router:
        for turn in range(FEWEST + 2):
            answer = await router.ask("POST", "/v1/chat/completions", chat(stream=True, user=str(turn)))
            assert answer.status == 200
        fleet = router.application.fleet
        snapshot = fleet.snapshot(Candidates(fleet.instances), MEASURED)
        decision = router.application.telemetry.decisions.recent(1)[0]
    columns = {name: column[0] for name, column in snapshot.columns.items()}
    assert snapshot.is_known("prefill_rate") == [True]
    assert columns["prefill_rate"] > 1
    assert columns["fetch_rate"] == 40_000
    assert columns["qps"] == (FEWEST + 3) / 60  # the request before the test is one of them
    assert fleet.instances[0].attention_tokens == 1000
    assert decision.decision is not None
    assert decision.decision.rule == "alike"

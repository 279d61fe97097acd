"""What sources that follow requests learn of them in the whole router, and what policies then read."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from smetric.config.settings import PrefillSettings, PrefixIndexSettings
from smetric.features import VOCABULARY
from smetric.fleet.fleet import Candidates, Fleet
from smetric.fleet.instance import Instance
from smetric.request.request import InferenceRequest
from smetric.routing.router import Router
from smetric.sources.measured import FEWEST, SOONEST_S
from smetric.sources.source import Follower
from tests.fakes import Call, FakeEngine, healthy, routes_by
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
    """Answers as soon as a prefill would be over."""
    await asyncio.sleep(2 * SOONEST_S)
    await healthy(call)


async def test_streams_through_the_router_make_rates_sizes_and_classes(tmp_path: Path) -> None:
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


class Told(Follower):
    """Notes what it is told."""

    name = "told"
    describes = frozenset({"class_share"})

    def __init__(self) -> None:
        self.events: list[str] = []

    def describe(self, request: InferenceRequest) -> None:
        self.events.append("describe")

    def sent(self, request: InferenceRequest, lease: object) -> None:
        self.events.append("sent")

    def first_token(self, lease: object, seconds: float) -> None:
        self.events.append(f"first_token {seconds:g}")

    def forget(self, instance: Instance) -> None:
        self.events.append(f"forget {instance.id}")


def router_with(told: Follower, tmp_path: Path, text: str) -> Router:
    path = tmp_path / "p.policy"
    path.write_text(text)
    fleet = Fleet([Instance("a", "http://a")], VOCABULARY)
    return Router(fleet, routes_by(path), [told], rng=random.Random(1))


async def test_followers_are_told_what_becomes_of_requests(tmp_path: Path) -> None:
    told = Told()
    router = router_with(told, tmp_path, "policy p\nroute argmin(requests) when req.class_share > 0\nroute argmin(1)\n")
    routing = await router.route(InferenceRequest())
    assert routing.lease is not None
    router.first_token(routing.lease, 0.5)
    router.forget(router.fleet.instances[0])
    assert told.events == ["describe", "sent", "first_token 0.5", "forget a"]


async def test_nothing_is_described_that_no_policy_reads(tmp_path: Path) -> None:
    told = Told()
    await router_with(told, tmp_path, "policy p\nroute argmin(requests)\n").route(InferenceRequest())
    assert told.events == ["sent"]


async def test_a_follower_that_fails_fails_no_request(tmp_path: Path) -> None:
    class Broken(Told):
        def sent(self, request: InferenceRequest, lease: object) -> None:
            raise RuntimeError("no")

    routing = await router_with(Broken(), tmp_path, "policy p\nroute argmin(requests)\n").route(InferenceRequest())
    assert routing.outcome == "routed"


def test_what_nobody_measures_is_unknown() -> None:
    fleet = Fleet([Instance("a", "http://a"), Instance("b", "http://b")], VOCABULARY)
    snapshot = fleet.snapshot(Candidates(fleet.instances), MEASURED)
    assert snapshot.columns["prefill_rate"] == snapshot.columns["fetch_rate"] == [1.0, 1.0]
    assert all(snapshot.is_known(name) == [False, False] for name in MEASURED)


def test_a_follower_measures_only_what_it_says() -> None:
    with pytest.raises(NotImplementedError, match="told measures no qps"):
        Told().measure("qps", [])

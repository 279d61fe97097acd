"""Router with KV events and a fallback for unknown hits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import pytest

from smetric.app import Application
from smetric.config.settings import InstanceSettings, KvEventsSettings, ScrapeSettings, Settings, TokenizerSettings
from smetric.errors import ConfigError
from smetric.request.prompt import Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.kv_events.source import CacheFigures, KvEvents
from tests.fakes import FakeEngine, until
from tests.sources.kv_events.kv_engine import BLOCK, KvEngine, stored

PROMPT = list(range(100, 100 + 40 * BLOCK + 1))


class Tokens:
    """Every prompt is the same one."""

    async def of(self, request: InferenceRequest) -> Sequence[int] | None:
        return PROMPT

    def begin(self, request: InferenceRequest) -> None:
        return None


def follow_up() -> InferenceRequest:
    text = Prompt([b"x" * 32 * len(PROMPT)], 32.0)
    return InferenceRequest(turn=3, est_hit=30 * BLOCK, prompt_len=len(PROMPT), prompt=text, served="tiny")


@pytest.fixture
async def routed() -> AsyncIterator[tuple[Application, KvEngine, KvEngine]]:
    engines = [FakeEngine(), FakeEngine()]
    # One engine with replay of missed events, one without.
    published = [KvEngine(), KvEngine(replay=False)]
    for engine in engines:
        await engine.start()
    application = Application(
        Settings(
            instances=tuple(
                InstanceSettings(url=engine.url, id=f"e{i}", kv_events=events.endpoint, kv_replay=events.replay)
                for i, (engine, events) in enumerate(zip(engines, published, strict=True))
            ),
            kv_events=KvEventsSettings(enabled=True),
            scrape=ScrapeSettings(interval=0.2),
        ),
        {},
        Tokens(),
    )
    await application.start()
    for events in published:
        await events.joined()
    try:
        yield application, published[0], published[1]
    finally:
        await application.stop()
        for events in published:
            await events.close()
        for engine in engines:
            await engine.stop()


def caches(application: Application) -> Mapping[str, CacheFigures]:
    source = next(source for source in application.sources.ranked if isinstance(source, KvEvents))
    return source.figures().instances


async def test_router_sends_follow_up_where_kv_events_say(routed: tuple[Application, KvEngine, KvEngine]) -> None:
    application, one, other = routed
    await one.publish(stored(PROMPT[: 8 * BLOCK]))
    await other.publish(stored(PROMPT))
    await until(lambda: all(each.messages and each.is_known for each in caches(application).values()))
    e0, e1 = application.fleet.instances
    # The router itself sent this prompt elsewhere; the caches differ.
    application.router.lookups.prefilled(follow_up(), e0)
    routing = await application.router.route(follow_up())
    assert routing.decision is not None
    assert (routing.decision.rule, routing.instance) == ("stick", e1)
    assert routing.decision.snapshot.columns["hit_len"] == [8 * BLOCK, 40 * BLOCK]
    assert routing.decision.snapshot.origins_of("hit_len") == ["kv_events", "kv_events"]
    body, _ = await application.metrics.page()
    for line in (
        'smetric_kv_events_known{instance="e0"} 1.0',
        'smetric_kv_events_total{instance="e1",result="ok"} 1.0',
        'smetric_kv_events_lag_seconds{instance="e1"} ',
        'smetric_kv_events_gaps_total{instance="e1"} 0.0',
        'smetric_kv_events_missed_total{instance="e1"} 0.0',
        'smetric_kv_events_orphan_blocks_total{instance="e1"} 0.0',
        "smetric_kv_index_blocks 40.0",
        "smetric_kv_index_refused_total 0.0",
    ):
        assert line in body.decode()


async def test_router_falls_back_to_prefix_index_where_kv_events_are_unknown(
    routed: tuple[Application, KvEngine, KvEngine],
) -> None:
    application, one, other = routed
    await one.publish(stored([1, *PROMPT]))
    await other.publish(stored([1, *PROMPT]))
    await other.publish(stored([2, *PROMPT]), lost=True)
    await other.publish(stored([3, *PROMPT]))
    await until(lambda: caches(application)["e1"].missed == 1)
    await until(lambda: bool(caches(application)["e0"].messages) and caches(application)["e0"].is_known)
    e1 = application.fleet.instances[1]
    application.router.lookups.prefilled(follow_up(), e1)
    routing = await application.router.route(follow_up())
    assert routing.decision is not None
    assert routing.decision.snapshot.origins_of("hit_len") == ["kv_events", "prefix_index"]
    assert (routing.decision.rule, routing.instance) == ("stick", e1)


def test_application_refuses_kv_events_without_token_ids() -> None:
    settings = Settings(
        instances=(InstanceSettings(url="http://a:1", id="a"),),
        kv_events=KvEventsSettings(enabled=True),
        tokenizer=TokenizerSettings(source="estimated"),
    )
    with pytest.raises(ConfigError, match=r"kv_events\.enabled is set, but tokenizer\.source is estimated.*need "):
        Application(settings, {})

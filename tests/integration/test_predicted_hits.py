"""Hits that the prefix index predicts, in the whole router, against what engines report and count."""

from __future__ import annotations

import aiohttp
import pytest

from smetric import names
from smetric.http.listener import listen
from tests.agent_sessions import SESSIONS, Gateway, agents, engines, sidecar

pytestmark = pytest.mark.slow

#: Two blocks of an engine: the last one is never a hit, and markers between messages cost a few tokens.
NEAR_TOKENS = 32


async def test_predicted_hits_of_follow_ups_match_reports_and_counters_of_engines() -> None:
    async with engines() as fleet, aiohttp.ClientSession() as client:
        router = await sidecar(fleet, listen("127.0.0.1", 0), ())
        try:
            players, gateway = agents(), Gateway([router.url], client)
            await gateway.turn(players)
            totals = [instance.engine.totals for instance in fleet.instances]
            # First turns are not looked up.
            queries, hits = (-sum(getattr(each, counter) for each in totals) for counter in ("queries", "hits"))
            for _ in range(3):
                await gateway.turn(players)
            queries += sum(each.queries for each in totals)
            hits += sum(each.hits for each in totals)
            read = router.application.metrics.registry.get_sample_value
            found = {
                place: read("smetric_hit_tokens_total", {"policy": "smetric", "found": place}) or 0
                for place in names.HOLDERS
            }
            records = router.application.telemetry.decisions.recent(4 * SESSIONS)
        finally:
            await router.end()
    errors = []
    for record in records:
        hit, usage = record.hit, record.usage
        if record.request.turn and hit is not None and usage is not None:
            assert usage.prompt_tokens is not None
            assert usage.cached_tokens is not None
            # Predictions count in estimated tokens, reports in the engine's own.
            predicted = hit[0] * usage.prompt_tokens / record.request.prompt_len
            errors.append(abs(predicted - usage.cached_tokens))
    assert len(errors) == 3 * SESSIONS
    assert sum(error <= NEAR_TOKENS for error in errors) >= 0.9 * len(errors)
    # What lies in another engine's cache only, the chosen engine computes.
    assert found["local"] / sum(found.values()) == pytest.approx(hits / queries, abs=0.02)
    assert found["store"] == 0

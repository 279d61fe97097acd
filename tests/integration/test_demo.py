"""Demo in this process: real engines, router and agents, only fewer and faster."""

import pytest

from smetric.errors import ConfigError
from smetric.lab.demo import play as stage
from smetric.lab.demo.play import Play, Session, Turn, perform
from smetric.lab.demo.report import decisions_by_source, examples, report

pytestmark = pytest.mark.slow

SESSIONS = [Session(f"tiny-{n}", 120, 200, (Turn(300, 8, 0.0), Turn(20, 8, 0.5), Turn(10, 8, 0.5))) for n in range(3)]


async def played(policy: str) -> tuple[Play, list[tuple[int, int]]]:
    steps: list[tuple[int, int]] = []
    async with stage.engines(20.0) as engines:
        play = await perform(engines, policy, SESSIONS, speed=20.0, progress=lambda *now: steps.append(now))
    return play, steps


@pytest.mark.parametrize("policy", ["smetric", "load_only"])
async def test_demo_answers_every_request_and_figures_agree(policy: str) -> None:
    play, steps = await played(policy)
    assert [answer.status for answer in play.answers] == [200] * 9
    assert steps == [(n, 9) for n in range(1, 10)]
    figures = play.figures
    assert (figures.requests, figures.failed, figures.followups) == (9, 0, 6)
    assert 0 < figures.hit_rate < 1
    assert 1 <= figures.imbalance <= 4
    assert 0 < figures.ttft_p50_s <= figures.ttft_p90_s < play.took_s
    assert 0 <= figures.returned <= 6
    for answer in play.answers:
        record = play.records[answer.decision]
        assert record.policy.name == policy
        assert record.request.turn == answer.turn
        assert record.instance is not None
        assert record.instance.id == answer.instance
        assert 0 <= answer.cached_tokens < answer.prompt_tokens


async def test_demo_report_shows_table_decisions_and_next_steps() -> None:
    play, _ = await played("smetric")
    titles = [example.title for example in examples(play)]
    assert len(titles) == 3 or play.figures.returned == 0
    text = report([play], None, "bin/smetric", {})
    assert f"{play.figures.hit_rate:.1%}" in text
    assert f"{play.figures.returned} of 6" in text
    for title in titles:
        assert title in text
    assert "smetric: route to vllm-" in text
    assert "bin/smetric serve --policy smetric --instance" in text
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=" in text
    assert all(len(line) <= 120 for line in text.splitlines())


async def test_demo_report_indents_wrapped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    play, _ = await played("smetric")
    monkeypatch.setattr("smetric.lab.demo.report._WIDTH", 48)
    lines = report([play], None, "bin/smetric", {}).splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("   smetric: route to"))
    assert all(len(line) <= 48 for line in lines[first : first + 6])
    assert any(line.startswith(" " * 9) for line in lines[first : first + 6])


async def test_demo_by_lmcache_names_the_tier_in_decisions() -> None:
    # Prompts of several of LMCache's chunks, 256 tokens each.
    async with stage.engines(20.0) as engines:
        play = await perform(engines, "smetric", SESSIONS, speed=20.0, progress=lambda *_: None, by_lmcache=True)
    assert [answer.status for answer in play.answers] == [200] * 9
    found = decisions_by_source("lmcache", play)
    assert found
    assert decisions_by_source("prefix_index", play) == []
    hits = [decision.snapshot.columns["hit_len"][decision.index] for decision in found]
    assert hits == sorted(hits, reverse=True)
    assert {decision.snapshot.origin("hit_len", decision.index) for decision in found} == {"lmcache:host"}
    text = report([play], play, "smetric", {})
    assert "smetric again, with LMCache's lookup" in text
    assert f"{len(found)} of 6 follow-ups use such an answer" in " ".join(text.split())
    assert "hit_len from lmcache:host" in text


async def test_demo_report_names_collector_of_environment() -> None:
    play, _ = await played("load_only")
    text = report([play], None, "smetric", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
    assert "sent to the collector of OTEL_EXPORTER_OTLP_ENDPOINT" in text


async def test_demo_play_starts_with_empty_caches() -> None:
    async with stage.engines(20.0) as engines:
        for _ in range(2):
            play = await perform(engines, "smetric", SESSIONS[:1], speed=20.0, progress=lambda *_: None)
            assert play.answers[0].cached_tokens == 0


async def test_demo_unknown_policy_is_configuration_error() -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        await played("nosuch")

"""Shadow policies: decisions, comparisons and isolation from requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from msgspec.structs import replace

from smetric import names
from smetric.config.settings import MatchSettings, RecordSettings, RouteSettings, ShadowSettings
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.record import DecisionRecord
from smetric.lab.demo.play import Messages
from smetric.records.reader import Reading
from smetric.records.replay import RECORDED, Comparison, Judges, replay
from smetric.request.request import InferenceRequest
from smetric.routing.policy_files import PolicyFile
from smetric.routing.router import Router
from smetric.routing.shadow import Shadow, Shadows
from tests.agent_sessions import engines, instances
from tests.fakes import FakeEngine, routes_by
from tests.faults.harness import CANARY, Running, instances_of, running
from tests.product import pytest_asyncio_loop_factories  # noqa: F401
from tests.records.drive import Fleet, policy

pytestmark = pytest.mark.slow

FIRST_TURNS = 100
CROWD = "policy crowd\nroute argmin(requests) when req.class_share > 0.5\nroute rr_argmin(requests)\n"
LOAD_ONLY = policy(shipped_policies()["load_only"].read_text())


def in_shadow(path: Path, text: str) -> Shadow:
    path.write_text(text)
    return Shadow(PolicyFile(path, VOCABULARY))


def shadows_of(folder: Path, text: str) -> Shadows:
    return Shadows([in_shadow(folder / "p.policy", text)])


def shadow_of(name: str) -> ShadowSettings:
    return ShadowSettings(policy=name)


def counted(router: Running, policy: str, agrees: str) -> float:
    labels = {"policy": policy, "agrees": agrees}
    return router.application.metrics.registry.get_sample_value("smetric_shadow_decisions_total", labels) or 0.0


# Decisions


async def test_shadow_picks_as_the_same_policy_would_live() -> None:
    """A second router with Bailian acting decides on each of the first turns too, and gives its charge back at once."""
    async with (
        engines() as fleet,
        running(
            policy="smetric",
            instances=instances(fleet),
            shadow=(shadow_of("bailian"),),
            check_after=False,
            warm=False,
        ) as router,
        aiohttp.ClientSession() as client,
    ):
        application = router.application
        bailian = routes_by(shipped_policies()["bailian"])
        twin = Router(application.fleet, bailian, application.sources.ranked, rng=random.Random(5))
        live: list[str] = []
        application.router._rng = random.Random(5)
        route = application.router.route

        async def beside(request: InferenceRequest, **given: Any) -> Any:
            decided = await twin.route(request)
            live.append(decided.instance.id)
            assert decided.lease is not None
            decided.lease.release()
            return await route(request, **given)

        application.router.route = beside  # type: ignore[method-assign]
        # Some share the beginning of their prompts, so hits differ; streams that stay open make loads differ.
        rng, dialect = random.Random(1), Messages()
        open_streams: list[aiohttp.ClientResponse] = []
        for number in range(FIRST_TURNS):
            shared = " ".join(f"tool{rng.randrange(4)}" for _ in range(4)) + " word" * 1500
            said = [{"role": "user", "content": f"{shared} {number}"}]
            body = {"model": "m", "max_tokens": rng.choice([1, 400]), "stream": True, "messages": said}
            body["model"] = orjson.loads(await (await client.get(router.url + "/v1/models")).read())["data"][0]["id"]
            response = await client.post(router.url + dialect.path, json=body)
            assert response.status == 200
            await response.content.readany()
            open_streams.append(response)
        for response in open_streams:
            response.close()
        records = [one for one in application.telemetry.decisions.recent(1000) if one.decision is not None][::-1]
        assert [one.decision.rule for one in records if one.decision] == ["balance"] * FIRST_TURNS
        shadowed = [one.shadowed[0] for one in records]
        assert [one.choice for one in shadowed] == live
        agreed = [one.answer == names.AGREES for one in shadowed]
        assert agreed == [
            one.instance is not None and one.instance.id == pick for one, pick in zip(records, live, strict=True)
        ]
        assert 0 < sum(agreed) < FIRST_TURNS
        assert counted(router, "bailian", "true") == sum(agreed)
        assert counted(router, "bailian", "false") == FIRST_TURNS - sum(agreed)
        # SMetric reads no hit lengths on first turns: they were looked up besides.
        assert all("hit_len" not in one.decision.snapshot.columns for one in records if one.decision)
        assert len(set(live)) > 1


def test_shadow_draws_and_rotates_as_if_acting(tmp_path: Path) -> None:
    text = shipped_policies()["load_only"].read_text()
    fleet, shadows = Fleet(random.Random(3), 4), shadows_of(tmp_path, text)
    records = [fleet.decide(LOAD_ONLY) for _ in range(200)]
    answers = [shadows.judge(record)[0] for record in records]
    # The same policy with the same seeds, and cursors that went the same way.
    assert {one.answer for one in answers} == {names.AGREES}
    assert {one.regret for one in answers} == {0.0}


def test_shadow_rotates_independently_of_the_acting_policy(tmp_path: Path) -> None:
    fleet = Fleet(random.Random(3), 4)
    fleet.instances = fleet.instances[:3]
    acting = policy("policy first\nroute argmin(0, then: requests) as first\n")
    shadows = shadows_of(tmp_path, "policy turns\nroute rr_argmin(0)\n")
    seen: list[str] = []
    while len(seen) < 9:
        record = fleet.decide(acting)
        if record.decision is not None and len(record.decision.snapshot.ids) == 3:
            seen.append(shadows.judge(record)[0].choice)
    assert seen == ["gpu-0", "gpu-1", "gpu-2"] * 3


def test_shadow_is_unanswered_without_its_features(tmp_path: Path) -> None:
    fleet = Fleet(random.Random(3), 4)
    shadows = Shadows(
        [
            in_shadow(tmp_path / "hits.policy", "policy hits\nroute argmax(hit_len)\n"),
            in_shadow(tmp_path / "usage.policy", "policy usage\nroute argmin(kv_usage)\n"),
            in_shadow(tmp_path / "crowd.policy", CROWD),
        ]
    )
    hits, usage, crowd = shadows.judge(fleet.decide(LOAD_ONLY))
    assert (hits.answer, hits.choice) == ("not_answerable", "not answerable: hit_len not read")
    assert (usage.answer, usage.missing) == ("not_answerable", ("kv_usage",))
    assert (crowd.answer, crowd.missing) == ("not_answerable", ("req.class_share",))


def test_shadow_compares_refusals(tmp_path: Path) -> None:
    text = 'policy strict\nreject 429 "no" when req.turn == 0\nroute rr_argmin(requests)\n'
    acting = policy('policy strict\nreject 503 "no" when req.turn == 0\nroute rr_argmin(requests)\n')
    fleet, shadows = Fleet(random.Random(3), 4), shadows_of(tmp_path, text)
    (refused,) = shadows.judge(fleet.decide(acting, fleet.request(turn=0)))
    assert (refused.choice, refused.answer, refused.regret) == ("reject 429", "false", None)
    (same,) = shadows.judge(fleet.decide(policy(text), fleet.request(turn=0)))
    assert same.answer == "true"


def test_shadow_regret_is_a_share_of_the_larger_score(tmp_path: Path) -> None:
    shadows = shadows_of(tmp_path, "policy least\nroute argmin(requests)\n")
    acting = policy("policy most\nroute argmax(requests)\n")
    fleet = Fleet(random.Random(3), 4)
    for _ in range(100):
        record = fleet.decide(acting)
        (one,) = shadows.judge(record)
        assert record.decision is not None
        loads = record.decision.snapshot.columns["requests"]
        most, least = max(loads), min(loads)
        assert one.regret == pytest.approx((most - least) / most if most else 0.0)


def test_shadow_regret_is_zero_for_a_better_choice(tmp_path: Path) -> None:
    shadows = shadows_of(tmp_path, "policy turns\nroute rr_argmin(requests, within: 1e9)\n")
    acting, fleet = policy("policy least\nroute argmin(requests)\n"), Fleet(random.Random(3), 4)
    answers = [shadows.judge(fleet.decide(acting))[0] for _ in range(50)]
    assert {one.answer for one in answers} == {names.AGREES, names.DIFFERS}
    assert {one.regret for one in answers} == {0.0}


def test_shadow_counts_a_diverged_conversation_once(tmp_path: Path) -> None:
    shadow = in_shadow(
        tmp_path / "p.policy", 'policy strict\nreject 429 "no" when req.turn > 1\nroute rr_argmin(requests)\n'
    )
    shadows, fleet = Shadows([shadow]), Fleet(random.Random(3), 1)
    told = []
    for session in ("a", "b"):
        for turn in range(4):
            request = fleet.request(session=session, turn=turn if session == "a" else 0)
            (one,) = shadows.judge(fleet.decide(LOAD_ONLY, request))
            told.append((one.is_new_session, one.had_diverged, one.answer))
    assert told[:4] == [
        (True, False, "true"),
        (False, False, "true"),
        (False, False, "false"),
        (False, True, "false"),
    ]
    assert told[4:] == [(True, False, "true"), *[(False, False, "true")] * 3]
    assert shadows.judge(fleet.decide(LOAD_ONLY, fleet.request(session="")))[0].had_diverged is None


def test_shadow_forgets_divergence_when_its_policy_changes(tmp_path: Path) -> None:
    shadow = in_shadow(tmp_path / "p.policy", 'policy strict\nreject 429 "no" when true\nroute rr_argmin(requests)\n')
    shadows, fleet = Shadows([shadow]), Fleet(random.Random(3), 1)
    told = []
    for text in (
        "policy mild\nroute rr_argmin(requests)\n",
        "policy odd\nhold for 5s when req.turn > 0\nroute rr_argmin(1)\n",
    ):
        (one,) = shadows.judge(fleet.decide(LOAD_ONLY, fleet.request(session="a", turn=1)))
        told.append((one.policy.name, one.is_new_session, one.had_diverged, one.answer))
        shadow.file.path.write_text(text)
        assert shadow.file.refresh()
    (one,) = shadows.judge(fleet.decide(LOAD_ONLY, fleet.request(session="a", turn=1)))
    told.append((one.policy.name, one.is_new_session, one.had_diverged, one.answer))
    assert told == [("strict", True, False, "false"), ("mild", True, False, "true"), ("odd", True, False, "false")]


# Isolation from requests


async def test_shadow_charges_nothing_and_moves_no_cursor() -> None:
    async with running(FakeEngine(), FakeEngine(), FakeEngine(), shadow=(shadow_of("bailian"),) * 2) as router:
        chosen = [(await router.chat(stream=True)).value("x-smetric-instance") for _ in range(9)]
        assert len(set(chosen[:3])) == 3
        assert chosen == chosen[:3] * 3
        # The shadow decides once the answer has begun and charges nothing.
        assert router.counted() == (0, 0, 0)


async def test_shadow_that_raises_is_counted_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(FakeEngine(), shadow=(shadow_of("bailian"),)) as router:
        assert router.application.routes.last.shadows is not None
        bailian = router.application.routes.last.shadows.files[0].current.policy

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(bailian, "_decide", broken)
        for _ in range(5):
            assert (await router.chat()).status == 200
        assert counted(router, "bailian", "error") == 5
        (line,) = router.lines("smetric.shadow.failed")
        assert (line["policy"], line["level"]) == ("bailian", "error")


async def test_shadow_judges_unserved_request_at_its_end(tmp_path: Path) -> None:
    strict = tmp_path / "strict.policy"
    strict.write_text('policy strict\nreject 429 "no"\n  when req.turn == 0\nroute rr_argmin(requests)\n')
    async with running(
        FakeEngine(), policy=str(strict), shadow=(shadow_of("load_only"),), check_after=False, warm=False
    ) as router:
        assert (await router.chat()).status == 429
        (record,) = router.application.telemetry.decisions.recent(1)
        assert record.shadowed[0].choice == "e0"
        assert counted(router, "load_only", "false") == 1


async def test_shadow_follows_its_file_and_its_reads(tmp_path: Path) -> None:
    path = tmp_path / "candidate.policy"
    path.write_text("policy candidate\nroute argmin(requests)\n")
    async with running(FakeEngine(), FakeEngine(), shadow=(shadow_of(str(path)),)) as router:
        await router.chat()
        path.write_text("policy candidate\nroute argmin(kv_usage)\n")
        (file,) = router.application.routes.last.shadows.files  # type: ignore[union-attr]
        file.refresh()
        await router.chat()
        (record,) = router.application.telemetry.decisions.recent(1)
        (shadowed,) = record.shadowed
        assert (shadowed.generation, shadowed.answer in ("true", "false")) == (2, True)


# Reports


async def test_admin_port_shows_the_choice_of_a_shadow() -> None:
    async with running(FakeEngine(), FakeEngine(), policy="smetric", shadow=(shadow_of("bailian"),)) as router:
        answer = await router.chat()
        id = answer.value("x-smetric-decision-id")
        shown = orjson.loads((await router.admin(f"/admin/decisions/{id}")).body)
        assert (shown["origin"], shown["route"], shown["arm"]) == ("live", "default", None)
        (shadow,) = shown["shadows"]
        assert shadow["origin"] == "shadow"
        assert shadow["policy"].startswith("bailian@")
        assert shadow["instance"] in ("e0", "e1")
        assert shadow["agrees"] is (shadow["instance"] == shown["instance"])
        assert "hit_len" in shadow["explanation"]
        assert CANARY not in orjson.dumps(shown).decode()
        info = (await router.admin("/metrics")).body.decode()
        assert 'smetric_policy_info{generation="1"' in info
        assert 'route="default:shadow-1"' in info


async def test_records_replay_with_several_acting_policies(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    pair = FakeEngine(), FakeEngine()
    for engine in pair:
        await engine.start()
    async with running(
        *pair,
        instances=tuple(replace(one, models=("tiny", "other")) for one in instances_of(pair)),
        routes=(RouteSettings(name="b", match=MatchSettings(model=("other",)), policy="bailian"),),
        record=RecordSettings(path=str(path)),
        check_after=False,
    ) as router:
        for model in ("tiny", "other") * 4:
            assert (await router.chat(model=model)).status == 200
    found = Comparison(RECORDED, "")
    replay(Reading([path]), Judges(None), None, found)
    assert (found.compared, found.agreed) == (10, 10)  # two of them warmed it up
    made = {(one.policy.name, one.line.route, one.line.arm, one.line.origin) for one in Reading([path])}
    assert made == {("bailian", "b", "", "live"), ("load_only", "default", "", "live")}


def test_shadow_skips_held_requests(tmp_path: Path) -> None:
    acting = policy("policy held\nhold for 5 seconds when mean(requests) >= 0\nroute rr_argmin(requests)\n")
    shadows = shadows_of(tmp_path, "policy p\nroute argmin(requests)\n")
    record: DecisionRecord = Fleet(random.Random(3), 4).decide(acting)
    assert shadows.judge(record) == ()

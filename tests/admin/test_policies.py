"""Admin routes of policies."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from smetric.admin import policies as policy_admin
from smetric.admin.policies import trial
from smetric.cli import main
from smetric.config.settings import CanarySettings, MatchSettings, RouteSettings, ShadowSettings
from smetric.files import shipped_policies
from smetric.fleet.record import DecisionRecord
from smetric.policy import Policy
from tests.fakes import FakeEngine, Response, fetch, until
from tests.faults.harness import CANARY, Running, chat, running

pytestmark = pytest.mark.slow

GOOD = "policy p\nroute rr_argmin(requests) as least\n"
BAD = "policy p\nroute argmax(requests) as most\n"


async def post(router: Running, path: str, document: Any = None) -> tuple[int, Any]:
    body = document if isinstance(document, bytes) else b"" if document is None else orjson.dumps(document)
    answer: Response = await fetch(router.admin_url, "POST", path, body)
    return answer.status, orjson.loads(answer.body)


async def policies(router: Running) -> dict[str, Any]:
    return {one["name"]: one for one in orjson.loads((await router.admin("/admin/policies")).body)["policies"]}


async def refusal(router: Running, path: str, document: Any = None) -> tuple[int, str]:
    status, answer = await post(router, path, document)
    return status, answer["error"]


async def command(*arguments: str) -> Any:
    return await asyncio.to_thread(CliRunner().invoke, main, list(arguments))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "p.policy"
    path.write_text(GOOD)
    return path


def reload(router: Running, path: Path, text: str) -> None:
    path.write_text(text)
    for file in router.application.routes.files():
        file.refresh()


async def acting(router: Running) -> str:
    return (await router.chat()).value("x-smetric-rule")


# Generations


async def test_rollback_restores_the_last_policy_until_the_file_changes(path: Path) -> None:
    async with running(FakeEngine(), FakeEngine(), policy=str(path)) as router:
        reload(router, path, BAD)
        assert await acting(router) == "most"
        status, answer = await post(router, "/admin/policies/p/rollback")
        assert status == 200
        assert [(one["number"], one["of"], one["origin"]) for one in answer["generations"]] == [
            (1, 1, "start"),
            (2, 2, "file"),
            (3, 1, "rollback"),
        ]
        assert await acting(router) == "least"
        reload(router, path, BAD)  # as it is on disk already
        assert await acting(router) == "least"
        shown = (await policies(router))["default"]
        assert shown["kept_because"] == "generation 2 was replaced by 1 (rollback); the file acts when it changes"
        (line,) = router.lines("smetric.policy.restored")
        assert (line["level"], line["route"], line["of"], line["instead_of"]) == ("warning", "default", 1, 2)
        reloads = (await router.admin("/metrics")).body
        assert b'smetric_policy_reloads_total{result="rollback"} 1.0' in reloads
        record = router.application.telemetry.decisions.recent(1)[0]
        assert (record.origin, record.policy_origin, record.generation) == ("live", "rollback", 3)
        reload(router, path, BAD.replace("most", "busiest"))
        assert await acting(router) == "busiest"
        assert (await policies(router))["default"]["kept_because"] is None


async def test_rollback_to_an_unknown_generation_names_the_known_ones(path: Path) -> None:
    async with running(FakeEngine(), policy=str(path)) as router:
        assert await post(router, "/admin/policies/default/rollback") == (
            409,
            {"error": "there is no generation before 1 to go back to"},
        )
        reload(router, path, BAD)
        for body, status, said in (
            ({"generation": 7}, 409, "generation 7 is not kept; there are 1, 2"),
            ({"generation": 2}, 409, "generation 2 is what acts already"),
            ({"generation": "x"}, 400, "the body is not as expected: Expected `int | null`"),
            ({"to": 1}, 400, "the body is not as expected: Object contains unknown field `to`"),
        ):
            found, answer = await post(router, "/admin/policies/default/rollback", body)
            assert (found, answer["error"].startswith(said)) == (status, True), answer
        assert await refusal(router, "/admin/policies/nope/rollback") == (
            404,
            "no policy is called nope; name one of default",
        )


async def test_generations_keep_ten_texts(path: Path) -> None:
    async with running(FakeEngine(), policy=str(path)) as router:
        for number in range(2, 15):
            reload(router, path, GOOD.replace("least", f"rule_{number}"))
        shown = orjson.loads((await router.admin("/admin/policies/p")).body)
        assert [one["number"] for one in shown["generations"]] == list(range(5, 15))
        assert all(f"rule_{one['number']}" in one["text"] for one in shown["generations"])
        status, _ = await post(router, "/admin/policies/p/rollback", {"generation": 5})
        assert (status, await acting(router)) == (200, "rule_5")
        # A second rollback goes back further or is refused.
        assert await refusal(router, "/admin/policies/p/rollback") == (
            409,
            "there is no generation before 5 to go back to",
        )


async def test_rollback_command_prints_the_acting_policy(path: Path) -> None:
    async with running(FakeEngine(), policy=str(path)) as router:
        reload(router, path, BAD)
        done = await command("rollback", "--admin", router.admin_url)
        assert done.exit_code == 0
        assert "acts again, that of generation 1, as generation 3, until" in done.output
        again = await command("rollback", "default", "--admin", router.admin_url)
        assert (again.exit_code, again.output) == (1, "Error: there is no generation before 1 to go back to\n")
        forward = await command("rollback", "--to", "2", "--admin", router.admin_url)
        assert forward.exit_code == 0
        assert await acting(router) == "most"


async def test_policies_are_listed_with_their_use(path: Path) -> None:
    async with running(
        FakeEngine(),
        policy=str(path),
        shadow=(ShadowSettings(policy="bailian"),),
        canary=CanarySettings(policy="load_only", share=0.25),
        routes=(RouteSettings(name="other", match=MatchSettings(model=("x",)), policy=str(path)),),
    ) as router:
        shown = await policies(router)
        assert list(shown) == ["other", "default", "default:canary", "default:shadow-1"]
        assert [(one["acts"], one["arm"], one["share"], one["policy"]) for one in shown.values()] == [
            (True, None, 1.0, "p"),
            (True, "control", 0.75, "p"),
            (True, "canary", 0.25, "load_only"),
            (False, "shadow", None, "bailian"),
        ]
        assert shown["other"]["match"] == {"model": ["x"], "tenant": [], "path": []}
        assert await refusal(router, "/admin/policies/p/rollback") == (
            404,
            "several policies are called p; name one of other, default",
        )


# Trials


async def test_trial_evaluates_the_last_decisions_and_swaps_nothing(path: Path) -> None:
    async with running(FakeEngine(), FakeEngine(), policy=str(path)) as router:
        for _ in range(18):
            assert (await router.chat()).status == 200
        status, answer = await post(router, "/admin/policies/p/try", GOOD.encode())
        assert status == 200
        assert (answer["origin"], answer["agreement"], answer["decisions"]["compared"]) == ("replay", 1.0, 20)
        status, answer = await post(router, "/admin/policies/default/try", {"policy": BAD, "last": 10})
        assert (status, answer["decisions"]["compared"], answer["cut_short"]) == (200, 10, False)
        assert answer["moves"] == [{"from": "least", "to": "most", "count": answer["moved"]}]
        assert answer["moved"] > 0
        assert answer["load"]["after"].keys() >= {"requests_max_over_mean", "requests"}
        assert "argmax" not in answer["text"]
        assert answer["examples"][0]["after"]["explanation"].startswith("p: route to")
        assert await acting(router) == "least"
        assert router.lines("smetric.admin.changed") == []
        assert CANARY not in orjson.dumps(answer).decode()


@pytest.mark.parametrize("shadow", [(), (ShadowSettings(policy="bailian"),)], ids=["unread", "read by a shadow"])
async def test_trial_answers_with_read_features_and_those_at_hand(shadow: tuple[ShadowSettings, ...]) -> None:
    async with running(FakeEngine(), FakeEngine(), shadow=shadow) as router:
        status, answer = await post(router, "/admin/policies/load_only/try", shipped_policies()["bailian"].read_bytes())
        missing = {} if shadow else {"not answerable: hit_len not read": 2}
        assert (status, answer["decisions"]["not_answerable"]) == (200, missing)
        assert (answer["decisions"]["compared"], answer["agreement"] is None) == (2 if shadow else 0, not shadow)
        by_usage = b"policy p\nroute argmin(norm(running) + norm(unprefilled) + kv_usage)\n"
        status, answer = await post(router, "/admin/policies/load_only/try", by_usage)
        assert answer["decisions"]["compared"] >= 1


async def test_trial_covers_its_own_route_and_arm(path: Path) -> None:
    async with running(
        FakeEngine(),
        policy=str(path),
        canary=CanarySettings(policy="load_only", share=0.5),
        routes=(RouteSettings(name="later", match=MatchSettings(path=("/v1/completions",)), policy="load_only"),),
    ) as router:
        for number in range(12):
            body = chat(messages=[{"role": "user", "content": f"session {number}"}])
            assert (await router.ask("POST", "/v1/chat/completions", body)).status == 200
        asked = {
            name: await post(router, f"/admin/policies/{name}/try", GOOD.encode()) for name in await policies(router)
        }
        compared = {name: answer["decisions"]["compared"] for name, (_, answer) in asked.items()}
        assert compared["later"] == 0
        assert compared["default"] + compared["default:canary"] == 13
        assert min(compared["default"], compared["default:canary"]) > 0


async def test_trial_uses_configured_parameters_unless_sent(tmp_path: Path) -> None:
    text = """
policy p
param MOST = 2 requests in 1..
route argmin(requests) when min(requests) < MOST
route rr_argmin(0)
"""
    path = tmp_path / "p.policy"
    path.write_text(text)
    async with running(FakeEngine(), policy=str(path), params={"MOST": 3.0}) as router:
        status, answer = await post(router, "/admin/policies/p/try", GOOD.encode())
        assert (status, answer["diagnostics"][0]["message"][:4]) == (422, "1:8:")
        assert "configuration sets `MOST`, which this policy does not declare" in answer["error"]
        status, answer = await post(router, "/admin/policies/p/try", {"policy": GOOD, "params": {}})
        assert status == 200
        status, answer = await post(router, "/admin/policies/p/try", {"policy": text, "params": {"MOST": 0}})
        assert (status, "outside 1.." in answer["error"]) == (422, True)
        assert "this trial sets `MOST` to 0, outside 1.." in answer["error"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"policy p\nroute argmin(requets)\n", 422, "did you mean `requests`"),
        (b"library p\n", 422, "decides nothing"),
        (b"", 422, ""),
        (b"\xff", 400, "neither JSON nor"),
        (b'{"policy": 3}', 400, "is not as expected"),
        (b'{"policy": %b}' % (b"[" * 9_000), 400, "is not as expected"),
        (b'{"policy": "policy p", "last": 0}', 400, "last=0"),
        (b'{"policy": "policy p", "lsat": 1}', 400, "unknown field"),
        (b"#" * 70_000, 413, "65536 bytes"),
    ],
)
async def test_trial_refusal_has_its_reason(body: bytes, status: int, said: str) -> None:
    async with running(FakeEngine()) as router:
        found, answer = await post(router, "/admin/policies/default/try", body)
        assert (found, said in answer["error"]) == (status, True), answer


async def test_trial_does_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(_: Policy, records: Sequence[DecisionRecord], is_given_up: Callable[[], bool]) -> dict[str, Any]:
        begun.set()
        while not is_given_up():
            time.sleep(0.005)
        ended.set()
        return {}

    monkeypatch.setattr(policy_admin, "trial", endless)
    async with running(FakeEngine(), check_after=False) as router:
        asked = asyncio.create_task(post(router, "/admin/policies/default/try", GOOD.encode()))
        await until(begun.is_set)
    assert ended.is_set()
    assert await asked == (503, {"error": "the router is ending"})


async def test_cancelled_trial_evaluates_nothing_more(path: Path) -> None:
    async with running(FakeEngine(), policy=str(path)) as router:
        for _ in range(3):
            await router.chat()
        candidate = router.application.policy_file.current.policy
        records = router.application.telemetry.decisions.recent(3)
        told = trial(candidate, records, lambda: True)
        assert (told["decisions"]["read"], told["cut_short"]) == (0, True)
        assert trial(candidate, records)["decisions"]["read"] == 3


async def test_trial_finds_libraries_in_the_request_or_beside_the_file(tmp_path: Path) -> None:
    candidate = tmp_path / "candidate.policy"
    candidate.write_text("policy candidate\nuse common (near)\nroute argmin(near(requests)) as near\n")
    (tmp_path / "common.policy").write_text("library common\ndef near(v) = v + 1\n")
    async with running(FakeEngine(), FakeEngine()) as router:
        status, _ = await post(router, "/admin/policies/default/try", candidate.read_bytes())
        assert status == 422
        done = await command("try", str(candidate), "--admin", router.admin_url)
        assert done.exit_code == 0, done.output
        assert "candidate" in done.output
        assert "requests by instance" in done.output


async def test_trial_command_prints_errors_and_json(path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.policy"
    bad.write_text("policy p\nroute argmin(requets)\n")
    async with running(FakeEngine(), policy=str(path)) as router:
        wrong = await command("try", str(bad), "--admin", router.admin_url)
        assert wrong.exit_code == 1
        assert "does not check" in wrong.output
        assert "did you mean `requests`" in wrong.output
        done = await command("try", "load_only", "--format", "json", "--last", "5", "--admin", router.admin_url)
        assert orjson.loads(done.output)["candidate"].startswith("load_only@")
        assert done.exit_code == 0
        other = await command("try", "load_only", "--of", "nope", "--admin", router.admin_url)
        assert (other.exit_code, "no policy is called nope" in other.output) == (1, True)
        unread = await command("try", "bailian", "--admin", router.admin_url)
        assert (unread.exit_code, "can be compared" in unread.output) == (2, True)


async def test_trial_command_fails_under_a_share(path: Path, tmp_path: Path) -> None:
    refusing = tmp_path / "refusing.policy"
    refusing.write_text('policy refusing\nreject 429 "no"\n')
    async with running(FakeEngine(), policy=str(path)) as router:
        for policy, share, code in (("load_only", "100", 0), (str(refusing), "1", 1), (str(refusing), "0", 0)):
            done = await command("try", policy, "--fail-under", share, "--admin", router.admin_url)
            assert done.exit_code == code, done.output

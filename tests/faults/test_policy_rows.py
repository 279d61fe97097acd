"""Rows F: bad, missing and reloaded policy files."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
import time
from pathlib import Path

import orjson
import pytest

from smetric.features import VOCABULARY
from smetric.policy import Policy, PolicyError, load
from smetric.routing.policy_files import MOST_GENERATIONS
from tests.fakes import FakeEngine, until
from tests.faults.harness import CANARY, Running, Tell, chat, running

ONE = "policy one\n\nroute rr_argmin(requests)\n"
TWO = "policy two\n\nroute rr_argmin(unprefilled)\n"
#: Longest that refusing a policy may take, seconds of CPU.
REFUSED_S = 1.0


async def in_force(router: Running) -> dict[str, object]:
    page: dict[str, object] = orjson.loads((await router.admin("/admin/policy")).body)
    return page


async def test_f1_invalid_policy_at_start_ends_the_process_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.policy"
    path.write_text("policy bad\n\nroute argmin(no_such_feature)\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "smetric", "serve", "--policy", str(path), "--instance", "http://127.0.0.1:9"),
        *("--port", "0", "--admin-port", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(10):
        _, told = await process.communicate()
    assert process.returncode == 1
    assert f"{path}:3:14".encode() in told
    assert b"no_such_feature" in told
    assert b"Traceback" not in told


@pytest.mark.parametrize(
    "bad",
    [
        "policy two\n\nroute nobody(\n",
        "policy two\n\nroute rr_arg",
        "",
        "policy two\n\nroute argmin(no_such_feature)\n",
        None,
    ],
    ids=["invalid", "half-written", "empty", "unknown feature", "missing"],
)
async def test_f2_bad_policy_file_keeps_the_last_good_policy(tmp_path: Path, bad: str | None) -> None:
    path = tmp_path / "p.policy"
    path.write_text(ONE)
    async with running(FakeEngine(), policy=str(path)) as router:
        path.unlink() if bad is None else path.write_text(bad)
        await until(lambda: len(router.lines("smetric.policy.kept")) == 1)
        if bad is None:
            path.mkdir()
        assert (await router.chat()).value("x-smetric-policy").startswith("one@")
        page = await in_force(router)
        assert (page["name"], page["generation"]) == ("one", 1)
        assert page["kept_because"]
        assert b'smetric_policy_reloads_total{result="kept"} 1.0' in (await router.admin("/metrics")).body
        if bad is None:
            path.rmdir()
        path.write_text(TWO)
        await until(lambda: len(router.lines("smetric.policy.reloaded")) == 1)
        assert (await router.chat()).value("x-smetric-policy").startswith("two@")


def policies_alive() -> int:
    gc.collect()
    return sum(type(each) is Policy for each in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("reloads", [200, pytest.param(1_000, marks=pytest.mark.soak)])
async def test_f3_reloads_under_load_cost_no_request_and_mix_no_decision(
    tmp_path: Path, reloads: int, record_property: Tell
) -> None:
    path = tmp_path / "p.policy"
    path.write_text(ONE)
    async with running(FakeEngine(), FakeEngine(), policy=str(path)) as router:
        seen: set[str] = set()
        done = False
        answered = 0
        before = policies_alive()

        async def load() -> None:
            nonlocal answered
            while not done:
                answer = await router.chat()
                answered += 1
                assert answer.status == 200
                policy = answer.value("x-smetric-policy")
                decided = router.application.telemetry.decisions.get(answer.value("x-smetric-decision-id"))
                assert decided is not None
                assert policy == f"{decided.policy.name}@{decided.policy.digest}"
                seen.add(policy)

        loading = [asyncio.create_task(load()) for _ in range(2)]
        for i in range(reloads):
            path.write_text(ONE if i % 2 else TWO)
            assert router.application.policy_file.refresh() or i == 0
            await asyncio.sleep(0)
        done = True
        await asyncio.gather(*loading)
        assert {re.sub("@.*", "", policy) for policy in seen} == {"one", "two"}
        assert len(seen) == 2
        assert router.lines("smetric.policy.kept") == []
        # Old policies live as long as the decisions that are shown to operators.
        shown = {id(record.policy) for record in router.application.telemetry.decisions.recent(10_000)}
        assert policies_alive() - before <= len(shown) + MOST_GENERATIONS
        record_property("F14", f"{reloads:,} reloads, {answered:,} requests: 0 errors, 0 mixed decisions")


def chain(first: str, step: str, last: str, count: int) -> str:
    """Definitions of which each uses the one before twice."""
    return "\n".join(["policy p", first, *(step.format(i, i + 1) for i in range(count)), f"route argmin({last})"])


BOMBS = {
    "1 MB": "policy p\n# " + "x" * (1 << 20) + "\nroute argmin(requests)",
    "10,000 brackets": f"policy p\nroute argmin({'(' * 10_000}1{')' * 10_000})",
    "10,000 signs": f"policy p\nroute argmin({'-' * 10_000}requests)",
    "10,000 times not": f"policy p\nroute argmin(requests) when {'not ' * 10_000}true",
    "100,000 terms": f"policy p\nroute argmin({' + '.join(['requests'] * 100_000)})",
    "7,000 terms in 64 KB": f"policy p\nroute argmin({' + '.join(['load'] * 7_000)})",
    "sums that double": chain("let a0 = requests", "let a{1} = a{0} + a{0}", "a200", 200),
    "calls that double": chain("def f0(x) = x + x", "def f{1}(x) = f{0}(f{0}(x))", "f99(requests)", 99),
    "a function of itself": "policy p\ndef f(x) = f(x)\nroute argmin(f(requests))",
    "a literal of 5,000 digits": f"policy p\nroute argmin(requests + {'9' * 5_000})",
    "1e999": "policy p\nroute argmin(requests + 1e999)",
    "a division by zero": "policy p\nroute argmin(requests / 0)",
    "a division by what may be zero": "policy p\nroute argmin(1 / requests)",
    "0/0": "policy p\nroute argmin(0 / 0)",
    "NaN": "policy p\nroute argmin(requests + nan)",
    "an unknown feature": "policy p\nroute argmin(no_such)",
    "an unknown field": "policy p\nroute argmin(requests) when req.no_such > 1",
    "a clash of types": 'policy p\nroute argmin(requests + "x")',
    "a clash of units": "policy p\nroute argmin(requests + unprefilled)",
    "a catastrophic pattern": 'policy p\nkeep id matches "(a+)+$"\nroute argmin(requests)',
    "a name of 60,000 letters": f"policy {'p' * 60_000}\nroute argmin(requests)",
    "2,000 parameters": "policy p\n" + "".join(f"param P{i} = 1 in 0..9\n" for i in range(2_000)) + "route argmin(0)",
    "NUL": "policy p\0\nroute argmin(requests)",
    "half a character": "policy p\ud800",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_f4_policy_bomb_is_refused_at_once_with_its_place(bomb: str) -> None:
    began = time.process_time()
    with pytest.raises(PolicyError) as refused:
        load(BOMBS[bomb], VOCABULARY, path="bomb.policy")
    assert time.process_time() - began < REFUSED_S
    told = str(refused.value)
    assert re.search(r"^ +--> bomb\.policy:\d+:\d+$", told, re.M)
    assert len(told) < 64 * 1024


async def test_f4_policy_bomb_keeps_the_last_good_policy(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(ONE)
    async with running(FakeEngine(), policy=str(path)) as router:
        for number, bomb in enumerate(("1 MB", "10,000 brackets", "calls that double"), start=1):
            path.write_text(BOMBS[bomb])
            await until(lambda number=number: len(router.lines("smetric.policy.kept")) == number)  # type: ignore[misc]
            assert (await router.chat()).value("x-smetric-policy").startswith("one@")


async def test_f5_evaluation_error_is_a_counted_500_in_api_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError(CANARY)

    async with running(FakeEngine()) as router:
        with monkeypatch.context() as patch:
            patch.setattr("smetric.policy.policy.Policy.decide", fails)
            answers = [await router.chat()]
            answers.append(await router.ask("POST", "/v1/messages", chat(max_tokens=1)))
        assert [answer.status for answer in answers] == [500, 500]
        openai, anthropic = (orjson.loads(answer.body) for answer in answers)
        assert openai["error"]["type"] == "internal_error"
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "api_error")
        assert router.engines[0].calls == []
        assert router.counted() == (0, 0, 0)
        page = (await router.admin("/metrics")).body.decode()
        assert re.search(r'^smetric_decisions_total\{[^}]*outcome="error"[^}]*\} 2\.0$', page, re.M)


async def test_f5_policy_without_candidates_is_503_with_its_filter(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text("policy one\n\nkeep kv_usage > 0.5 as crowded\nroute rr_argmin(requests)\n")
    async with running(FakeEngine(), FakeEngine(), policy=str(path), check_after=False, warm=False) as router:
        answer = await router.chat()
        assert answer.status == 503
        error = orjson.loads(answer.body)["error"]
        assert "`crowded` of policy one" in error["message"]
        assert not any(engine.calls for engine in router.engines)

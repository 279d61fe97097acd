"""Rules that hold requests, through the whole router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from smetric.config.settings import Drain, InstanceSettings, LimitSettings, OverloadSettings, ScrapeSettings
from tests.fakes import Call, FakeEngine, Response, Script, hang, until
from tests.faults.gated import Gated, asked, busy, figures, occupied
from tests.faults.harness import Running, running

#: Policy that holds requests while every instance is busy.
HOLDING = """policy holding

let full = requests >= 1

hold for {patience} when all(full) and req.priority <= {ordinary}  as wait_for_room
route argmin(requests)                                             as any
"""
SLOW_SCRAPE = ScrapeSettings(interval=60.0)


#: Policy that holds requests for ever.
ENDLESS = "policy ever\n\nhold for req.held + 1s when all(requests >= 1)\nroute argmin(requests)\n"


def policy_file(folder: Path, text: str) -> str:
    path = folder / "p.policy"
    path.write_text(text)
    return str(path)


def holding(folder: Path, patience: str = "30s", ordinary: float = 1e9) -> str:
    return policy_file(folder, HOLDING.format(patience=patience, ordinary=f"{ordinary:g}"))


def statuses(answers: Sequence[Response]) -> list[int]:
    return [answer.status for answer in answers]


async def decision_of(router: Running, answer: Response) -> dict[str, Any]:
    decision: dict[str, Any] = orjson.loads(
        (await router.admin(f"/admin/decisions/{answer.value('x-smetric-decision-id')}")).body
    )
    return decision


async def test_held_request_is_sent_once_an_instance_has_room(tmp_path: Path) -> None:
    async with occupied(policy=holding(tmp_path), scrape=SLOW_SCRAPE) as (router, gated, tasks):
        tasks.append(asked(router, "second"))
        await until(lambda: busy(router) == 1)
        assert figures(router, "smetric_queue")["smetric_queue_requests"] == 1
        assert router.application.fleet.instances[0].own == 1, "a held request is charged to no instance"
        await asyncio.sleep(0.05)
        assert gated.users == ["first"]
        await gated.serve(2)
        answers = await asyncio.gather(*tasks)
        assert statuses(answers) == [200, 200]
        decision = await decision_of(router, answers[1])
        assert (decision["outcome"], decision["rule"], decision["instance"]) == ("held", "any", "e0")
        assert 0.05 <= decision["held_s"] < 10.0
        assert figures(router, "smetric_hold_duration_seconds_count")["smetric_hold_duration_seconds_count"] >= 1
        assert (await decision_of(router, answers[0]))["outcome"] == "routed"


async def test_hold_timeout_lets_the_next_rule_decide(tmp_path: Path) -> None:
    async with occupied(policy=holding(tmp_path, "50ms"), scrape=SLOW_SCRAPE) as (router, gated, tasks):
        tasks.append(asked(router, "second"))
        await until(lambda: len(gated.users) == 2)
        await gated.serve(2)
        answers = await asyncio.gather(*tasks)
        assert [answer.value("x-smetric-rule") for answer in answers] == ["any", "any"]
        decision = await decision_of(router, answers[1])
        held = [guard for rule in decision["guards"] for guard in rule["guards"] if guard["held"] is False]
        assert held == [{"guard": "held", "held": False}]
        assert decision["held_s"] >= 0.045


async def test_hold_fails_at_once_in_a_full_room(tmp_path: Path) -> None:
    settings = OverloadSettings(queue=1)
    async with occupied(policy=holding(tmp_path), scrape=SLOW_SCRAPE, overload=settings) as (router, gated, tasks):
        tasks.append(asked(router, "held"))
        await until(lambda: busy(router) == 1)
        tasks.append(asked(router, "no room"))
        await until(lambda: len(gated.users) == 2)
        assert gated.users == ["first", "no room"]
        await gated.serve(3)
        answers = await asyncio.gather(*tasks)
        assert statuses(answers) == [200] * 3
        decision = await decision_of(router, answers[2])
        assert (decision["outcome"], decision["rule"]) == ("routed", "any")


async def test_endless_hold_is_refused_in_a_full_room(tmp_path: Path) -> None:
    policy, settings = policy_file(tmp_path, ENDLESS), OverloadSettings(queue=0)
    async with occupied(policy=policy, scrape=SLOW_SCRAPE, overload=settings) as (router, gated, tasks):
        refused = await router.chat()
        assert (refused.status, int(refused.value("retry-after")) >= 1) == (429, True)
        assert figures(router, "smetric_requests_refused_total") == {
            'smetric_requests_refused_total{reason="queue"}': 1
        }
        await gated.serve(1)
        assert (await tasks[0]).status == 200


async def test_held_requests_of_a_model_do_not_delay_another(tmp_path: Path) -> None:
    a, b = Gated(), Gated()
    for gated in (a, b):
        await gated.engine.start()
    instances = tuple(
        InstanceSettings(url=gated.engine.url, id=name, models=(name,)) for gated, name in ((a, "a"), (b, "b"))
    )
    engines = (a.engine, b.engine)
    async with running(
        *engines, policy=holding(tmp_path), scrape=SLOW_SCRAPE, instances=instances, check_after=False, warm=False
    ) as router:
        for gated in (a, b):
            gated.close()
        tasks = [asked(router, "a1", model="a"), asked(router, "b1", model="b")]
        await until(lambda: len(a.users) == len(b.users) == 1)
        for number, (user, model) in enumerate((("a2", "a"), ("b2", "b")), 1):
            tasks.append(asked(router, user, model=model))
            await until(lambda number=number: busy(router) == number)  # type: ignore[misc]
        b.let_through()
        await until(lambda: b.users == ["b1", "b2"])
        assert a.users == ["a1"]
        for gated in (b, a, a):
            gated.let_through()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 4


async def test_held_requests_go_by_priority_despite_a_disconnect(tmp_path: Path) -> None:
    async with occupied(policy=holding(tmp_path), scrape=SLOW_SCRAPE) as (router, gated, tasks):
        for number, (user, priority) in enumerate((("second", 0), ("urgent", -2), ("leaver", -9)), 1):
            tasks.append(asked(router, user, priority=priority))
            await until(lambda number=number: busy(router) == number)  # type: ignore[misc]
        tasks.pop().cancel()
        await until(lambda: busy(router) == 2)
        await until(lambda: any(line["status"] == 499 for line in router.lines("request")))
        (line,) = [line for line in router.lines("request") if line["status"] == 499]
        assert (line["outcome"], line["rule"], line["instance"]) == ("held", "wait_for_room", "")
        await gated.serve(3)
        assert statuses(await asyncio.gather(*tasks)) == [200] * 3
        assert gated.users == ["first", "urgent", "second"]


async def test_new_policy_decides_on_held_requests(tmp_path: Path) -> None:
    async with occupied(policy=holding(tmp_path), scrape=SLOW_SCRAPE) as (router, gated, tasks):
        tasks.append(asked(router, "second"))
        await until(lambda: busy(router) == 1)
        policy_file(tmp_path, "policy open\n\nroute argmin(requests) as open\n")
        await until(lambda: len(gated.users) == 2)
        await gated.serve(2)
        assert [(await task).value("x-smetric-rule") for task in tasks] == ["any", "open"]


async def test_drain_decides_on_held_requests_in_time(tmp_path: Path) -> None:
    policy, drain = holding(tmp_path), Drain(deadline=0.4)
    async with occupied(policy=policy, scrape=SLOW_SCRAPE, drain=drain, check_after=False) as (router, gated, tasks):
        tasks.append(asked(router, "second"))
        await until(lambda: busy(router) == 1)
        router.application.drain()
        await until(lambda: len(gated.users) == 2)
        await gated.serve(2)
        assert statuses(await asyncio.gather(*tasks)) == [200, 200]


async def test_held_request_outlives_the_body_deadline(tmp_path: Path) -> None:
    limits = LimitSettings(body_timeout=0.1)
    async with occupied(policy=holding(tmp_path), scrape=SLOW_SCRAPE, limits=limits) as (router, gated, tasks):
        tasks.append(asked(router, "second"))
        await until(lambda: busy(router) == 1)
        await asyncio.sleep(0.2)
        await gated.serve(2)
        assert statuses(await asyncio.gather(*tasks)) == [200, 200]


def busy_or(status: int, body: bytes) -> Script:
    """An engine that never answers the user `stays`, and refuses all others."""

    async def script(call: Call) -> None:
        if orjson.loads(call.body)["user"] == "stays":
            await hang(call)
        await call.answer(status, body, (b"retry-after", b"7"))

    return script


FULL, BROKEN = b'{"error":{"message":"full"}}', b'{"error":{"message":"broken"}}'


@asynccontextmanager
async def retrying(script: Script, **settings: Any) -> AsyncIterator[tuple[Running, list[asyncio.Task[Response]]]]:
    """Run a router with two engines that follow *script*, one of them busy; its request is given."""
    engines = (FakeEngine(), FakeEngine())
    async with running(*engines, scrape=SLOW_SCRAPE, **settings) as router:
        for engine in engines:
            engine.script = script
        stay = [asked(router, "stays")]
        await until(lambda: router.counted()[0] == 1)
        yield router, stay
        for task in stay:
            task.cancel()


async def given_up(router: Running, *fields: str) -> list[Any]:
    """Return *fields* of the log line of the request that was not retried."""
    await until(lambda: any("gave_up" in line for line in router.lines("request")))
    (line,) = [line for line in router.lines("request") if "gave_up" in line]
    return [line[field] for field in fields]


async def test_retry_without_a_place_returns_the_first_answer(tmp_path: Path) -> None:
    policy, settings = policy_file(tmp_path, ENDLESS), OverloadSettings(queue=0)
    async with retrying(busy_or(503, FULL), policy=policy, overload=settings) as (router, _):
        answer = await router.chat(user="fails")
        assert (answer.status, answer.value("retry-after"), answer.body) == (503, "7", FULL)
        found = await given_up(router, "status", "error_type", "gave_up", "attempts", "outcome")
        assert found == [503, "upstream_status", "queue", 1, "routed"]
        assert figures(router, "smetric_retries_refused_total") == {"smetric_retries_refused_total": 1}


async def test_rejected_retry_returns_the_first_answer(tmp_path: Path) -> None:
    text = 'policy full\n\nreject 429 "busy" when all(requests >= 1) as full\nroute argmin(requests)\n'
    async with retrying(busy_or(500, BROKEN), policy=policy_file(tmp_path, text)) as (router, _):
        answer = await router.chat(user="fails")
        assert (answer.status, answer.body) == (500, BROKEN)
        found = await given_up(router, "gave_up", "attempts", "outcome", "rule", "instance")
        assert found == ["rejected", 1, "rejected", "full", ""]
        assert [(await router.chat(user="fails")).status for _ in range(4)] == [500] * 4
        assert figures(router, "smetric_retries_refused_total") == {"smetric_retries_refused_total": 5}
        assert (await router.chat(user="fails")).status == 429, "an instance that failed five times is deprioritized"
        assert all(instance.healthy for instance in router.application.fleet.instances), "the requests may be to blame"


async def test_held_retry_without_a_place_names_the_rule_that_held_it(tmp_path: Path) -> None:
    settings = OverloadSettings(in_flight=2, wait=0.2)
    async with retrying(busy_or(500, BROKEN), policy=holding(tmp_path), overload=settings) as (router, stay):
        fails = asked(router, "fails")
        await until(lambda: busy(router) == 1)  # it is held, and has given up its slot
        stay.append(asked(router, "stays"))
        await until(lambda: router.counted()[0] == 2)
        router.application.admission.room.policy_changed()
        answer = await fails
        assert (answer.status, answer.body) == (500, BROKEN)
        found = await given_up(router, "gave_up", "attempts", "outcome", "rule", "instance")
        assert found == ["in_flight", 1, "held", "wait_for_room", ""]

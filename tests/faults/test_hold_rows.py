"""Rules that hold requests, through the whole router."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson

from smetric.config.settings import Drain, InstanceSettings, LimitSettings, OverloadSettings, ScrapeSettings
from tests.fakes import Call, FakeEngine, Response, hang, until
from tests.faults.gated import Gated, asked, busy, figures
from tests.faults.harness import Running, running

#: Policy that holds requests while every instance is busy.
HOLDING = """policy holding

let full = requests >= 1

hold for {patience} when all(full) and req.priority <= {ordinary}  as wait_for_room
route argmin(requests)                                             as any
"""
SLOW_SCRAPE = ScrapeSettings(interval=60.0)


def write(policy: str, text: str) -> None:
    Path(policy).write_text(text)


async def decision_of(router: Running, answer: Response) -> dict[str, Any]:
    decision: dict[str, Any] = orjson.loads(
        (await router.admin(f"/admin/decisions/{answer.value('x-smetric-decision-id')}")).body
    )
    return decision


def holding(folder: Path, patience: str = "30s", ordinary: float = 1e9) -> str:
    path = folder / "holding.policy"
    path.write_text(HOLDING.format(patience=patience, ordinary=f"{ordinary:g}"))
    return str(path)


async def test_held_request_is_sent_once_an_instance_has_room(tmp_path: Path) -> None:
    gated = Gated()
    async with running(gated.engine, policy=holding(tmp_path), scrape=SLOW_SCRAPE) as router:
        gated.close()
        first = asked(router, "first")
        await until(lambda: len(gated.users) == 1)
        second = asked(router, "second")
        await until(lambda: busy(router) == 1)
        assert (figures(router, "smetric_queue"))["smetric_queue_requests"] == 1
        assert router.application.fleet.instances[0].own == 1, "what is held is charged to nobody"
        await asyncio.sleep(0.05)
        assert gated.users == ["first"]
        gated.let_through()
        await until(lambda: len(gated.users) == 2)
        gated.let_through()
        answers = await asyncio.gather(first, second)
        assert [answer.status for answer in answers] == [200, 200]
        decision = await decision_of(router, answers[1])
        assert (decision["outcome"], decision["rule"], decision["instance"]) == ("held", "any", "e0")
        assert 0.05 <= decision["held_s"] < 10.0
        assert (figures(router, "smetric_hold_duration_seconds_count"))["smetric_hold_duration_seconds_count"] >= 1
        assert (await decision_of(router, answers[0]))["outcome"] == "routed"
        gated.engine.recover()


async def test_hold_timeout_lets_the_next_rule_decide(tmp_path: Path) -> None:
    gated = Gated()
    async with running(gated.engine, policy=holding(tmp_path, "50ms"), scrape=SLOW_SCRAPE) as router:
        gated.close()
        tasks = [asked(router, "first")]
        await until(lambda: len(gated.users) == 1)
        tasks.append(asked(router, "second"))
        await until(lambda: len(gated.users) == 2)
        gated.let_through()
        gated.let_through()
        answers = await asyncio.gather(*tasks)
        assert [answer.value("x-smetric-rule") for answer in answers] == ["any", "any"]
        decision = await decision_of(router, answers[1])
        held = [guard for rule in decision["guards"] for guard in rule["guards"] if guard["held"] is False]
        assert held == [{"guard": "held", "held": False}]
        assert decision["held_s"] >= 0.045
        gated.engine.recover()


async def test_hold_fails_at_once_in_a_full_room(tmp_path: Path) -> None:
    gated = Gated()
    settings = OverloadSettings(queue=1)
    async with running(gated.engine, policy=holding(tmp_path), scrape=SLOW_SCRAPE, overload=settings) as router:
        gated.close()
        tasks = [asked(router, "first")]
        await until(lambda: len(gated.users) == 1)
        tasks.append(asked(router, "held"))
        await until(lambda: busy(router) == 1)
        tasks.append(asked(router, "no room"))
        await until(lambda: len(gated.users) == 2)
        assert gated.users == ["first", "no room"]
        for number in range(3):
            await until(lambda number=number: len(gated.users) > number)  # type: ignore[misc]
            gated.let_through()
            if number == 0:
                await asyncio.sleep(0)
        answers = await asyncio.gather(*tasks)
        assert [answer.status for answer in answers] == [200] * 3
        decision = await decision_of(router, answers[2])
        assert (decision["outcome"], decision["rule"]) == ("routed", "any")
        gated.engine.recover()


async def test_endless_hold_is_refused_in_a_full_room(tmp_path: Path) -> None:
    gated = Gated()
    policy = tmp_path / "ever.policy"
    policy.write_text("policy ever\n\nhold for req.held + 1s when all(requests >= 1)\nroute argmin(requests)\n")
    settings = OverloadSettings(queue=0)
    async with running(gated.engine, policy=str(policy), scrape=SLOW_SCRAPE, overload=settings) as router:
        gated.close()
        first = asked(router, "first")
        await until(lambda: len(gated.users) == 1)
        refused = await router.chat()
        assert (refused.status, int(refused.value("retry-after")) >= 1) == (429, True)
        assert figures(router, "smetric_requests_refused_total") == {
            'smetric_requests_refused_total{reason="queue"}': 1
        }
        gated.let_through()
        assert (await first).status == 200
        gated.engine.recover()


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
    gated = Gated()
    async with running(gated.engine, policy=holding(tmp_path), scrape=SLOW_SCRAPE) as router:
        gated.close()
        tasks = [asked(router, "first")]
        await until(lambda: len(gated.users) == 1)
        for number, (user, priority) in enumerate((("second", 0), ("urgent", -2), ("leaver", -9)), 1):
            tasks.append(asked(router, user, priority=priority))
            await until(lambda number=number: busy(router) == number)  # type: ignore[misc]
        tasks[3].cancel()
        await until(lambda: busy(router) == 2)
        await until(lambda: any(line["status"] == 499 for line in router.lines("request")))
        (line,) = [line for line in router.lines("request") if line["status"] == 499]
        assert (line["outcome"], line["rule"], line["instance"]) == ("held", "wait_for_room", "")
        for number in range(3):
            await until(lambda number=number: len(gated.users) > number)  # type: ignore[misc]
            gated.let_through()
        assert [(await task).status for task in tasks[:3]] == [200] * 3
        assert gated.users == ["first", "urgent", "second"]
        gated.engine.recover()


async def test_new_policy_decides_on_held_requests(tmp_path: Path) -> None:
    gated = Gated()
    policy = holding(tmp_path)
    async with running(gated.engine, policy=policy, scrape=SLOW_SCRAPE) as router:
        gated.close()
        tasks = [asked(router, "first")]
        await until(lambda: len(gated.users) == 1)
        tasks.append(asked(router, "second"))
        await until(lambda: busy(router) == 1)
        write(policy, "policy open\n\nroute argmin(requests) as open\n")
        await until(lambda: len(gated.users) == 2)
        gated.let_through()
        gated.let_through()
        answers = await asyncio.gather(*tasks)
        assert [answer.value("x-smetric-rule") for answer in answers] == ["any", "open"]
        gated.engine.recover()


async def test_drain_decides_on_held_requests_in_time(tmp_path: Path) -> None:
    gated = Gated()
    policy = holding(tmp_path)
    async with running(
        gated.engine, policy=policy, scrape=SLOW_SCRAPE, drain=Drain(deadline=0.4), check_after=False
    ) as router:
        gated.close()
        tasks = [asked(router, "first")]
        await until(lambda: len(gated.users) == 1)
        tasks.append(asked(router, "second"))
        await until(lambda: busy(router) == 1)
        router.application.drain()
        await until(lambda: len(gated.users) == 2)
        gated.let_through()
        gated.let_through()
        assert [(await task).status for task in tasks] == [200, 200]
        gated.engine.recover()


async def test_held_request_outlives_the_body_deadline(tmp_path: Path) -> None:
    gated = Gated()
    limits = LimitSettings(body_timeout=0.1)
    async with running(gated.engine, policy=holding(tmp_path), scrape=SLOW_SCRAPE, limits=limits) as router:
        gated.close()
        tasks = [asked(router, "first")]
        await until(lambda: len(gated.users) == 1)
        tasks.append(asked(router, "second"))
        await until(lambda: busy(router) == 1)
        await asyncio.sleep(0.2)
        for number in range(2):
            await until(lambda number=number: len(gated.users) > number)  # type: ignore[misc]
            gated.let_through()
        assert [(await task).status for task in tasks] == [200, 200]
        gated.engine.recover()


async def busy_or_full(call: Call) -> None:
    """What has come to stay is not answered; what comes to an engine that has room finds that it is overloaded."""
    if orjson.loads(call.body)["user"] == "stays":
        await hang(call)
    await call.answer(503, b'{"error":{"message":"full"}}', (b"retry-after", b"7"))


async def busy_or_broken(call: Call) -> None:
    """What has come to stay is not answered; what comes to an engine that has room finds that it is broken."""
    if orjson.loads(call.body)["user"] == "stays":
        await hang(call)
    await call.answer(500, b'{"error":{"message":"broken"}}')


async def told_of_giving_up(router: Running) -> dict[str, Any]:
    """The line of the request that was not tried again."""
    await until(lambda: any("gave_up" in line for line in router.lines("request")))
    (line,) = [line for line in router.lines("request") if "gave_up" in line]
    return line


async def test_retry_without_a_place_returns_the_first_answer(tmp_path: Path) -> None:
    policy = tmp_path / "ever.policy"
    policy.write_text("policy ever\n\nhold for req.held + 1s when all(requests >= 1)\nroute argmin(requests)\n")
    settings = OverloadSettings(queue=0)
    engines = (FakeEngine(), FakeEngine())
    async with running(*engines, policy=str(policy), scrape=SLOW_SCRAPE, overload=settings) as router:
        for engine in engines:
            engine.script = busy_or_full
        stays = asked(router, "stays")
        await until(lambda: router.counted()[0] == 1)
        answer = await router.chat(user="fails")
        assert (answer.status, answer.value("retry-after")) == (503, "7")
        assert answer.body == b'{"error":{"message":"full"}}'
        line = await told_of_giving_up(router)
        told = (line["status"], line["error_type"], line["gave_up"], line["attempts"], line["outcome"])
        assert told == (503, "upstream_status", "queue", 1, "routed")
        assert figures(router, "smetric_retries_refused_total") == {"smetric_retries_refused_total": 1}
        stays.cancel()


async def test_rejected_retry_returns_the_first_answer(tmp_path: Path) -> None:
    policy = tmp_path / "full.policy"
    policy.write_text('policy full\n\nreject 429 "busy" when all(requests >= 1) as full\nroute argmin(requests)\n')
    engines = (FakeEngine(), FakeEngine())
    async with running(*engines, policy=str(policy), scrape=SLOW_SCRAPE) as router:
        for engine in engines:
            engine.script = busy_or_broken
        stays = asked(router, "stays")
        await until(lambda: router.counted()[0] == 1)
        answer = await router.chat(user="fails")
        assert (answer.status, answer.body) == (500, b'{"error":{"message":"broken"}}')
        line = await told_of_giving_up(router)
        told = (line["gave_up"], line["attempts"], line["outcome"], line["rule"], line["instance"])
        assert told == ("rejected", 1, "rejected", "full", "")
        assert [(await router.chat(user="fails")).status for _ in range(4)] == [500] * 4
        assert figures(router, "smetric_retries_refused_total") == {"smetric_retries_refused_total": 5}
        assert (await router.chat(user="fails")).status == 429, "who failed five times is left alone for a moment"
        assert all(instance.healthy for instance in router.application.fleet.instances), "the requests may be to blame"
        stays.cancel()


async def test_held_retry_without_a_place_names_the_rule_that_held_it(tmp_path: Path) -> None:
    settings = OverloadSettings(in_flight=2, wait=0.2)
    engines = (FakeEngine(), FakeEngine())
    async with running(*engines, policy=holding(tmp_path), scrape=SLOW_SCRAPE, overload=settings) as router:
        for engine in engines:
            engine.script = busy_or_broken
        stay = [asked(router, "stays")]
        await until(lambda: router.counted()[0] == 1)
        fails = asked(router, "fails")
        await until(lambda: busy(router) == 1)  # it is held, and has given up its place
        stay.append(asked(router, "stays"))
        await until(lambda: router.counted()[0] == 2)
        router.application.admission.room.policy_changed()
        answer = await fails
        assert (answer.status, answer.body) == (500, b'{"error":{"message":"broken"}}')
        line = await told_of_giving_up(router)
        told = (line["gave_up"], line["attempts"], line["outcome"], line["rule"], line["instance"])
        assert told == ("in_flight", 1, "held", "wait_for_room", "")
        for task in stay:
            task.cancel()

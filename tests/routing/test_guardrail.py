"""Guardrail: rollback of a harmful change of policy."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.config.settings import CanarySettings, GuardrailSettings
from smetric.features import VOCABULARY
from smetric.fleet.instance import Instance, Lease
from smetric.fleet.record import DecisionRecord
from smetric.request.request import InferenceRequest
from smetric.routing.guardrail import ArmLoad, Band, Guardrail, Spread
from smetric.routing.policy_files import Origin, PolicyFile
from smetric.routing.routes import Match, Route, Routes
from tests.fakes import Call, FakeEngine, exchange_of, healthy, until
from tests.faults.harness import Running, chat, running
from tests.records.drive import Fleet, policy

# Load of an arm's own requests

POLICY = policy("policy p\nroute rr_argmin(requests) as least\n")


def sent(to: Instance, turn: int = 0) -> DecisionRecord:
    record = Fleet(random.Random(), 2).decide(POLICY, InferenceRequest(turn=turn))
    record.instance = to
    return record


def pass_through(load: ArmLoad, records: Sequence[DecisionRecord]) -> None:
    """Let *records* be under way for one look."""
    for record in records:
        load.placed(record)
    load.look()
    for record in records:
        load.left(record)


@pytest.fixture
def instances() -> list[Instance]:
    return [Instance(f"gpu-{i}", f"http://{i}") for i in range(4)]


def test_arm_load_averages_over_looks(instances: list[Instance]) -> None:
    load = ArmLoad(2)
    records = [sent(instances[0]) for _ in range(4)]
    load.look()
    for record in records:
        load.placed(record)
    load.look()
    assert load.over(instances) == Spread(4, 0.5, 2.0, 4)
    load.left(records[0])
    load.look()
    assert load.over(instances) == Spread(4, 3.5 / 4, 3.5, 4)
    load.clear()
    assert load.over(instances) == Spread(4, 0.0, 0.0, 0)
    assert load.over(instances).imbalance == 1


def test_arm_load_leaves_out_other_instances(instances: list[Instance]) -> None:
    load = ArmLoad(1)
    for instance in instances:
        load.placed(sent(instance))
    load.look()
    assert load.over(instances[:2]) == Spread(2, 1.0, 1.0, 2)


def test_arm_load_counts_choices(instances: list[Instance]) -> None:
    load = ArmLoad(10)
    for _ in range(10):
        pass_through(load, [sent(instances[0]), sent(instances[1], turn=3)])
    assert load.over(instances).choices == 10 + 1


def test_arm_load_shows_moving_pile_at_once(instances: list[Instance]) -> None:
    load = ArmLoad(4)
    for instance in instances:
        pass_through(load, [sent(instance) for _ in range(6)])
    assert load.over(instances) == Spread(4, 1.5, 1.5, 24)
    assert load.at_once(instances) == Spread(4, 1.5, 6.0, 24, 4)
    assert load.at_once(instances[:2]) == Spread(2, 1.5, 3.0, 12, 4)
    assert ArmLoad(4).at_once(instances) == Spread(4, 0.0, 0.0, 0)


def test_arm_load_shows_pile_that_moves_often(instances: list[Instance]) -> None:
    load = ArmLoad(10)
    for look in range(10):
        pass_through(load, [sent(instances[look % 2]) for _ in range(8)])
        assert load.at_once(instances[:2]).shows(1.9) == (look > 1)
    assert load.at_once(instances[:2]) == Spread(2, 4.0, 8.0, 80, 10)


@pytest.mark.parametrize(("count", "choices"), [(2, 15), (4, 8), (32, 4)])
def test_spread_shows_pile_of_few_requests(count: int, choices: int) -> None:
    assert Spread(count, 1, count, choices).shows(count)
    assert not Spread(count, 1, count, choices - 1).shows(count)


def test_spread_never_shows_balance() -> None:
    assert not Spread(4, 1, 1, 10_000).shows(1.0)
    assert not Spread(4, 0, 0, 0).shows(4.0)


def test_arm_load_rarely_shows_random_short_requests() -> None:
    rng = random.Random(6)
    alarms = 0
    for _ in range(60):
        among = [Instance(f"gpu-{i}", f"http://{i}") for i in range(rng.choice([2, 3, 4, 8, 32]))]
        load = ArmLoad(10)
        for _ in range(10):
            pass_through(load, [sent(rng.choice(among)) for _ in range(rng.randint(1, 12))])
        spread = load.at_once(among)
        alarms += spread.shows(spread.imbalance)
    assert alarms == 0


def test_arm_load_rarely_shows_random_requests() -> None:
    rng = random.Random(5)
    alarms = 0
    for _ in range(3000):
        count, choices = rng.choice([2, 4, 8, 32]), rng.randint(1, 200)
        loads = [0] * count
        for _ in range(choices):
            loads[rng.randrange(count)] += 1
        spread = Spread(count, choices / count, max(loads), choices)
        alarms += spread.shows(spread.imbalance)
    assert alarms <= 1


# Rollback after a change of policy

pytestmark = pytest.mark.slow

GOOD = "policy p\nroute rr_argmin(requests) as least\n"
BAD = "policy p\nroute argmax(requests) as most\n"
WORSE = "policy p\nroute argmax(requests) as busiest\n"
LOOK_S = 1.0


class World:
    """Four instances, one policy, and a clock; each step is one look."""

    def __init__(
        self, tmp_path: Path, *, models: Sequence[str] = ("m",) * 4, match: str = "", band: Band | None = None
    ):
        self.now = 1000.0
        self.path = tmp_path / "p.policy"
        self.path.write_text(GOOD)
        self.instances = [Instance(f"gpu-{i}", f"http://{i}", models=[model]) for i, model in enumerate(models)]
        self.file = PolicyFile(self.path, VOCABULARY, on_reload=self._reloaded)
        self.told: list[tuple[str, str]] = []
        route = Route("r", self.file, match=Match(models=frozenset({match} if match else ())))
        self.guardrail = Guardrail(
            Routes([route]),
            lambda: self.instances,
            band or Band(),
            lambda *what: self.told.append(what),
            aliases={"alias": "m"},
            clock=lambda: self.now,
        )
        self._leases: list[Lease] = []

    def _reloaded(self, file: PolicyFile, error: str | None) -> None:
        if error is None:
            self.guardrail.swapped(file)

    def load(self, *requests: int) -> None:
        for lease in self._leases:
            lease.release()
        self._leases = [
            instance.charge(1, 1)
            for instance, count in zip(self.instances, requests, strict=True)
            for _ in range(count)
        ]

    def swap(self, text: str) -> None:
        self.path.write_text(text)
        assert self.file.refresh()

    def answer(self, count: int, status: int, generation: int | None = None) -> None:
        made = Fleet(random.Random(1), 2).decide(policy(GOOD), generation=generation or self.file.current.number)
        for _ in range(count):
            made.route, made.status = "r", status
            self.guardrail.ended(exchange_of(made))

    def pass_s(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Let time pass; after how many seconds a policy was restored, or the whole of it."""
        before = len(self.told)
        for second in range(round(seconds)):
            meanwhile()
            self.now += LOOK_S
            self.guardrail.look()
            if len(self.told) > before:
                return second + 1
        return seconds


ONE, EVEN = (12, 0, 0, 0), (3, 3, 3, 3)


def changed(tmp_path: Path, before: Sequence[int] = (), after: Sequence[int] = (), **options: Any) -> World:
    """A world with a bad policy: 20 s of the load *before* its change, if any, and then the load *after*."""
    world = World(tmp_path, **options)
    if before:
        world.load(*before)
        world.pass_s(20)
    world.swap(BAD)
    if after:
        world.load(*after)
    return world


def test_guardrail_undoes_pile_on_one_instance(tmp_path: Path) -> None:
    world = changed(tmp_path, EVEN, ONE)
    with capture_logs() as logs:
        assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == GOOD
    assert (world.file.current.number, world.file.current.of, world.file.current.origin) == (3, 1, Origin.GUARDRAIL)
    assert world.told == [("r", "imbalance")]
    (line,) = logs
    assert (line["event"], line["log_level"], line["by"]) == ("smetric.policy.restored", "error", "guardrail")
    assert line["reason"].startswith("the busiest instance had ")
    assert "guardrail: the busiest" in (world.file.problem or "")


def test_guardrail_undoes_moving_pile(tmp_path: Path) -> None:
    world = changed(tmp_path, EVEN)
    turns = itertools.count()

    def move() -> None:
        at = next(turns) % 4
        world.load(*(12 if i == at else 0 for i in range(4)))

    assert world.pass_s(60, move) <= 20
    assert "4.0 times the mean, 1.0 before" in (world.file.problem or "")


def test_guardrail_ignores_random_placement(tmp_path: Path) -> None:
    rng, world = random.Random(7), changed(tmp_path, [1] * 32, models=("m",) * 32)

    def scatter() -> None:
        chosen = Counter(rng.choices(range(32), k=40))
        world.load(*(chosen[i] for i in range(32)))

    assert world.pass_s(200, scatter) == 200


@pytest.mark.parametrize("count", [2, 3, 32])
def test_guardrail_works_with_any_number_of_instances(tmp_path: Path, count: int) -> None:
    world = changed(tmp_path, [2] * count, [2 * count, *[0] * (count - 1)], models=("m",) * count)
    assert world.pass_s(60) <= 20


def test_guardrail_leaves_undone_policy_until_file_changes(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.swap(WORSE)
    world.pass_s(30)  # without requests
    world.load(*ONE)
    world.swap(BAD)
    assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == WORSE
    assert world.pass_s(600) == 600  # however bad that is too
    assert not world.file.refresh()
    world.swap(BAD + "# again\n")
    assert world.pass_s(60) <= 12
    assert len(world.told) == 2


def test_guardrail_undoes_quick_changes_together(tmp_path: Path) -> None:
    world = changed(tmp_path, EVEN, ONE)
    assert world.pass_s(9) == 9
    world.swap(BAD + "# a try to mend it\n")
    assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == GOOD
    assert "4.0 times the mean, 1.0 before" in (world.file.problem or "")


def test_guardrail_ignores_change_taken_back_by_hand(tmp_path: Path) -> None:
    world = changed(tmp_path, EVEN, ONE)
    world.swap(GOOD)
    with capture_logs() as logs:
        assert world.pass_s(60) == 60
    assert (world.file.current.number, world.file.current.origin) == (3, Origin.FILE)
    assert [(line["event"], line["error"]) for line in logs] == [
        ("smetric.guardrail.failed", "generation 1 is what acts already")
    ]


def test_guardrail_undoes_later_change_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.load(3, 3, 3, 3)
    world.pass_s(20)
    world.swap(GOOD + "# the same\n")
    world.pass_s(30)
    world.swap(BAD)
    world.load(*ONE)
    assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == GOOD + "# the same\n"


def test_guardrail_restores_a_kept_generation(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.load(3, 3, 3, 3)
    world.pass_s(20)
    for number in range(12):
        world.swap(f"{BAD}# {number}\n")
    world.load(*ONE)
    assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == f"{BAD}# 10\n"


def test_guardrail_ignores_operator_restore(tmp_path: Path) -> None:
    world = changed(tmp_path)
    world.file.restore(Origin.ROLLBACK, 1)
    world.file.restore(Origin.ROLLBACK, 2)
    world.load(*ONE)
    assert world.pass_s(600) == 600


@pytest.mark.parametrize(
    ("before", "after"),
    [((12, *[1] * 7), (12, *[1] * 7)), ((), (3, *[0] * 7))],
    ids=["earlier imbalance", "too few requests"],
)
def test_guardrail_tolerates_load(tmp_path: Path, before: Sequence[int], after: Sequence[int]) -> None:
    world = changed(tmp_path, before, after, models=("m",) * 8)
    assert world.pass_s(600) == 600


def test_guardrail_stops_watching_after_its_time(tmp_path: Path) -> None:
    world = World(tmp_path, band=Band(watch_s=30))
    world.load(3, 3, 3, 3)
    world.swap(BAD)
    world.pass_s(31)
    world.load(*ONE)
    assert world.pass_s(600) == 600


def test_guardrail_groups_instances_without_adapters(tmp_path: Path) -> None:
    world = World(tmp_path, models=("m", "m"))
    world.instances[0].models, world.instances[0].adapters = frozenset(("m", "tuned")), frozenset(("tuned",))
    world.swap(BAD)
    world.load(9, 0)
    assert world.pass_s(60) <= 12


@pytest.mark.parametrize(
    ("match", "others", "own"),
    [("", (9, 9, 1, 1), (1, 1, 9, 0)), ("m", (2, 2, 9, 0), (9, 0, 2, 2)), ("alias", (2, 2, 9, 0), (9, 0, 2, 2))],
    ids=["each model by itself", "a route's model", "an alias of it"],
)
def test_guardrail_compares_the_instances_of_a_model(
    tmp_path: Path, match: str, others: Sequence[int], own: Sequence[int]
) -> None:
    world = changed(tmp_path, (), others, models=("m", "m", "other", "other"), match=match)
    assert world.pass_s(60) == 60
    world.load(*own)
    assert world.pass_s(60) <= 12


def test_guardrail_ignores_unhealthy_and_drained_instances(tmp_path: Path) -> None:
    world = changed(tmp_path, (), ONE)
    for instance in world.instances[1:]:
        instance.draining = True
    assert world.pass_s(60) == 60


# Errors


def test_guardrail_undoes_policy_that_sheds_all(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pass_s(20, lambda: world.answer(5, 200))
    world.swap(BAD)
    assert world.pass_s(60, lambda: world.answer(5, 429)) <= 12
    assert world.told == [("r", "errors")]
    assert "100% of the requests failed, 0% before" in (world.file.problem or "")


def test_guardrail_tolerates_earlier_errors(tmp_path: Path) -> None:
    world = World(tmp_path)

    def a_third_fails() -> None:
        world.answer(4, 200)
        world.answer(2, 503)

    world.pass_s(20, a_third_fails)
    world.swap(BAD)
    assert world.pass_s(60, a_third_fails) == 60


def test_guardrail_ignores_requests_of_previous_policy(tmp_path: Path) -> None:
    world = changed(tmp_path)
    assert world.pass_s(60, lambda: world.answer(5, 503, generation=1)) == 60


def test_guardrail_counts_failed_evaluations_only(tmp_path: Path) -> None:
    world = World(tmp_path)

    def undecided(outcome: str) -> None:
        for _ in range(5):
            made = Fleet(random.Random(1), 2).decide(policy(GOOD), generation=world.file.current.number)
            made.route, made.status, made.decision, made.outcome = "r", 503, None, outcome
            world.guardrail.ended(exchange_of(made))

    world.swap(BAD)
    assert world.pass_s(60, lambda: undecided(names.NO_CANDIDATE)) == 60
    assert world.pass_s(60, lambda: undecided(names.ERROR)) < 20


def test_guardrail_ignores_client_errors(tmp_path: Path) -> None:
    world = changed(tmp_path)

    def odd() -> None:
        for status in (499, 400, 404):
            world.answer(5, status)

    assert world.pass_s(60, odd) == 60


def test_guardrail_needs_enough_failures(tmp_path: Path) -> None:
    world = changed(tmp_path)
    world.answer(12, 503)
    assert world.pass_s(60) == 60
    world.answer(10, 503)
    assert world.pass_s(60) <= 2


# Arms and routes


class Arms(World):
    """The same with a canary; requests of both arms are under way."""

    def __init__(self, tmp_path: Path):
        super().__init__(tmp_path)
        self.canary_path = tmp_path / "canary.policy"
        self.canary_path.write_text(GOOD)
        self.canary = PolicyFile(self.canary_path, VOCABULARY, on_reload=self._reloaded, name="r:canary")
        self.files = {"control": self.file, "canary": self.canary}
        self.guardrail = Guardrail(
            Routes([Route("r", self.file, canary=self.canary, share=0.5)]),
            lambda: self.instances,
            Band(),
            lambda *what: self.told.append(what),
            clock=lambda: self.now,
        )
        self._open: list[DecisionRecord] = []

    def put(self, **arms: Sequence[int]) -> None:
        """End all requests; then let so many of each arm begin on each instance."""
        for record in self._open:
            record.status = 200
            self.guardrail.ended(exchange_of(record))
        self._open = [self._begun(arm, i) for arm in arms for i, count in enumerate(arms[arm]) for _ in range(count)]
        self.load(*(sum(counts) for counts in zip(*arms.values(), strict=True)))

    def _begun(self, arm: str, at: int) -> DecisionRecord:
        number = self.files.get(arm, self.file).current.number
        record = Fleet(random.Random(), 2).decide(policy(GOOD), InferenceRequest(turn=1), number)
        record.route, record.arm, record.instance = "r", arm, self.instances[at]
        self.guardrail.decided(exchange_of(record), record)
        return record

    def swap_canary(self) -> None:
        self.canary_path.write_text(BAD)
        assert self.canary.refresh()


def test_guardrail_undoes_canary_hidden_by_the_other_arm(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.put(control=EVEN, canary=EVEN)
    world.pass_s(20)
    world.swap_canary()
    world.put(control=(0, 4, 4, 4), canary=ONE)  # in all twice the mean: within the band
    assert world.pass_s(60) <= 12
    assert world.canary.current.origin is Origin.GUARDRAIL
    assert world.file.current.number == 1
    assert world.told == [("r", "imbalance")]
    assert "of its own requests the busiest instance had 4.0 times the mean, 1.0 before" in (world.canary.problem or "")


def test_guardrail_undoes_canary_with_moving_pile(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.put(control=EVEN, canary=EVEN)
    world.pass_s(20)
    world.swap_canary()
    turns = itertools.count()

    def move() -> None:
        at = next(turns) % 4
        world.put(control=tuple(0 if i == at else 4 for i in range(4)), canary=tuple(12 * (i == at) for i in range(4)))

    assert world.pass_s(60, move) <= 12
    assert world.canary.current.origin is Origin.GUARDRAIL
    assert world.file.current.number == 1


def test_guardrail_spares_even_canary(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.swap_canary()
    world.put(control=(60, 0, 0, 0), canary=(16, 16, 16, 16))
    assert world.pass_s(600) == 600


def test_guardrail_looks_at_all_when_an_arm_has_few(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.swap_canary()
    world.put(control=EVEN, canary=(3, 0, 0, 0))
    assert world.pass_s(60) == 60
    world.put(control=(20, 0, 0, 0), canary=(3, 0, 0, 0))
    assert world.pass_s(60) <= 12


def test_guardrail_separates_placements_of_previous_policy(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.put(control=(0, 4, 4, 4), canary=ONE)
    world.swap_canary()
    assert world.pass_s(60) == 60


def test_guardrail_tolerates_pile_by_design(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.put(control=(0, 4, 4, 4), canary=ONE)
    world.pass_s(20)
    world.swap_canary()
    world.put(control=(0, 4, 4, 4), canary=ONE)
    assert world.pass_s(600) == 600


def test_guardrail_counts_retried_request_once(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.swap_canary()
    world.put(control=EVEN, canary=ONE)
    for i, failed in enumerate(world._open[12:]):
        again = world._begun("canary", i % 4)
        world.guardrail.decided(exchange_of(failed, again), again)
        world._open[12 + i] = again
    assert world.pass_s(600) == 600


def test_guardrail_drops_failed_requests_without_alternative(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.swap_canary()
    world.put(control=EVEN, canary=ONE)
    for failed in world._open[12:]:
        nobody = world._begun("", 0)  # no policy ran, so no arm counts
        world.guardrail.decided(exchange_of(failed, nobody), nobody)
        world.guardrail.ended(exchange_of(nobody))
    del world._open[12:]
    assert world.pass_s(600) == 600


# Whole router


async def slow(call: Call) -> None:
    await asyncio.sleep(0.1)
    await healthy(call)


def guarded(path: Path, **settings: Any) -> AbstractAsyncContextManager[Running]:
    """Run a router with four slow engines and a short window of the guardrail."""
    path.write_text(GOOD)
    guardrail = GuardrailSettings(window=1.0)
    engines = (FakeEngine(slow) for _ in range(4))
    return running(*engines, policy=str(path), guardrail=guardrail, check_after=False, **settings)


@asynccontextmanager
async def clients(router: Running, count: int) -> AsyncIterator[None]:
    """Clients that ask again as soon as they are answered, each with its own session."""
    stop = asyncio.Event()

    async def client(number: int) -> None:
        while not stop.is_set():
            session = ("x-session-id", f"client-{number}")
            assert (await router.ask("POST", "/v1/chat/completions", chat(), session)).status == 200

    tasks = [asyncio.create_task(client(number)) for number in range(count)]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def test_guardrail_undoes_bad_policy_under_load(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    async with guarded(path) as router:
        async with clients(router, 12):
            await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            path.write_text(BAD)
            await until(lambda: acting(router) is Origin.FILE, within_s=10)
            await until(lambda: acting(router) is Origin.GUARDRAIL, within_s=30)
            assert asyncio.get_running_loop().time() - began < 30
        answer = await router.chat()
        assert answer.value("x-smetric-rule") == "least"
        (line,) = router.lines("smetric.policy.restored")
        assert (line["level"], line["by"], line["of"]) == ("error", "guardrail", 1)
        page = (await router.admin("/metrics")).body
        assert b'smetric_guardrail_restores_total{reason="imbalance",route="default"} 1.0' in page
        shown = orjson.loads((await router.admin(f"/admin/decisions/{answer.value('x-smetric-decision-id')}")).body)
        assert (shown["policy_origin"], shown["generation"]) == ("guardrail", 3)


def acting(router: Running) -> Origin:
    return router.application.policy_file.current.origin


async def test_guardrail_undoes_bad_canary_and_keeps_control(tmp_path: Path) -> None:
    canary = tmp_path / "canary.policy"
    canary.write_text(GOOD)
    async with guarded(tmp_path / "p.policy", canary=CanarySettings(policy=str(canary), share=0.5)) as router:
        control, tried = [arm.file for _, arm in router.application.routes.acting()]
        async with clients(router, 24):
            await asyncio.sleep(0.5)
            canary.write_text(BAD)
            await until(lambda: tried.current.origin is Origin.FILE, within_s=10)
            await until(lambda: tried.current.origin is Origin.GUARDRAIL, within_s=30)
        assert control.current.number == 1
        (line,) = router.lines("smetric.policy.restored")
        assert line["route"] == "default:canary"
        assert str(line["reason"]).startswith("of its own requests the busiest instance had ")


async def test_guardrail_can_be_disabled() -> None:
    async with running(FakeEngine(), guardrail=GuardrailSettings(enabled=False)) as router:
        assert router.application.policies.guardrail is None

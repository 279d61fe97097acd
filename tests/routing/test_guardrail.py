"""What goes wrong after a change of policy is undone once, and said; what was wrong before is left alone."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.config.settings import CanarySettings, GuardrailSettings
from smetric.features import VOCABULARY
from smetric.fleet.instance import Instance, Lease
from smetric.fleet.record import DecisionRecord
from smetric.request.request import InferenceRequest
from smetric.routing.guardrail import Band, Guardrail
from smetric.routing.policy_files import Origin, PolicyFile
from smetric.routing.routes import Match, Route, Routes
from tests.fakes import Call, FakeEngine, exchange_of, healthy, until
from tests.faults.harness import Running, chat, running
from tests.product import pytest_asyncio_loop_factories  # noqa: F401
from tests.records.drive import Fleet, policy

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


def test_a_policy_that_piles_everything_on_one_instance_is_undone_within_seconds(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.load(3, 3, 3, 3)
    world.pass_s(20)
    world.swap(BAD)
    world.load(12, 0, 0, 0)
    with capture_logs() as logs:
        assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == GOOD
    assert (world.file.current.number, world.file.current.of, world.file.current.origin) == (3, 1, Origin.GUARDRAIL)
    assert world.told == [("r", "imbalance")]
    (line,) = logs
    assert (line["event"], line["log_level"], line["by"]) == ("smetric.policy.restored", "error", "guardrail")
    assert line["reason"].startswith("the busiest instance had ")
    assert "guardrail: the busiest" in (world.file.problem or "")


def test_a_pile_that_moves_from_instance_to_instance_is_undone_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.load(3, 3, 3, 3)
    world.pass_s(20)
    world.swap(BAD)
    turns = itertools.count()

    def move() -> None:
        at = next(turns) % 4
        world.load(*(12 if i == at else 0 for i in range(4)))

    assert world.pass_s(60, move) <= 20
    assert "4.0 times the mean, 1.0 before" in (world.file.problem or "")


def test_requests_at_random_on_many_instances_are_no_pile(tmp_path: Path) -> None:
    rng, world = random.Random(7), World(tmp_path, models=("m",) * 32)
    world.load(*[1] * 32)
    world.pass_s(20)
    world.swap(BAD)

    def scatter() -> None:
        chosen = Counter(rng.choices(range(32), k=40))
        world.load(*(chosen[i] for i in range(32)))

    assert world.pass_s(200, scatter) == 200


@pytest.mark.parametrize("count", [2, 3, 32])
def test_it_does_so_however_many_instances_there_are(tmp_path: Path, count: int) -> None:
    world = World(tmp_path, models=("m",) * count)
    world.load(*[2] * count)
    world.pass_s(20)
    world.swap(BAD)
    world.load(2 * count, *[0] * (count - 1))
    assert world.pass_s(60) <= 20


def test_what_it_has_undone_it_leaves_alone_until_the_file_changes_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.swap(WORSE)
    world.pass_s(30)  # nobody asks anything meanwhile
    world.load(12, 0, 0, 0)
    world.swap(BAD)
    assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == WORSE
    assert world.pass_s(600) == 600  # however bad that is too
    assert not world.file.refresh()
    world.swap(BAD + "# again\n")
    assert world.pass_s(60) <= 12
    assert len(world.told) == 2


def test_a_bad_change_that_is_changed_again_at_once_is_undone_with_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.load(3, 3, 3, 3)
    world.pass_s(20)
    world.swap(BAD)
    world.load(12, 0, 0, 0)
    assert world.pass_s(9) == 9
    world.swap(BAD + "# a try to mend it\n")
    assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == GOOD
    assert "4.0 times the mean, 1.0 before" in (world.file.problem or "")


def test_a_bad_change_that_was_taken_back_by_hand_is_not_undone_once_more(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.load(3, 3, 3, 3)
    world.pass_s(20)
    world.swap(BAD)
    world.load(12, 0, 0, 0)
    world.swap(GOOD)
    with capture_logs() as logs:
        assert world.pass_s(60) == 60
    assert (world.file.current.number, world.file.current.origin) == (3, Origin.FILE)
    assert [(line["event"], line["error"]) for line in logs] == [
        ("smetric.guardrail.failed", "generation 1 is what acts already")
    ]


def test_a_second_change_later_is_undone_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.load(3, 3, 3, 3)
    world.pass_s(20)
    world.swap(GOOD + "# the same\n")
    world.pass_s(30)
    world.swap(BAD)
    world.load(12, 0, 0, 0)
    assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == GOOD + "# the same\n"


def test_however_often_a_bad_policy_is_changed_at_once_one_that_is_kept_is_restored(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.load(3, 3, 3, 3)
    world.pass_s(20)
    for number in range(12):
        world.swap(f"{BAD}# {number}\n")
    world.load(12, 0, 0, 0)
    assert world.pass_s(60) <= 12
    assert world.file.current.policy.source == f"{BAD}# 10\n"


def test_what_an_operator_restored_is_not_undone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.swap(BAD)
    world.file.restore(Origin.ROLLBACK, 1)
    world.file.restore(Origin.ROLLBACK, 2)
    world.load(12, 0, 0, 0)
    assert world.pass_s(600) == 600


def test_an_imbalance_that_was_there_before_is_not_the_changes_fault(tmp_path: Path) -> None:
    world = World(tmp_path, models=("m",) * 8)
    world.load(12, 1, 1, 1, 1, 1, 1, 1)
    world.pass_s(20)
    world.swap(BAD)
    assert world.pass_s(600) == 600


def test_few_requests_are_no_load(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.swap(BAD)
    world.load(3, 0, 0, 0)
    assert world.pass_s(600) == 600


def test_a_change_that_held_for_long_enough_is_watched_no_more(tmp_path: Path) -> None:
    world = World(tmp_path, band=Band(watch_s=30))
    world.load(3, 3, 3, 3)
    world.swap(BAD)
    world.pass_s(31)
    world.load(12, 0, 0, 0)
    assert world.pass_s(600) == 600


def test_instances_of_other_models_are_compared_with_each_other_only(tmp_path: Path) -> None:
    world = World(tmp_path, models=("m", "m", "other", "other"))
    world.swap(BAD)
    world.load(9, 9, 1, 1)
    assert world.pass_s(60) == 60
    world.load(1, 1, 9, 0)
    assert world.pass_s(60) <= 12


def test_an_adapter_that_one_instance_has_loaded_makes_it_no_other_models(tmp_path: Path) -> None:
    world = World(tmp_path, models=("m", "m"))
    world.instances[0].models, world.instances[0].adapters = frozenset(("m", "tuned")), frozenset(("tuned",))
    world.swap(BAD)
    world.load(9, 0)
    assert world.pass_s(60) <= 12


@pytest.mark.parametrize("match", ["m", "alias"])
def test_a_route_for_one_model_answers_for_its_instances_only(tmp_path: Path, match: str) -> None:
    world = World(tmp_path, models=("m", "m", "other", "other"), match=match)
    world.swap(BAD)
    world.load(2, 2, 9, 0)
    assert world.pass_s(60) == 60
    world.load(9, 0, 2, 2)
    assert world.pass_s(60) <= 12


def test_instances_that_are_ill_or_drained_are_no_imbalance(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.swap(BAD)
    world.load(12, 0, 0, 0)
    for instance in world.instances[1:]:
        instance.draining = True
    assert world.pass_s(60) == 60


# ── errors ───────────────────────────────────────────────────────────────────


def test_a_policy_that_sheds_everybody_is_undone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.pass_s(20, lambda: world.answer(5, 200))
    world.swap(BAD)
    assert world.pass_s(60, lambda: world.answer(5, 429)) <= 12
    assert world.told == [("r", "errors")]
    assert "100% of the requests failed, 0% before" in (world.file.problem or "")


def test_errors_that_were_there_before_are_not_the_changes_fault(tmp_path: Path) -> None:
    world = World(tmp_path)

    def a_third_fails() -> None:
        world.answer(4, 200)
        world.answer(2, 503)

    world.pass_s(20, a_third_fails)
    world.swap(BAD)
    assert world.pass_s(60, a_third_fails) == 60


def test_requests_that_the_policy_before_decided_do_not_count(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.swap(BAD)
    assert world.pass_s(60, lambda: world.answer(5, 503, generation=1)) == 60


def test_requests_that_no_policy_decided_do_not_count_and_those_that_it_could_not_decide_do(tmp_path: Path) -> None:
    world = World(tmp_path)

    def undecided(outcome: str) -> None:
        for _ in range(5):
            made = Fleet(random.Random(1), 2).decide(policy(GOOD), generation=world.file.current.number)
            made.route, made.status, made.decision, made.outcome = "r", 503, None, outcome
            world.guardrail.ended(exchange_of(made))

    world.swap(BAD)
    assert world.pass_s(60, lambda: undecided(names.NO_CANDIDATE)) == 60
    assert world.pass_s(60, lambda: undecided(names.ERROR)) < 20


def test_clients_that_leave_and_bad_requests_are_no_failures(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.swap(BAD)

    def odd() -> None:
        for status in (499, 400, 404):
            world.answer(5, status)

    assert world.pass_s(60, odd) == 60


def test_a_few_failures_are_no_share(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.swap(BAD)
    world.answer(12, 503)
    assert world.pass_s(60) == 60
    world.answer(10, 503)
    assert world.pass_s(60) <= 2


# ── arms and routes, each by its own requests ──


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


EVEN = (3, 3, 3, 3)


def test_a_canary_that_piles_its_half_on_one_instance_is_undone_though_the_other_arm_evens_it_out(
    tmp_path: Path,
) -> None:
    world = Arms(tmp_path)
    world.put(control=EVEN, canary=EVEN)
    world.pass_s(20)
    world.swap_canary()
    world.put(control=(0, 4, 4, 4), canary=(12, 0, 0, 0))  # in all twice the mean: within the band
    assert world.pass_s(60) <= 12
    assert world.canary.current.origin is Origin.GUARDRAIL
    assert world.file.current.number == 1
    assert world.told == [("r", "imbalance")]
    assert "of its own requests the busiest instance had 4.0 times the mean, 1.0 before" in (world.canary.problem or "")


def test_a_canary_whose_pile_moves_from_instance_to_instance_is_undone(tmp_path: Path) -> None:
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


def test_a_canary_that_spreads_its_own_evenly_is_not_blamed_for_what_the_other_arm_does(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.swap_canary()
    world.put(control=(60, 0, 0, 0), canary=(16, 16, 16, 16))
    assert world.pass_s(600) == 600


def test_where_an_arms_own_requests_are_too_few_to_tell_all_are_looked_at(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.swap_canary()
    world.put(control=EVEN, canary=(3, 0, 0, 0))
    assert world.pass_s(60) == 60
    world.put(control=(20, 0, 0, 0), canary=(3, 0, 0, 0))
    assert world.pass_s(60) <= 12


def test_requests_that_the_policy_before_placed_are_not_its_own(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.put(control=(0, 4, 4, 4), canary=(12, 0, 0, 0))
    world.swap_canary()
    assert world.pass_s(60) == 60


def test_what_an_arm_piled_up_before_by_design_is_not_the_changes_fault(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.put(control=(0, 4, 4, 4), canary=(12, 0, 0, 0))
    world.pass_s(20)
    world.swap_canary()
    world.put(control=(0, 4, 4, 4), canary=(12, 0, 0, 0))
    assert world.pass_s(600) == 600


def test_a_request_that_is_tried_elsewhere_counts_where_it_is(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.swap_canary()
    world.put(control=EVEN, canary=(12, 0, 0, 0))
    for i, failed in enumerate(world._open[12:]):
        again = world._begun("canary", i % 4)
        world.guardrail.decided(exchange_of(failed, again), again)
        world._open[12 + i] = again
    assert world.pass_s(600) == 600


def test_requests_that_nobody_else_may_serve_do_not_stay_where_they_have_failed(tmp_path: Path) -> None:
    world = Arms(tmp_path)
    world.swap_canary()
    world.put(control=EVEN, canary=(12, 0, 0, 0))
    for failed in world._open[12:]:
        nobody = world._begun("", 0)  # no policy was asked, and so none of an arm
        world.guardrail.decided(exchange_of(failed, nobody), nobody)
        world.guardrail.ended(exchange_of(nobody))
    del world._open[12:]
    assert world.pass_s(600) == 600


# ── the whole router ─────────────────────────────────────────────────────────


async def slow(call: Call) -> None:
    await asyncio.sleep(0.1)
    await healthy(call)


async def test_a_policy_pushed_under_load_that_takes_the_fullest_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "p.policy"
    path.write_text(GOOD)
    async with running(
        *(FakeEngine(slow) for _ in range(4)),
        policy=str(path),
        guardrail=GuardrailSettings(window=1.0),
        check_after=False,
    ) as router:
        stop = asyncio.Event()

        async def client() -> None:
            while not stop.is_set():
                assert (await router.chat()).status == 200

        clients = [asyncio.create_task(client()) for _ in range(12)]
        try:
            await asyncio.sleep(1.0)
            began = asyncio.get_running_loop().time()
            path.write_text(BAD)
            await until(lambda: acting(router) is Origin.FILE, within_s=10)
            await until(lambda: acting(router) is Origin.GUARDRAIL, within_s=30)
            assert asyncio.get_running_loop().time() - began < 30
        finally:
            stop.set()
            await asyncio.gather(*clients)
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


async def test_a_bad_canary_on_half_of_the_traffic_is_undone_and_the_other_arm_goes_on(tmp_path: Path) -> None:
    path, canary = tmp_path / "p.policy", tmp_path / "canary.policy"
    path.write_text(GOOD)
    canary.write_text(GOOD)
    async with running(
        *(FakeEngine(slow) for _ in range(4)),
        policy=str(path),
        canary=CanarySettings(policy=str(canary), share=0.5),
        guardrail=GuardrailSettings(window=1.0),
        check_after=False,
    ) as router:
        stop = asyncio.Event()

        async def client(number: int) -> None:
            while not stop.is_set():
                session = ("x-session-id", f"client-{number}")
                assert (await router.ask("POST", "/v1/chat/completions", chat(), session)).status == 200

        clients = [asyncio.create_task(client(number)) for number in range(24)]
        control, tried = [arm.file for _, arm in router.application.routes.acting()]
        try:
            await asyncio.sleep(0.5)
            canary.write_text(BAD)
            await until(lambda: tried.current.origin is Origin.FILE, within_s=10)
            await until(lambda: tried.current.origin is Origin.GUARDRAIL, within_s=30)
        finally:
            stop.set()
            await asyncio.gather(*clients)
        assert control.current.number == 1
        (line,) = router.lines("smetric.policy.restored")
        assert line["route"] == "default:canary"
        assert str(line["reason"]).startswith("of its own requests the busiest instance had ")


async def test_it_can_be_turned_off() -> None:
    async with running(FakeEngine(), guardrail=GuardrailSettings(enabled=False)) as router:
        assert router.application.policies.guardrail is None

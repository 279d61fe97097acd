"""Watch for a policy that refuses every request."""

from __future__ import annotations

import random

import pytest
from structlog.testing import capture_logs

from smetric.request.request import InferenceRequest
from smetric.routing.rejections import PAUSE_S, REFUSING_S, RejectionWatch
from tests.clock import Clock
from tests.fakes import exchange_of
from tests.records.drive import Fleet, policy

ROUTES = "route rr_argmin(requests)"
REJECTS = 'reject 429 "full" when req.turn == 0 as shed\nroute rr_argmin(requests)'
EMPTIES = "keep requests > 1e9 when req.turn == 0 as busy\nroute rr_argmin(requests)"


class Router:
    """A watch, and decisions of the default route."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.watch = RejectionWatch(self.clock)

    def decide(self, rules: str, *, turn: int = 0, arm: str = "") -> None:
        made = Fleet(random.Random(1), 2).decide(policy(f"policy p\n{rules}\n"), InferenceRequest(turn=turn))
        made.route, made.arm = "default", arm
        self.watch.decided(exchange_of(made), made)


@pytest.mark.parametrize(("rules", "rule"), [(REJECTS, "shed"), (EMPTIES, "busy")])
def test_watch_reports_a_policy_that_refuses_everything_once(rules: str, rule: str) -> None:
    router = Router()
    with capture_logs() as logs:
        for _ in range(30):
            router.decide(rules)
            router.clock.now += 1.0
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("smetric.policy.refuses_all", "error")
    assert (line["route"], line["policy"], line["rule"]) == ("default", "p", rule)
    assert router.watch.refusing() == {("default", ""): 29.0}, "no idle time counts"


def test_watch_forgets_refusals_when_the_policy_routes() -> None:
    router = Router()
    with capture_logs() as logs:
        for second in range(40):
            router.decide(REJECTS, turn=int(second % 9 == 8))
            router.clock.now += 1.0
    assert logs == []
    router.decide(REJECTS, turn=1)
    assert router.watch.refusing() == {}


def test_watch_counts_refusals_anew_after_a_pause() -> None:
    router = Router()
    with capture_logs() as logs:
        for pause_s in (REFUSING_S - 1, PAUSE_S, REFUSING_S - 1, 3600.0):
            router.decide(REJECTS)
            router.clock.now += pause_s
            assert router.watch.refusing() == {}
    assert logs == []
    for _ in range(2):
        router.decide(REJECTS)
        router.clock.now += PAUSE_S - 1
    assert router.watch.refusing() == {("default", ""): PAUSE_S - 1}
    router.clock.now += 1.0
    assert router.watch.refusing() == {}


def test_watch_judges_each_arm_by_itself() -> None:
    router = Router()
    with capture_logs() as logs:
        for _ in range(round(REFUSING_S) + 1):
            router.decide(ROUTES, arm="control")
            router.decide(REJECTS, arm="canary")
            router.clock.now += 1.0
    assert [line["route"] for line in logs] == ["default:canary"]
    assert list(router.watch.refusing()) == [("default", "canary")]

"""What another policy would have chosen is held against what was chosen, or done instead."""

from __future__ import annotations

import random

import pytest

from smetric.admin.live import IN_FORCE, OtherPolicies
from tests.records.drive import Fleet, policy

REJECT = 'policy strict\nreject {} "no" when req.turn == 0\nroute rr_argmin(requests)\n'
HOLD = "policy patient\nhold for 5s when req.turn == 0\nroute rr_argmin(requests)\n"


@pytest.mark.parametrize(("other", "agrees"), [(REJECT.format(503), True), (REJECT.format(429), False), (HOLD, False)])
async def test_nobody_chosen_for_another_reason_is_not_the_same(other: str, agrees: bool) -> None:
    fleet = Fleet(random.Random(3), 4)
    record = fleet.decide(policy(REJECT.format(503)), fleet.request(turn=0))
    assert record.instance is None
    others = OtherPolicies(lambda: {"other": policy(other)}, {})
    assert (await others.judge(record, f"{IN_FORCE}other"))["agrees"] is agrees

"""Where the policy of one arm has put the requests that are under way, looked at now and then.

A pile of requests may stay where it is, or move on as a whole whenever it has been worked off: then each instance has
its share on average, and yet at any moment one has all. What is out of band is judged in `guardrail.py`.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smetric.fleet.instance import Instance
    from smetric.telemetry.record import DecisionRecord

#: What is more likely than this may have come about by chance.
CHANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Spread:
    """How requests lie on some instances.

    Args:
        count: the instances, two at least.
        mean: requests for each of them.
        busiest: requests on the busiest.
        choices: of all requests, how many were placed regardless of each other.
        piles: how often another instance may have been the busiest; 1 where it is the same throughout.
    """

    count: int
    mean: float
    busiest: float
    choices: float = math.inf
    piles: int = 1

    @property
    def imbalance(self) -> float:
        """The busiest instance's requests over the mean; 1 where there are none."""
        return self.busiest / self.mean if self.mean else 1.0

    def chance(self, imbalance: float) -> float:
        """Logarithm of how likely so many choices, made at random, put *imbalance* times the mean on some instance.

        Chernoff's bound: of n choices, one of k instances gets the share s or more with a probability of at most
        k·exp(−n·D), where D = s·ln(s·k) + (1 − s)·ln((1 − s) / (1 − 1/k)). Where it may be another one m times, that is
        kᵐ·exp(−n·D).
        """
        if imbalance <= 1:
            return 0.0
        fair = 1 / self.count
        share = min(1.0, imbalance * fair)
        apart = share * math.log(share / fair)
        if share < 1:
            apart += (1 - share) * math.log((1 - share) / (1 - fair))
        return self.piles * math.log(self.count) - self.choices * apart

    def shows(self, imbalance: float) -> bool:
        """Whether so many choices, made at random, would hardly put *imbalance* times the mean on any instance."""
        return self.chance(imbalance) < math.log(CHANCE)


def at_once(looks: Iterable[Mapping[Instance, float]], instances: Collection[Instance]) -> Spread:
    """How requests lay on *instances* at each of *looks*: on the busiest of the moment, on average."""
    loads = [[look.get(instance, 0) for instance in instances] for look in looks]
    count = max(1, len(loads))
    total = sum(map(sum, loads)) / count
    return Spread(len(instances), total / len(instances), sum(map(max, loads)) / count, total)


class ArmLoad:
    """The requests of one arm that its policy in force has placed.

    Args:
        looks: how many looks back it tells of.
    """

    def __init__(self, looks: int) -> None:
        #: By id of the decision: where, and whether it is the first turn of a conversation, which is placed for itself.
        self._under_way: dict[str, tuple[Instance, bool]] = {}
        self._looks: deque[dict[str, tuple[Instance, bool]]] = deque(maxlen=looks)

    def clear(self) -> None:
        """Another policy is in force."""
        self._under_way.clear()
        self._looks.clear()

    def placed(self, record: DecisionRecord) -> None:
        """*record* sends its request to an instance."""
        if record.instance is not None:
            self._under_way[record.id] = record.instance, not record.request.turn

    def left(self, record: DecisionRecord) -> None:
        """The request of *record* is no longer where it was sent."""
        self._under_way.pop(record.id, None)

    def look(self) -> None:
        """Look at it."""
        self._looks.append(self._under_way.copy())

    def over(self, instances: Collection[Instance]) -> Spread:
        """How its requests lay on *instances*, averaged over the last looks.

        Later turns may be bound to the place of the turn before: of them only those under way at once are choices.
        """
        loads: Counter[Instance] = Counter()
        first: set[str] = set()
        later = 0
        for look in self._looks:
            for id, (instance, is_first) in look.items():
                if instance in instances:
                    loads[instance] += 1
                    if is_first:
                        first.add(id)
                    else:
                        later += 1
        looks = max(1, len(self._looks))
        busiest = max(loads.values(), default=0)
        return Spread(
            len(instances), loads.total() / looks / len(instances), busiest / looks, len(first) + later / looks
        )

    def at_once(self, instances: Collection[Instance]) -> Spread:
        """How they lay on *instances* at each of the last looks.

        Choices are those under way at the same time; or all, of which each look may have had a busiest one of its own.
        """
        spread = at_once([Counter(instance for instance, _ in look.values()) for look in self._looks], instances)
        over = replace(spread, choices=self.over(instances).choices, piles=max(1, len(self._looks)))
        return min(spread, over, key=lambda one: one.chance(one.imbalance))

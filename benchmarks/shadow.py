"""What a policy in shadow costs a request: gathering what it reads besides, evaluating it, and counting.

    python benchmarks/shadow.py [--decisions 1000] [--instances 32]

Prints microseconds of CPU time per decision, median of five runs, for shipped policies in shadow of `smetric`, first
turns and later ones apart: on the way of the request (what is at hand, and the look-ups' beginning), and after its
answer has begun. What a source takes to look up is not counted: an acting policy that reads the same makes it look too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence

from smetric import names
from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.fleet import Candidates, Fleet
from smetric.fleet.instance import Instance, Scrape
from smetric.fleet.record import DecisionRecord
from smetric.policy import Snapshot
from smetric.request.request import Api, InferenceRequest
from smetric.routing.policy_files import PolicyFile
from smetric.routing.router import Observer
from smetric.routing.shadow import Shadow, Shadows
from smetric.sources.lookups import LookupDeadline, Lookups
from smetric.sources.source import Cells, Source
from smetric.telemetry.metrics import Metrics

ROUNDS = 5
#: Requests that are looked up in one turn of the event loop.
AT_ONCE = 10
SHADOWS = ("bailian", "lmetric", "load_only")


class AtOnce(Source):
    """A source that knows all hit lengths and takes no time: what is measured is what surrounds it."""

    name = "at_once"
    fills = frozenset({"hit_len"})

    def lookup(self, request: InferenceRequest, instances: Sequence[Instance]) -> dict[str, Cells]:
        return {"hit_len": [0.0] * len(instances)}


def fleet_of(size: int) -> Fleet:
    rng = random.Random(7)
    instances = [Instance(f"gpu-{i:02}", f"http://10.0.0.{i}:8000") for i in range(size)]
    fleet = Fleet(instances, VOCABULARY)
    for instance in fleet.instances:
        instance.scrape = Scrape(fleet.clock(), rng.randint(0, 30), rng.randint(0, 5), rng.random(), 0)
    return fleet


def records(fleet: Fleet, count: int, turn: int) -> list[DecisionRecord]:
    """*count* decisions of `smetric`."""
    policy = PolicyFile(shipped_policies()["smetric"], VOCABULARY).current.policy
    rng = random.Random(7)
    made = []
    for number in range(count):
        request = InferenceRequest(
            turn=turn,
            prompt_len=8000,
            est_hit=4000 if turn else 0,
            session=f"s{number % 5000}",
            api=Api.CHAT,
            body=b"{}",
        )
        cells = [float(rng.choice([0, 0, 4000])) for _ in fleet.instances]
        snapshot = fleet.snapshot(Candidates(fleet.instances), policy.reads)
        if turn:
            fleet.fill(snapshot, "hit_len", cells, "", request.prompt_len)
        decision = policy.decide(snapshot, request, {}, number)
        made.append(
            DecisionRecord(
                time_ns=1,
                outcome=names.ROUTED,
                request=request,
                policy=policy,
                generation=1,
                decision=decision,  # type: ignore[arg-type]  # what is looked up is there
                instance=fleet.instances[0],
            )
        )
    return made


def cost(run: Callable[[], object], count: int) -> float:
    """Microseconds of CPU time for each of *count*, median."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        run()
        times.append((time.process_time() - began) / count * 1e6)
    return statistics.median(times)


async def measure(name: str, fleet: Fleet, turn: int, count: int) -> tuple[float, float, float]:
    """On the way, around the look-ups that follow, and after the answer has begun."""
    shadow = PolicyFile(shipped_policies()[name], VOCABULARY)
    lookups = Lookups([AtOnce()], deadline=LookupDeadline(), on_failed=lambda _: None)
    observer = Observer(fleet, lookups)
    observer.follow([shadow.current.policy])
    judge, metrics = Shadows([Shadow(shadow)]), Metrics()
    made, candidates = records(fleet, count, turn), Candidates(fleet.instances)
    acting = made[0].policy
    on_the_way = cost(lambda: [observer.at_hand(acting, candidates, each.request) for each in made], count)
    looking: list[float] = []
    for _ in range(ROUNDS):
        for record in made:
            record.beside = ()
        began = time.process_time()
        for start in range(0, count, AT_ONCE):
            for record in made[start : start + AT_ONCE]:
                observer.look_up(record)
            for _ in range(2):  # the look-ups, and word of their end
                await asyncio.sleep(0)
        looking.append((time.process_time() - began) / count * 1e6)
    size = len(fleet.instances)
    hits = Snapshot([one.id for one in fleet.instances], {"hit_len": [float(i % 3 * 1000) for i in range(size)]})
    for record in made:
        assert record.decision is not None
        record.beside = () if "hit_len" in record.decision.snapshot.columns else ((hits, 0.001),)

    def judged() -> None:
        for record in made:
            for one in judge.judge(record):
                metrics.shadowed(one)

    return on_the_way, statistics.median(looking), cost(judged, count)


def main() -> None:
    parser = argparse.ArgumentParser()
    # As many as the router remembers: the garbage collector walks through all that are kept.
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--instances", type=int, default=32)
    options = parser.parse_args()
    fleet = fleet_of(options.instances)
    print(f"us of CPU per decision of smetric, {options.instances} instances")
    print(f"{'shadow':<12}{'turn':>6}{'on the way':>14}{'look-up':>14}{'evaluated':>12}")
    for name in SHADOWS:
        for turn in (0, 3):
            way, look, judged = asyncio.run(measure(name, fleet, turn, options.decisions))
            print(f"{name:<12}{turn:>6}{way:>14.2f}{look:>14.1f}{judged:>12.1f}")


if __name__ == "__main__":
    main()

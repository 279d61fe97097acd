from __future__ import annotations

from collections.abc import Callable

import pytest

from smetric.features import VOCABULARY
from smetric.fleet.fleet import Fleet
from smetric.fleet.instance import Instance, Scrape
from smetric.proxy.admission import Admission, Queue, Saturation, Slots
from smetric.proxy.overload import Overload, Thresholds

NOW = 1000.0


def scraped(running: float, waiting: float, kv_usage: float | None, age_s: float = 0.0) -> Instance:
    instance = Instance(f"gpu-{running}-{waiting}-{kv_usage}-{age_s}", "http://10.0.0.1:8000")
    instance.scrape = Scrape(NOW - age_s, running, waiting, kv_usage, 0)
    return instance


def saturation(
    *instances: Instance, in_flight: int = 0, connections: Callable[[], tuple[int, int]] = lambda: (0, 0)
) -> tuple[Saturation, Admission]:
    queue = Queue(10, 1000)
    admission = Admission(
        most_bytes=1000,
        queue=queue,
        overload=Overload(Thresholds(0.2, 1.0), Thresholds(0.8, 0.9), memory_bytes=1 << 60),
        slots=Slots(in_flight, 1.0, queue) if in_flight else None,
    )
    return Saturation(Fleet(instances, VOCABULARY, clock=lambda: NOW), admission, connections), admission


@pytest.mark.parametrize(
    ("instances", "ratio"),
    [
        ([], 0.0),
        ([scraped(0, 0, 0.0)], 0.0),
        ([scraped(8, 0, 0.6), scraped(8, 0, 0.4)], 0.5),
        ([scraped(8, 4, 0.9), scraped(8, 12, 1.0)], 1.95),
        ([scraped(0, 5, None)], 5.0),
        ([scraped(8, 0, 0.6), scraped(8, 8, 1.0, age_s=60)], 0.6),
        ([Instance("never", "http://10.0.0.2:8000"), scraped(8, 0, 0.6)], 0.6),
    ],
    ids=["none", "idle", "half", "queueing", "no KV usage", "stale", "unseen"],
)
def test_instances_are_full_by_their_caches_and_by_what_waits_there(instances: list[Instance], ratio: float) -> None:
    assert saturation(*instances)[0].instances() == pytest.approx(ratio)


@pytest.mark.parametrize("silent", [Instance("never", "http://10.0.0.2:8000"), scraped(8, 8, 1.0, age_s=60)])
def test_instances_of_which_nothing_is_known_are_not_said_to_be_idle(silent: Instance) -> None:
    full, admission = saturation(silent)
    assert full.instances() is None
    assert list(full.figures().saturation) == ["router"]
    assert admission.queue.enter("tiny", 0.0, 1) is not None
    assert full.figures().saturation["instances"] == 2.0, "what is held for them is known"


def test_a_drained_instance_does_not_count() -> None:
    drained = scraped(8, 8, 1.0)
    drained.draining = True
    assert saturation(drained, scraped(1, 0, 0.3))[0].instances() == pytest.approx(0.3)


def test_what_rules_hold_says_that_they_are_full() -> None:
    one = scraped(8, 0, 0.2)
    full, admission = saturation(one)
    for _ in range(4):
        one.charge(1, 10)
    assert admission.queue.enter("tiny", 0.0, 1) is not None
    assert full.instances() == pytest.approx(1.25)


def test_places_taken_and_waited_for_count_against_those_there_are() -> None:
    full, admission = saturation(in_flight=4)
    slots = admission.slots
    assert slots is not None
    assert [slots.take_free() for _ in range(2)] == [True, True]
    assert full.instances() == 0.5
    while slots.take_free():
        pass
    for _ in range(2):
        assert admission.queue.enter(None, 0.0, 1) is not None
    assert full.instances() == 1.5


def test_the_router_is_as_full_as_the_worst_of_its_bounds() -> None:
    full, admission = saturation(connections=lambda: (30, 100))
    for _ in range(10):
        admission.overload.looked(0.0)
    files = admission.overload.shares["files"]
    assert full.router() == pytest.approx(max(0.3, files))
    permit = admission.admit([(b"content-length", b"990")])
    assert full.router() == pytest.approx(0.99)
    for _ in range(10):
        admission.overload.looked(0.3)
    assert full.router() == pytest.approx(1.5)
    permit.end()
    figures = full.figures()
    assert (figures.body_bytes, figures.connections, figures.levels["lag"]) == (0, 30, 1)
    assert figures.saturation == {"instances": 0.0, "router": pytest.approx(1.5)}

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from smetric import names
from smetric.fleet.instance import CacheConfig, Instance
from smetric.request.request import Usage
from smetric.telemetry.hit_truth import MARK_S, MIN_ANSWERS, HitTruth
from tests.telemetry.samples import fleet, record

SOURCE = "prefix_index"


class Watched:
    """A truth with a clock that moves two seconds with each answer, and what it has counted."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.counted: list[tuple[str, str, str, int]] = []
        self.truth = HitTruth(lambda *told: self.counted.append(told), clock=lambda: self.now, **options)
        self.instances = fleet()

    @property
    def chosen(self) -> Instance:
        return self.instances[1]

    def answer(self, predicted: int, actual: int | None, *, step_s: float = 2.0, **fields: Any) -> None:
        made = record(hits=(0, predicted, 0), instances=self.instances, **fields)
        made.tokens_source = "exact"
        self.now += step_s
        self.truth.answered(made, Usage(1000, 5, actual))

    def answers(self, count: int, predicted: int, actual: int, *, step_s: float = 2.0) -> list[dict[str, Any]]:
        """The log lines of that many equal answers."""
        with capture_logs() as lines:
            for _ in range(count):
                self.answer(predicted, actual, step_s=step_s)
        return [dict(line) for line in lines]

    def disagree(self) -> bool:
        return self.truth.agreements["gpu-1", SOURCE].disagrees


@pytest.mark.parametrize(
    ("actual", "result", "wrong"),
    [
        (880, names.HIT_EQUAL, 0),
        (864, names.HIT_EQUAL, 16),
        (863, names.HIT_OVER, 17),
        (0, names.HIT_OVER, 880),
        (897, names.HIT_UNDER, 17),
    ],
)
def test_hit_truth_compares_reported_with_predicted_hits(actual: int, result: str, wrong: int) -> None:
    watched = Watched()
    watched.answer(880, actual)
    assert watched.counted == [("gpu-1", SOURCE, result, wrong)]
    total = watched.truth.agreements["gpu-1", SOURCE].all
    assert (total.predicted, total.actual, total.prompt, total.answers) == (880, actual, 1000, 1)


def test_hit_truth_takes_the_larger_block_of_engine_and_source() -> None:
    watched = Watched(grains={SOURCE: 256})
    watched.answer(880, 640)
    watched.chosen.cache = CacheConfig(block_size=512)
    watched.answer(880, 370)
    assert [told[2] for told in watched.counted] == [names.HIT_EQUAL, names.HIT_EQUAL]


def test_hit_truth_ignores_answers_without_prediction_or_report() -> None:
    watched = Watched()
    watched.answer(880, None)
    watched.answer(880, 100, prompts=2)
    unknown = record(known=[True, False, True], instances=watched.instances)
    watched.truth.answered(unknown, Usage(1000, 5, 100))
    watched.truth.answered(record(names.PINNED, instances=watched.instances), Usage(1000, 5, 100))
    watched.truth.answered(record(instances=watched.instances), None)
    assert watched.counted == []
    assert watched.truth.agreements == {}


def test_hit_truth_compares_estimated_prompts_by_share() -> None:
    watched = Watched()
    made = record(hits=(0, 500, 0), instances=watched.instances)
    watched.truth.answered(made, Usage(1400, 5, 700))
    assert watched.counted == [("gpu-1", SOURCE, names.HIT_EQUAL, 0)]


def test_disagreement_is_logged_once_when_it_begins_and_ends() -> None:
    watched = Watched()
    assert watched.answers(MIN_ANSWERS - 1, 880, 0) == []
    lines = watched.answers(200, 880, 0)
    assert [(line["event"], line["log_level"]) for line in lines] == [("smetric.hits.disagree", "warning")]
    assert lines[0]["instance"] == "gpu-1"
    assert lines[0]["source"] == SOURCE
    assert lines[0]["predicted_tokens"] > lines[0]["actual_tokens"] == 0
    assert "smetric doctor" in lines[0]["remedy"]
    assert watched.disagree()
    lines = watched.answers(200, 880, 880)
    assert [(line["event"], line["log_level"]) for line in lines] == [("smetric.hits.agree", "info")]
    assert not watched.disagree()


def test_disagreement_needs_a_minute() -> None:
    watched = Watched()
    assert watched.answers(500, 880, 0, step_s=0.01) == []
    assert not watched.disagree()


def test_disagreement_ignores_a_few_wrong_answers() -> None:
    watched = Watched()
    lines = watched.answers(60, 880, 880) + watched.answers(5, 880, 0) + watched.answers(60, 880, 880)
    assert lines == []


def test_disagreement_ignores_errors_within_a_block() -> None:
    watched = Watched(grains={SOURCE: 256})
    assert watched.answers(100, 400, 150) == []


def test_disagreement_ends_at_half_the_share_that_begins_it() -> None:
    watched = Watched()
    assert watched.answers(100, 500, 350) == []
    watched.answers(100, 500, 0)
    assert watched.answers(200, 500, 350) == []
    assert watched.disagree()


def test_disagreement_ends_with_the_process() -> None:
    watched = Watched()
    watched.answers(100, 880, 0)
    assert watched.disagree()
    watched.chosen.restarted()
    assert watched.answers(1, 880, 880) == []
    assert not watched.disagree()
    assert watched.truth.agreements["gpu-1", SOURCE].latest.answers == 1


def test_agreement_keeps_a_bounded_number_of_marks() -> None:
    watched = Watched()
    watched.answers(3000, 880, 880, step_s=0.1)
    agreement = watched.truth.agreements["gpu-1", SOURCE]
    assert len(agreement.marks) <= 60 / MARK_S + 2
    assert agreement.latest.answers <= 700
    watched.answers(500, 880, 880, step_s=30.0)
    assert len(agreement.marks) <= MIN_ANSWERS + 1
    assert agreement.all.answers == 3500

from __future__ import annotations

from typing import Any

import pytest

from smetric import names
from smetric.request.request import Usage
from smetric.telemetry.outcomes import ServiceLevel
from tests.telemetry.samples import record


def met(gap_s: float | None = None, **ended: Any) -> dict[str, float]:
    """Tokens by whether the objective was met: 1 s + 1 ms a token to the first, 50 ms between two."""
    level = ServiceLevel(1.0, 0.001, 0.05)
    made = record(stream=ended.pop("stream", True), prompt_len=1000)
    given = {"status": 200, "ttft_s": 1.9, "duration_s": 2.8, "usage": Usage(1000, 20, 0)} | ended
    for name, value in given.items():
        setattr(made, name, value)
    level.ended(made, gap_s)
    return {answer: level.tokens.series["sticky", "", answer].value for answer in ("true", "false")}


def test_a_stream_in_time_counts_its_tokens_as_met() -> None:
    assert met() == {"true": 1020, "false": 0}


@pytest.mark.parametrize(
    "late",
    [
        {"ttft_s": 2.1},
        {"duration_s": 3.0},
        {"error_type": "upstream_closed"},
        {"status": 429, "ttft_s": None, "usage": None},
        {"status": 503, "ttft_s": None, "usage": None},
    ],
)
def test_one_that_was_late_broke_off_or_was_refused_counts_as_missed(late: dict[str, Any]) -> None:
    result = met(**late)
    assert result["true"] == 0
    assert result["false"] >= 1000


def test_where_no_tokens_were_counted_the_events_tell_how_far_apart_they_were() -> None:
    assert met(gap_s=0.06, usage=None) == {"true": 0, "false": 1000}
    assert met(gap_s=0.04, usage=None) == {"true": 1000, "false": 0}
    assert met(gap_s=None, usage=None) == {"true": 1000, "false": 0}


def test_answers_in_one_piece_and_clients_that_left_are_not_judged() -> None:
    assert met(stream=False) == met(status=499) == {"true": 0, "false": 0}


def test_arms_are_counted_apart() -> None:
    level = ServiceLevel(1.0, 0.0, 1.0)
    made = record(stream=True)
    made.arm, made.status, made.ttft_s, made.duration_s = names.CANARY, 200, 0.5, 0.6
    level.ended(made, None)
    assert level.tokens.series["sticky", "canary", "true"].value == 1000

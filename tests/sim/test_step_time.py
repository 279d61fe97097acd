from __future__ import annotations

import pytest

from smetric.lab.engine import StepTime


def test_the_defaults_meet_the_measured_points_of_an_h20() -> None:
    step = StepTime()
    prefill = step(4096, 4096 * 2048, 0, 0)
    assert 4096 / prefill == pytest.approx(16_594, rel=0.1)
    decode = step(0, 0, 100, 100 * 5000)
    assert decode == pytest.approx(0.038, rel=0.1)


def test_every_part_of_the_batch_takes_its_time() -> None:
    step = StepTime(fixed_s=1, prefill_s=10, attention_s=100, decode_s=1000, context_s=10_000)
    assert step(2, 3, 4, 5) == 1 + 20 + 300 + 4000 + 50_000

from __future__ import annotations

from smetric.lab.emulator.metrics import Histogram


def test_a_value_counts_in_every_bucket_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(1.5, times=3)
    histogram.observe(9.0)
    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 4.0), ("+Inf", 5.0)]
    assert histogram.sum == 14.5

"""Requests in a second, over the last minute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smetric.fleet.instance import Instance
from smetric.request.request import InferenceRequest
from smetric.sources.measured import WINDOW_S, RequestRates
from tests.clock import Clock


def send(rates: RequestRates, instance: Instance) -> None:
    rates.sent(InferenceRequest(), instance.charge(1, 10))


def test_an_instance_that_was_sent_nothing_has_the_lowest_rate() -> None:
    rates, a, b = RequestRates(Clock()), Instance("a", "http://a"), Instance("b", "http://b")
    for _ in range(30):
        send(rates, a)
    assert rates.measure("qps", [a, b]) == ([0.5, 0.0], None)


@given(st.lists(st.floats(0, 30), max_size=60))
def test_it_is_what_was_sent_in_the_last_minute(pauses: list[float]) -> None:
    clock = Clock()
    rates, instance = RequestRates(clock), Instance("a", "http://a")
    seconds = []
    for pause in pauses:
        clock.now += pause
        send(rates, instance)
        seconds.append(int(clock.now))
        recent = sum(second > int(clock.now) - WINDOW_S for second in seconds)
        assert rates.measure("qps", [instance])[0] == [recent / WINDOW_S]
    clock.now += WINDOW_S
    assert rates.measure("qps", [instance])[0] == [0.0]

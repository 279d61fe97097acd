from __future__ import annotations

from smetric.telemetry.decisions import Activity
from tests.fakes import exchange_of
from tests.telemetry import samples


def test_what_happened_is_given_once_and_in_order() -> None:
    activity = Activity()
    first, second = samples.record(), samples.record()
    activity.decided(exchange_of(), first)
    activity.decided(exchange_of(), second)
    activity.ended(exchange_of(first))
    assert activity.take() == ([first, second], [first])
    assert activity.take() == ([], [])


def test_of_too_much_the_latest_is_kept() -> None:
    activity = Activity(most=2)
    records = [samples.record() for _ in range(3)]
    for record in records:
        activity.decided(exchange_of(), record)
    assert activity.take() == (records[1:], [])

"""Loaded policies: parameters, reads and digest."""

from __future__ import annotations

from smetric.policy import Decision
from tests.policy.deciding import policy, request, snapshot


def test_parameter_is_a_constant_and_may_name_a_feature() -> None:
    body = "param LOAD = requests in {requests, unprefilled}\nparam K = 2\nroute argmin(LOAD * K)"
    first = policy(body).decide(snapshot(), request(), {}, 1)
    second = policy(body, LOAD="unprefilled", K=3).decide(snapshot(), request(), {}, 1)
    assert isinstance(first, Decision)
    assert isinstance(second, Decision)
    assert (first.score, second.score) == ([8, 2, 6], [300, 0, 2100])
    assert policy(body).reads == {"requests"}
    assert policy(body, LOAD="unprefilled").reads == {"unprefilled"}


def test_digest_is_of_the_source() -> None:
    one, two = policy("route argmin(requests)"), policy("route argmin(running)")
    assert len(one.digest) == 12
    assert one.digest == policy("route argmin(requests)").digest != two.digest

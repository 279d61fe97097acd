"""What the attributes of a span say, where it takes more than a look at a span to see."""

from __future__ import annotations

from smetric.features import VOCABULARY
from smetric.policy import load
from smetric.telemetry.attributes import params_of

POLICY = """
policy p
param OVERLOAD = 2.0 in 1.0..
param LOAD     = requests in {requests, unprefilled}
param STRICT   = true
route argmin(LOAD)  when STRICT and max(requests) > OVERLOAD * mean(requests)
route argmax(LOAD)
"""


def test_parameters_are_shown_with_a_mark_where_configuration_set_one() -> None:
    policy = load(POLICY, VOCABULARY, settings={"OVERLOAD": 1.5})
    assert params_of(policy) == "OVERLOAD=1.5* LOAD=requests STRICT=true"

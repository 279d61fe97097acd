"""Which requests ask for an adapter."""

from __future__ import annotations

from smetric.fleet.instance import Instance
from smetric.request.request import InferenceRequest
from smetric.sources.measured import RENEWED_S, Adapters
from tests.clock import Clock


def test_a_model_that_instances_call_an_adapter_is_one_under_its_alias_too() -> None:
    instance = Instance("a", "http://a")
    instance.adapters = frozenset({"sql"})
    adapters = Adapters([instance, Instance("b", "http://b")], Clock())
    asked = [InferenceRequest(model="sql"), InferenceRequest(model="base"), InferenceRequest(model="x", served="sql")]
    for one in asked:
        adapters.describe(one)
    assert [one.lora for one in asked] == ["sql", "", "sql"]


def test_adapters_that_are_loaded_later_are_seen() -> None:
    clock, instance = Clock(), Instance("a", "http://a")
    adapters = Adapters([instance], clock)
    adapters.describe(InferenceRequest(model="sql"))
    instance.adapters = frozenset({"sql"})
    clock.now += RENEWED_S
    request = InferenceRequest(model="sql")
    adapters.describe(request)
    assert request.lora == "sql"

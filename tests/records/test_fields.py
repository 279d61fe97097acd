"""Which fields of requests are recorded."""

from __future__ import annotations

from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.policy import Policy, load
from smetric.records.format import fields_recorded
from smetric.routing.policy_files import libraries_beside


def shipped(name: str) -> Policy:
    path = shipped_policies()[name]
    return load(path.read_text(), VOCABULARY, libraries=libraries_beside(path))


def test_numbers_are_always_recorded_and_the_model() -> None:
    always = fields_recorded([shipped("round_robin")])
    assert always == ["turn", "prompt_len", "est_hit", "priority", "model", "held"]


def test_what_is_counted_on_demand_is_recorded_where_a_policy_reads_it() -> None:
    # Elsewhere it was never counted, and a 0 would be made up. The id stands in for an empty key of `hrw`.
    read = set(fields_recorded([shipped("lmetric_guarded"), shipped("prefix_hash")]))
    assert read - set(fields_recorded([])) == {"class_share", "class_streak", "prefix", "id"}

"""Feature table: completeness and agreement with its readers."""

from __future__ import annotations

import pytest

from smetric.features import VOCABULARY
from smetric.policy.vocabulary import Kind, Unknown
from smetric.request.request import InferenceRequest


def test_request_fields_are_attributes_of_a_request() -> None:
    request = InferenceRequest()
    assert [name for name in VOCABULARY.request if not hasattr(request, name)] == []


@pytest.mark.parametrize("name", VOCABULARY.features)
def test_feature_has_doc_source_and_staleness(name: str) -> None:
    feature = VOCABULARY.features[name]
    assert feature.name == name
    assert feature.doc.endswith(".")
    assert feature.source
    assert feature.staleness


@pytest.mark.parametrize("name", VOCABULARY.features)
def test_feature_default_has_its_kind_and_range(name: str) -> None:
    feature = VOCABULARY.features[name]
    if feature.kind is Kind.NUMBER:
        assert isinstance(feature.default, float)
        assert feature.low <= feature.default <= feature.high
    else:
        assert isinstance(feature.default, {Kind.BOOL: bool, Kind.STRING: str, Kind.SET: frozenset}[feature.kind])


def test_unknown_cell_never_attracts() -> None:
    features = VOCABULARY.features
    assert features["hit_len"].fill([None, 512.0]) == ([0.0, 512.0], [False, True])
    for repels in ("requests", "running", "waiting", "kv_usage"):
        assert features[repels].unknown is Unknown.MEAN
        assert features[repels].fill([None, 0.25, 0.75])[0] == [0.5, 0.25, 0.75]
        for alike in (0.173, 0.175, 0.1):  # rounding neither attracts
            assert features[repels].fill([None, *[alike] * 6])[0] == [alike] * 7


def test_turn_and_expected_hit_may_be_unknown() -> None:
    assert {name for name, field in VOCABULARY.request.items() if field.may_be_unknown} == {"turn", "est_hit"}


def test_hit_is_bounded_by_the_prompt() -> None:
    assert VOCABULARY.features["hit_len"].at_most in VOCABULARY.request

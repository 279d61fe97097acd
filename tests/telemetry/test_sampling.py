from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from smetric import names
from smetric.errors import ConfigError
from smetric.telemetry.tracing import Sampler

IDS = st.integers(min_value=1, max_value=(1 << 128) - 1)


def sampler(name: str, argument: str = "") -> Sampler:
    return Sampler.from_environ({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": argument})


@given(IDS, st.sampled_from(["0", "0.01", "0.05", "0.5", "1"]))
def test_a_ratio_keeps_what_the_sdk_keeps(trace_id: int, ratio: str) -> None:
    theirs = TraceIdRatioBased(float(ratio)).should_sample(None, trace_id, "x").decision is Decision.RECORD_AND_SAMPLE
    assert sampler("traceidratio", ratio).keeps(trace_id, None, (names.ROUTED,)) == theirs


@given(IDS, st.booleans())
def test_parent_based_samplers_follow_the_caller_and_others_do_not(trace_id: int, flag: bool) -> None:
    assert sampler("parentbased_always_on").keeps(trace_id, flag, (names.ROUTED,)) is flag
    assert sampler("parentbased_always_off").keeps(trace_id, flag, (names.PINNED,)) is flag
    assert sampler("always_on").keeps(trace_id, flag, (names.ROUTED,))
    assert not sampler("always_off").keeps(trace_id, flag, (names.ROUTED,))


@pytest.mark.parametrize("outcome", sorted(set(names.OUTCOMES) - names.ORDINARY))
@pytest.mark.parametrize("flag", [None, False, True])
def test_every_outcome_out_of_the_ordinary_is_kept(outcome: str, flag: bool | None) -> None:
    assert sampler("always_off").keeps(1, flag, (outcome,))
    assert sampler("parentbased_traceidratio", "0").keeps(1 << 64 - 1, flag, (outcome,))


@pytest.mark.parametrize("kind", names.KEPT)
@pytest.mark.parametrize("name", ["parentbased_always_on", "parentbased_traceidratio", "always_off"])
def test_the_word_of_a_caller_that_does_not_record_may_count_more(name: str, kind: str) -> None:
    polite = Sampler.from_environ({"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": "0"}, keep_over_parent=False)
    assert not polite.keeps(7, False, (kind,))
    assert polite.keeps(7, True, (kind,))
    assert polite.keeps(1 << 64 - 1, None, (kind,))  # a root of our own has nobody to ask


def test_a_sampler_that_asks_no_caller_records_by_its_own_ratio_all_the_same() -> None:
    own = Sampler.from_environ({"OTEL_TRACES_SAMPLER": "always_on"}, keep_over_parent=False)
    assert own.keeps(7, False, (names.REJECTED,))
    assert own.keeps(7, False, (names.ROUTED,))


def test_unset_keeps_everything_and_follows_the_caller() -> None:
    default = Sampler.from_environ({})
    assert default.keeps(7, None, ())
    assert not default.keeps(7, False, ())


def test_a_sampler_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_SAMPLER: unknown sampler 'sometimes'; known are always_on"):
        sampler("sometimes")
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_SAMPLER_ARG: '5%' is not a share"):
        sampler("traceidratio", "5%")

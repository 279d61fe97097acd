"""What the attributes of a span say, where it takes more than a look at a span to see."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smetric import names
from smetric.features import VOCABULARY
from smetric.fleet.instance import Instance
from smetric.fleet.record import DecisionRecord, Forecast
from smetric.policy import Decision, Snapshot, load
from smetric.telemetry.outcomes import migration_of
from smetric.telemetry.spans import of_decision, params_of
from tests.telemetry.samples import request

POLICY = """
policy p
param OVERLOAD = 2.0 in 1.0..
param LOAD     = requests in {requests, unprefilled}
param STRICT   = true
route argmin(LOAD)  when STRICT and max(requests) > OVERLOAD * mean(requests)
route argmax(LOAD)
"""
#: Tempo cuts an attribute's value here.
MOST = 2048

#: Every feature that is read is a column of the table, and every guard a long line.
WIDE = """policy wide
keep   kv_usage < {kv:.3f} or healthy as {label}_filter
reject 429 "full" when min(requests) > 1e12 requests and min(waiting) >= 0 requests as {label}_full
route  argmax(hit_len) when req.turn != 0 and max(requests) <= {loads:.3f} * (mean(requests) + 1 request) and \
min(running) < {loads:.3f} * (mean(running) + 1 request) and max(hit_len) > 0.125 * req.prompt_len as {label}_stick
route  argmin(norm(requests) + norm(waiting) + norm(running) + norm(kv_usage) + norm(unprefilled)) as {label}
"""
FEATURES = ("hit_len", "requests", "waiting", "running", "kv_usage", "unprefilled", "healthy")
NUMBERS = st.floats(0, 1e15, allow_nan=False) | st.integers(0, 100).map(float)


def test_parameters_are_shown_with_a_mark_where_configuration_set_one() -> None:
    policy = load(POLICY, VOCABULARY, settings={"OVERLOAD": 1.5})
    assert params_of(policy) == "OVERLOAD=1.5* LOAD=requests STRICT=true"


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    """With any ids, labels, values, unknown cells, ages and sources."""
    label = draw(st.sampled_from(["a", "a_label_" + "x" * 48]))
    source = WIDE.format(label=label, kv=draw(st.floats(0, 1)), loads=draw(st.floats(0.5, 9)))
    policy = load(source, VOCABULARY)
    texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=128)
    ids = draw(st.lists(texts, min_size=1, max_size=24, unique=True))
    count = len(ids)

    def column(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=count, max_size=count))

    columns = {name: column(st.booleans() if name == "healthy" else NUMBERS) for name in FEATURES}
    known = {name: column(st.booleans()) for name in draw(st.sets(st.sampled_from(FEATURES[:-1])))}
    stamps = {name: column(st.none() | st.floats(0, 1000)) for name in draw(st.sets(st.sampled_from(FEATURES[1:5])))}
    origins = {"hit_len": column(st.sampled_from(["", "prefix_index", "lmcache:" + "x" * 100]))}
    asked = request(turn=draw(st.sampled_from([0, 3])), model=draw(texts), session=draw(texts))
    snapshot = Snapshot(ids, columns, known, stamps, origins, 1000.0)  # type: ignore[arg-type]
    decision = policy.decide(snapshot, asked, {}, 7)
    assert isinstance(decision, Decision)
    return decision


@pytest.mark.slow
@given(decisions(), st.integers(0, 32), st.text(max_size=128))
@settings(max_examples=60)
def test_no_attribute_is_longer_than_collectors_keep_whatever_stands_in_it(
    decision: Decision, top: int, id: str
) -> None:
    made = DecisionRecord(
        time_ns=1,
        outcome=names.ROUTED,
        request=decision.request,
        policy=decision.policy,
        generation=1,
        decision=decision,
    )
    if decision.index >= 0:
        made.instance = Instance(decision.snapshot.ids[decision.index], "http://10.0.0.1:8000")
        made.migration = migration_of(made, id)
        made.forecast = Forecast(1.0, id, 2.0, 3)
    about = of_decision(made, configured=99, left_out="model=3 " * 9, top=top, limit=2000, ui_hints=True, salt=b"salt")
    for name, value in about.items():
        assert len(str(value).encode()) <= MOST, name
    rows = orjson.loads(about["smetric.candidates.json"])
    assert len(rows) <= top
    assert about["output.value"].startswith(about["smetric.decision.summary"])
    ranks = [row["rank"] for row in rows if "rank" in row]
    assert ranks == list(range(len(ranks)))
    assert all(row["filtered_by"] for row in rows if "rank" not in row)

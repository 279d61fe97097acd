"""Example decisions of the report."""

from typing import Any

from smetric.features import VOCABULARY
from smetric.files import shipped_policies
from smetric.fleet.record import DecisionRecord
from smetric.lab.demo.play import AgentAnswer, Play, PlayFigures
from smetric.lab.demo.report import examples
from smetric.policy import Decision, load
from smetric.policy.snapshot import Snapshot
from smetric.request.request import InferenceRequest

POLICY = load(shipped_policies()["smetric"].read_text(), VOCABULARY, path="smetric.policy")


def made(*requests: tuple[int, list[int], list[int]]) -> Play:
    """Return the play of one session; a request is its turn, and hit lengths and loads of instances a, b and c."""
    answers, records = [], {}
    for turn, hits, loads in requests:
        columns: dict[str, Any] = {"hit_len": [float(hit) for hit in hits], "requests": [float(load) for load in loads]}
        request = InferenceRequest(turn=turn, prompt_len=1000, est_hit=900 if turn else 0)
        decision = POLICY.decide(Snapshot(["a", "b", "c"], columns, {}, {}, {}, 0.0), request, {}, 1)
        assert isinstance(decision, Decision)
        assert decision.instance is not None
        record = DecisionRecord(
            time_ns=1, outcome="routed", request=request, policy=POLICY, generation=1, decision=decision
        )
        records[record.id] = record
        hit = hits[decision.index]
        answers.append(AgentAnswer("s", turn, 200, True, record.id, decision.instance, 0.0, 0.1, 1.0, 1000, hit))
    return Play("smetric", answers, records, PlayFigures.of(answers, 3), 1.0)


def shown(play: Play) -> list[tuple[str, str | None, str, str | None]]:
    return [
        (one.title.split(";")[0], one.decision.instance, one.decision.rule, one.decision.failed_guard)
        for one in examples(play)
    ]


def test_examples_are_first_returned_and_moved_by_guard() -> None:
    overloaded = (2, [950, 0, 0], [9, 1, 2])
    back_without_a_guard = (3, [950, 0, 0], [5, 5, 5])
    play = made((0, [0, 0, 0], [1, 2, 2]), (1, [900, 0, 0], [2, 2, 2]), overloaded, back_without_a_guard)
    assert shown(play) == [
        ("A first request", "a", "balance", "req.turn != 0"),
        ("A follow-up that returned to its instance", "a", "stick", None),
        ("A follow-up that moved to another instance", "b", "balance", "not_overloaded"),
    ]


def test_examples_show_most_loaded_return_when_none_moved() -> None:
    play = made((0, [0, 0, 0], [1, 2, 2]), (1, [900, 0, 0], [3, 1, 2]), (2, [900, 0, 0], [2, 2, 2]))
    assert shown(play)[2][0] == "No follow-up moved"
    assert list(examples(play)[2].decision.snapshot.columns["requests"]) == [3.0, 1.0, 2.0]


def test_examples_of_first_requests_are_one() -> None:
    assert [title for title, *_ in shown(made((0, [0, 0, 0], [1, 2, 2])))] == ["A first request"]

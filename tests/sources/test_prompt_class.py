"""Classes of prompts: their share of the traffic and their streaks, within bounds."""

from __future__ import annotations

from smetric.fleet.instance import Instance
from smetric.request.prompt import BLOCK_BYTES, Prompt
from smetric.request.request import InferenceRequest
from smetric.sources.measured import CLASS_FRESH_S, WINDOW, PromptClasses
from tests.clock import Clock

INSTANCE = Instance("a", "http://a")


def request(beginning: str, rest: str = "") -> InferenceRequest:
    text = beginning.ljust(BLOCK_BYTES, ".") + rest
    return InferenceRequest(prompt_len=1000, prompt=Prompt([text.encode()], 4.0))


def pass_through(classes: PromptClasses, one: InferenceRequest, hit: int) -> InferenceRequest:
    classes.describe(one)
    lease = INSTANCE.charge(1, one.prompt_len, hit)
    classes.sent(one, lease)
    lease.release()
    return one


def test_a_class_is_all_prompts_that_begin_alike() -> None:
    classes = PromptClasses(Clock())
    for turn in range(3):
        pass_through(classes, request("system A", f"turn {turn}"), 0)
    pass_through(classes, request("system B"), 0)
    assert pass_through(classes, request("system A", "another"), 0).class_share == 3 / 4
    assert pass_through(classes, request("system C"), 0).class_share == 0


def test_a_streak_is_of_those_that_went_where_something_of_them_was_held() -> None:
    classes = PromptClasses(Clock())
    streaks = [pass_through(classes, request("A"), hit).class_streak for hit in (0, 900, 1, 0, 5)]
    assert streaks == [0, 0, 1, 2, 0]
    assert pass_through(classes, request("A"), 0).class_streak == 1


def test_other_classes_in_between_end_no_streak() -> None:
    classes = PromptClasses(Clock())
    for _ in range(3):
        pass_through(classes, request("A"), 900)
        pass_through(classes, request("B"), 0)
    assert pass_through(classes, request("A"), 900).class_streak == 3


def test_the_window_is_bounded_by_requests_and_by_age() -> None:
    clock = Clock()
    classes = PromptClasses(clock)
    pass_through(classes, request("A"), 900)
    for number in range(WINDOW):
        pass_through(classes, request(f"B {number}"), 0)
    forgotten = pass_through(classes, request("A"), 0)
    assert (forgotten.class_share, forgotten.class_streak) == (0, 0)
    assert pass_through(classes, request("A"), 0).class_share == 1 / WINDOW
    clock.now += CLASS_FRESH_S + 1
    assert pass_through(classes, request("A"), 0).class_share == 0


def test_nothing_is_counted_until_a_policy_asks() -> None:
    classes = PromptClasses(Clock())
    classes.sent(request("A"), INSTANCE.charge(1, 1000))
    asked = request("A")
    classes.describe(asked)
    assert asked.class_share == 0


def test_a_request_without_a_prompt_is_of_no_class() -> None:
    classes = PromptClasses(Clock())
    for _ in range(3):
        assert pass_through(classes, InferenceRequest(prompt_len=5), 0).class_share == 0


def test_the_prefix_is_kept_when_the_text_is_let_go() -> None:
    one = request("A")
    PromptClasses(Clock()).describe(one)
    prefix = one.prefix
    one.answering()
    one.let_go()
    assert one.prefix == prefix != ""

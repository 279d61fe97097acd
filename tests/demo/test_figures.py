import pytest
from hypothesis import given
from hypothesis import strategies as st

from smetric.lab.demo.play import Answer, Figures, imbalance


def answer(
    session: str = "s",
    turn: int = 0,
    instance: str = "a",
    sent: float = 0.0,
    first: float = 0.1,
    ended: float = 1.0,
    prompt: int = 100,
    cached: int = 0,
    *,
    whole: bool = True,
) -> Answer:
    return Answer(session, turn, 200 if whole else 503, whole, "", instance, sent, first, ended, prompt, cached)


def test_the_hit_rate_is_of_tokens_not_of_requests() -> None:
    figures = Figures.of([answer(prompt=900, cached=900), answer(turn=1, prompt=100)], 4)
    assert figures.hit_rate == 0.9


def test_a_follow_up_has_returned_when_it_went_where_the_turn_before_went() -> None:
    answers = [
        answer("s", 0, "a"),
        answer("s", 1, "b"),
        answer("s", 2, "b"),
        answer("t", 0, "b"),
        answer("t", 1, "b"),
    ]
    figures = Figures.of(answers, 4)
    assert (figures.returned, figures.followups) == (2, 3)


def test_what_failed_is_counted_and_measures_nothing() -> None:
    figures = Figures.of([answer(first=0.2), answer(turn=1, first=9.0, whole=False)], 4)
    assert (figures.requests, figures.failed, figures.followups) == (2, 1, 0)
    assert figures.ttft_p90_s == 0.2


def test_percentiles_are_values_that_were_measured() -> None:
    figures = Figures.of([answer(f"s{n}", first=n / 10) for n in range(1, 11)], 4)
    assert (figures.ttft_p50_s, figures.ttft_p90_s) == (0.5, 0.9)


def test_of_no_answers_nothing_is_claimed() -> None:
    assert Figures.of([], 4) == Figures(0, 0, 0.0, 1.0, 0.0, 0.0, 0, 0)


def test_one_instance_with_everything_is_as_uneven_as_it_gets() -> None:
    assert imbalance([answer(sent=0.5, ended=3.2), answer(sent=1.0, ended=2.0)], 4) == pytest.approx(4)


def test_equal_shares_at_the_same_time_are_even_and_one_after_the_other_they_are_not() -> None:
    together = [answer(instance=name, sent=0.0, ended=0.9) for name in "abcd"]
    in_turn = [answer(instance=name, sent=2.0 * n, ended=2.0 * n + 0.9) for n, name in enumerate("abcd")]
    assert imbalance(together, 4) == pytest.approx(1)
    assert imbalance(in_turn, 4) == pytest.approx(4)


@given(
    st.lists(
        st.builds(
            lambda instance, sent, took: answer(instance=instance, sent=sent, ended=sent + took),
            st.sampled_from("abcd"),
            st.floats(0, 30),
            st.floats(0.001, 5),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_imbalance_lies_between_even_and_all_on_one(answers: list[Answer]) -> None:
    assert 1 - 1e-9 <= imbalance(answers, 4) <= 4 + 1e-9

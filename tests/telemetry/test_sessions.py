from __future__ import annotations

from smetric.request.prompt import Prompt
from smetric.telemetry.outcomes import Sessions
from tests.telemetry.samples import record, request, run_one, telemetry


def prompt(text: bytes, answered: int = 0) -> Prompt:
    """A prompt whose last assistant turn begins after *answered* bytes."""
    return Prompt([text], 4.0, question_bytes=answered, history_bytes=answered)


def read(sessions: Sessions, place: str) -> int:
    return int(sessions.turns.series["p", place].value)


def test_a_conversation_is_followed_from_prompt_to_prompt() -> None:
    sessions = Sessions()
    first = request(turn=0, session="", prompt=prompt(b"how are you?"))
    assert first.prompt is not None
    _ = first.prompt.hashes  # as the prefix index does once the request was sent
    sessions.served(first, "gpu-1", "p")
    follow_up = request(turn=1, session="", prompt=prompt(b"how are you? Well. Good.", len(b"how are you?")))
    assert sessions.last(follow_up) == "gpu-1"
    sessions.served(follow_up, "gpu-1", "p")
    third = b"how are you? Well. Good. What now?"
    assert sessions.last(request(turn=2, session="", prompt=prompt(third, len(b"how are you? Well. Good.")))) == "gpu-1"
    other = request(turn=1, session="", prompt=prompt(b"who are you? Me. Good.", len(b"who are you?")))
    assert sessions.last(other) is None
    assert (read(sessions, "same"), read(sessions, "other")) == (1, 0)
    assert len(sessions) == 1


def test_one_whose_history_was_edited_is_followed_by_its_session() -> None:
    sessions = Sessions()
    sessions.served(request(turn=0), "gpu-0", "p")
    edited = request(turn=1, prompt=prompt(b"edited", 2))
    assert sessions.last(edited) == "gpu-0"
    sessions.served(edited, "gpu-2", "p")
    assert sessions.last(request(turn=2)) == "gpu-2"
    assert sessions.last(request(turn=0)) is None
    assert (read(sessions, "same"), read(sessions, "other")) == (0, 1)


def test_a_turn_whose_prompt_nobody_hashed_while_its_text_was_there_is_followed_by_its_session() -> None:
    sessions = Sessions()
    pinned = request(turn=1, prompt=prompt(b"continued", 2))  # no policy ran, and no index is kept
    pinned.answering()
    sessions.served(pinned, "gpu-1", "p")
    assert sessions.last(request(turn=2)) == "gpu-1"
    assert len(sessions) == 1


def test_no_more_are_remembered_than_told_and_no_text_of_them() -> None:
    sessions = Sessions(most=10)
    for number in range(100):
        sessions.served(request(session=f"secret-{number}"), "gpu-0", "p")
    assert len(sessions) == 10
    assert sessions.last(request(session="secret-99")) == "gpu-0"
    assert sessions.last(request(session="secret-0")) is None
    assert "secret" not in str(vars(sessions))


def test_a_refusal_is_no_place_where_a_conversation_is() -> None:
    app = telemetry()
    run_one(app, record())
    assert len(app.consequences.sessions) == 0  # nobody said that an answer began

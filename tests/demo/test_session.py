import json

import pytest

from smetric.lab.demo import play
from smetric.lab.demo.play import Session, load_sessions

SESSIONS = load_sessions()


def test_the_extract_holds_thirty_sessions_of_six_turns() -> None:
    assert len({session.id for session in SESSIONS}) == 30
    assert {len(session.turns) for session in SESSIONS} == {6}


@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.id)
def test_every_session_is_as_its_readme_says(session: Session) -> None:
    first = session.tools + session.system + session.turns[0].new
    last = first + sum(before.output + turn.new for before, turn in zip(session.turns, session.turns[1:], strict=False))
    assert session.tools >= 100
    assert session.system >= 50
    assert session.turns[0].new >= 10
    assert first <= 5000
    # Where thinking was dropped from the history, the sum is above the recorded 10,000 by the reply that held it.
    assert last <= 10_000 + sum(turn.output for turn in session.turns)
    for turn in session.turns:
        assert turn.new >= 1
        assert 1 <= turn.output <= 300
        assert 0 <= turn.gap_s <= 3


def test_sessions_share_tools_and_system_prompts() -> None:
    assert len({session.tools for session in SESSIONS}) < 30
    assert len({(session.tools, session.system) for session in SESSIONS}) < 30


def test_the_extract_is_small_and_carries_its_attribution() -> None:

    folder = play._FILE.parent
    assert play._FILE.stat().st_size < 20_000
    notice = (folder / "README.md").read_text()
    for word in ("callanjfox/kv-cache-tester", "94f6046d", "WEKA", "Apache License, Version 2.0", "Changed"):
        assert word in notice
    shown = notice.partition('{"id"')[2].partition("…")[0].rstrip(", ")
    line = next(line for line in play._FILE.read_text().splitlines() if line.startswith('{"id":"trace_0002"'))
    assert json.dumps(json.loads(line)).startswith('{"id"' + shown)

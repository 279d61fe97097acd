"""What end-to-end tests measure: kept in `figures.json`, which docs/internals/real-engines.md tells of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.e2e.real_vllm import folder
from tests.e2e.router_process import Answered


def note(name: str, figures: dict[str, Any]) -> None:
    """Keep what was measured."""
    path = folder() / "figures.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {name: figures}, indent=2) + "\n")


def stuck(answers: Sequence[Answered], turn: int | None = None) -> float:
    """Share of follow-ups, of all or of that *turn*, that went where the turn before them went."""
    at = {(answer.session, answer.turn): answer.instance for answer in answers}
    follow_ups = [key for key in at if (key[0], key[1] - 1) in at and turn in (None, key[1])]
    return sum(at[key] == at[key[0], key[1] - 1] for key in follow_ups) / len(follow_ups)


def moves(answers: Sequence[Answered]) -> list[str]:
    """Why follow-ups went elsewhere, in the router's words."""
    at = {(answer.session, answer.turn): answer.instance for answer in answers}
    return [
        answer.decision["summary"]
        for answer in answers
        if at.get((answer.session, answer.turn - 1), answer.instance) != answer.instance
    ]

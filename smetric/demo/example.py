"""The routing decisions of a play that are worth reading: a first request, one that returned, one that moved, …."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smetric.demo.agent import Answer
from smetric.demo.figures import with_homes
from smetric.demo.play import Play
from smetric.policy import Decision


@dataclass(frozen=True, slots=True)
class Example:
    """A decision, and what makes it one of the three."""

    title: str
    decision: Decision


def examples(play: Play) -> list[Example]:
    """At most three decisions of *play*, in this order; one that there was no case of is left out.

    A first request (the one that saw the fullest engines); a follow-up that returned to the instance before (the one
    with the most in its cache); a follow-up that moved (the one that saw the fullest engines), or, if none did, the one
    that returned to the instance with the most load of all.
    """
    decided = [
        (answer, home, decision)
        for answer, home in with_homes(play.answers)
        if answer.is_whole and (record := play.records.get(answer.decision)) and (decision := record.decision)
    ]
    first = [one for one in decided if one[0].turn == 0]
    returned = [one for one in decided if one[1] and one[0].instance == one[1]]
    moved = [one for one in decided if one[1] and one[0].instance != one[1]]
    chosen = [
        _best("A first request", first, lambda answer, decision: sum(_column(decision, "requests"))),
        _best(
            "A follow-up that returned to its instance",
            # By the policy's first choice, where there was one: not by chance.
            [one for one in returned if one[2].failed_guard is None] or returned,
            lambda answer, decision: answer.cached_tokens,
        ),
        _best(
            "A follow-up that moved to another instance",
            # By a guard, where there was one: not because two instances held the same of it.
            [one for one in moved if one[2].failed_guard is not None] or moved,
            lambda answer, decision: sum(_column(decision, "requests")),
        )
        or _best(
            "No follow-up moved; this one returned to the most loaded instance", returned, lambda _, one: _pressure(one)
        ),
    ]
    return [example for example in chosen if example is not None]


def told_by(source: str, play: Play) -> list[Decision]:
    """Decisions of *play* that rest on what *source*, or one tier of it, said of the chosen one; most tokens first."""
    told = [
        (hit[0], record.decision)
        for record in play.records.values()
        if record.decision is not None and (hit := record.hit) is not None and hit[1].partition(":")[0] == source
    ]
    return [decision for _, decision in sorted(told, key=lambda one: -one[0])]


def _best(
    title: str, among: list[tuple[Answer, str, Decision]], worth: Callable[[Answer, Decision], float]
) -> Example | None:
    """The one of the highest worth; the earliest of equals."""
    if not among:
        return None
    _, _, decision = max(among, key=lambda one: worth(one[0], one[2]))
    return Example(title, decision)


def _column(decision: Decision, feature: str) -> list[float]:
    """A feature over the candidates; empty where the policy did not read it."""
    return list(decision.snapshot.columns.get(feature, ()))


def _pressure(decision: Decision) -> float:
    """Requests of the chosen instance ÷ their mean."""
    load = _column(decision, "requests")
    return load[decision.index] * len(load) / sum(load) if sum(load) else 0.0

"""A comparison for people on a terminal, and as JSON values; the page for browsers is `html_report.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from smetric.policy import explain
from smetric.policy.figure import clipped
from smetric.records.account import why
from smetric.records.comparison import Comparison, Example, Move, Spread
from smetric.records.replay import RECORDED, side
from smetric.telemetry import names

#: Rows of a table on a terminal.
_ROWS = 32


@dataclass(frozen=True, slots=True)
class Told:
    """An example in words: what was chosen by either side, and each one's explanation."""

    id: str
    move: Move
    count: int
    prompt_len: int
    before: str
    after: str
    why_before: str
    why_after: str


def examples(found: Comparison, most: int) -> list[Told]:
    """At most *most* examples, those of the commonest moves."""
    kept = [(move, count, found.examples[move]) for move, count in found.moves.most_common() if move in found.examples]
    return [_told(move, count, example) for move, count, example in kept[:most]]


def _told(move: Move, count: int, example: Example) -> Told:
    line, after = example.recorded.line, example.after
    return Told(
        id=line.id,
        move=move,
        count=count,
        prompt_len=int(line.request.prompt_len),
        before=example.choice,
        after=side(after).choice,
        why_before=explain.explain(example.before) if example.before else why(example.recorded),
        why_after=explain.explain(after),
    )


def as_json(found: Comparison, told: Sequence[Told]) -> dict[str, Any]:
    """All of it as JSON values; shares are 0..1, None where there is nothing to divide by."""
    instances = len(found.instances)
    return {
        "origin": names.REPLAY,
        "against": found.before,
        "policy": found.after,
        "first": _time(found.first_ns),
        "last": _time(found.last_ns),
        "decisions": {
            "read": found.read,
            "compared": found.compared,
            "without_policy": found.without_policy,
            "not_answerable": dict(found.unanswered.most_common()),
        },
        "agreement": found.agreement,
        "agreed": found.agreed,
        "moved": found.compared - found.agreed,
        "moved_by_ties": found.ties,
        "observed_late": {"decisions": found.late, "mean_lag_s": found.late_s / found.late if found.late else None},
        "moves": [{"from": m.before, "to": m.after, "count": n} for m, n in found.moves.most_common()],
        "same_choice_by_another_rule": [
            {"from": m.before, "to": m.after, "count": n} for m, n in found.renamed.most_common()
        ],
        "rules": {"before": dict(found.rules_before.most_common()), "after": dict(found.rules_after.most_common())},
        "load": {
            side: {
                "requests_max_over_mean": spread.imbalance(instances),
                "prompt_tokens_max_over_mean": spread.token_imbalance(instances),
                "hit_share": spread.hit_share,
                "requests": {name: spread.requests[name] for name in sorted(found.instances)},
                "prompt_tokens": {name: spread.tokens[name] for name in sorted(found.instances)},
            }
            for side, spread in (("before", found.spread_before), ("after", found.spread_after))
        },
        "examples": [
            {
                "id": one.id,
                "from": one.move.before,
                "to": one.move.after,
                "like_it": one.count,
                "prompt_len": one.prompt_len,
                "before": {"choice": one.before, "explanation": one.why_before},
                "after": {"choice": one.after, "explanation": one.why_after},
            }
            for one in told
        ],
    }


def as_text(found: Comparison, told: Sequence[Told]) -> str:
    """All of it for a terminal."""
    parts = [headline(found), *notes(found), ""]
    if found.moves:
        width = max(len(f"{count:,}") for count in found.moves.values())
        parts += ["moved, from rule → to rule"]
        parts += [f"  {count:>{width},}  {name(move)}" for move, count in found.moves.most_common(_ROWS)]
        parts += _left_out(len(found.moves), "kinds of moves")
        parts.append("")
    if found.compared:
        parts += _table(
            [("", found.before, found.after), *figures(found)],
        )
        parts.append("")
        rows = [
            (one, f"{found.spread_before.requests[one]:,}", f"{found.spread_after.requests[one]:,}")
            for one in sorted(found.instances)[:_ROWS]
        ]
        parts += _table([("requests by instance", found.before, found.after), *rows])
        parts += _left_out(len(found.instances), "instances")
    for one in told:
        parts += ["", f"{title(one)}", f"  {found.before}", _indented(one.why_before)]
        parts += [f"  {found.after}", _indented(one.why_after)]
    return "\n".join(parts).rstrip()


def headline(found: Comparison) -> str:
    """What it comes to, in one sentence."""
    against = "what was recorded" if found.before == RECORDED else found.before
    if found.agreement is None:
        return f"{found.after}: none of {found.read:,} decisions can be compared with {against}"
    moved = found.compared - found.agreed
    sentence = f"{found.after} agrees with {against} on {percent(found.agreement)} of {found.compared:,} decisions"
    if not moved:
        return sentence
    tied = f", {found.ties:,} of them by a tie that falls the other way" if found.ties else ""
    return f"{sentence}; {moved:,} {'goes' if moved == 1 else 'go'} elsewhere{tied}"


def notes(found: Comparison) -> list[str]:
    """What else must be known to read it, a sentence each."""
    said = []
    if found.first_ns:
        said.append(f"made from {_time(found.first_ns)} to {_time(found.last_ns)}")
    said += [f"{count:,} {why}" for why, count in found.unanswered.most_common()]
    if found.unanswered:
        said[-1] += "; name the policy in the setting `observe` to have recorded what it reads"
    if found.without_policy:
        said.append(f"{found.without_policy:,} had no policy to ask (pinned, or nobody to choose from)")
    if found.late:
        said.append(f"{found.late:,} rest on look-ups made {found.late_s / found.late * 1000:.1f} ms later on average")
    if found.renamed:
        said.append(f"{found.renamed.total():,} choose the same by another rule")
    return said


def figures(found: Comparison) -> list[tuple[str, str, str]]:
    """Rows of the load's spread: what, of the one side, of the other."""
    count, sides = len(found.instances), (found.spread_before, found.spread_after)

    def row(what: str, of: Any) -> tuple[str, str, str]:
        before, after = map(of, sides)
        return what, before, after

    def share(spread: Spread) -> str:
        return "–" if spread.hit_share is None else percent(spread.hit_share)

    return [
        row("requests, max / mean", lambda spread: _ratio(spread.imbalance(count))),
        row("prompt tokens, max / mean", lambda spread: _ratio(spread.token_imbalance(count))),
        row("prompt tokens found cached", share),
    ]


def title(one: Told) -> str:
    """An example in one line."""
    like = f", as {one.count - 1:,} more" if one.count > 1 else ""
    return (
        f"{one.id}: {clipped(one.before)} → {clipped(one.after)}, {name(one.move)}, "
        f"{one.prompt_len:,} prompt tokens{like}"
    )


def name(move: Move) -> str:
    """A move in words."""
    return f"{move.before} → {move.after}"


def percent(share: float) -> str:
    """A share; 100 % is said only of all."""
    text = f"{share * 100:.2f}"
    return "100 %" if share == 1 else "99.99 %" if text == "100.00" else f"{text} %"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _time(time_ns: int) -> str | None:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds") if time_ns else None


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    first, *others = (max(len(row[i]) for row in rows) for i in range(3))
    return [
        f"  {row[0]:<{first}}" + "".join(f"    {cell:>{width}}" for cell, width in zip(row[1:], others, strict=True))
        for row in rows
    ]


def _left_out(count: int, what: str) -> list[str]:
    return [f"  … and {count - _ROWS} more {what}"] if count > _ROWS else []


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())

"""Report of the demo."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smetric.files import shipped_policies
from smetric.lab.demo import play as stage
from smetric.lab.demo.play import WINDOW_S, AgentAnswer, Play, with_homes
from smetric.policy import Decision
from smetric.policy.explain import explain, summary
from smetric.telemetry.tracing import ENDPOINTS

if TYPE_CHECKING:
    from smetric.policy.decision import Decision


# The routing decisions of a play that are worth reading: a first request, one that returned, one that moved, ….


@dataclass(frozen=True, slots=True)
class DemoExample:
    """A decision, and what makes it one of the three."""

    title: str
    decision: Decision


def examples(play: Play) -> list[DemoExample]:
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
    title: str, among: list[tuple[AgentAnswer, str, Decision]], worth: Callable[[AgentAnswer, Decision], float]
) -> DemoExample | None:
    """The one of the highest worth; the earliest of equals."""
    if not among:
        return None
    _, _, decision = max(among, key=lambda one: worth(one[0], one[2]))
    return DemoExample(title, decision)


def _column(decision: Decision, feature: str) -> list[float]:
    """A feature over the candidates; empty where the policy did not read it."""
    return list(decision.snapshot.columns.get(feature, ()))


def _pressure(decision: Decision) -> float:
    """Requests of the chosen instance ÷ their mean."""
    load = _column(decision, "requests")
    return load[decision.index] * len(load) / sum(load) if sum(load) else 0.0


# What the demo prints when it has played: the figures side by side, some decisions, and where to go from there.

_WIDTH = 110
_HEAD = ("policy", "requests", "failed", "local hit rate", "imbalance", "TTFT P50", "TTFT P90", "follow-ups returned")


def report(plays: Sequence[Play], by_lmcache: Play | None, program: str, environ: Mapping[str, str]) -> str:
    """The whole text.

    Args:
        plays: one for each policy; decisions of the first one are explained.
        by_lmcache: some of the sessions by the first one again, told by LMCache what the engines hold, if played.
        program: how this program is called.
        environ: says where traces went.
    """
    parts = [_heading("The same sessions, policy by policy"), _table(plays), _legend()]
    parts += [_heading(f"Decisions of {plays[0].policy}"), *_decisions(plays[0])]
    if by_lmcache is not None:
        parts += [_heading(f"{by_lmcache.policy} again, told by LMCache"), _table([by_lmcache]), *_lmcache(by_lmcache)]
    parts += [_heading("Where to go from here"), _next_steps(program, environ)]
    return "\n\n".join(parts)


def _heading(text: str) -> str:
    return f"── {text} ".ljust(_WIDTH, "─")


def _table(plays: Sequence[Play]) -> str:
    rows = [_HEAD, *(_row(play) for play in plays)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(play: Play) -> tuple[str, ...]:
    figures = play.figures
    return (
        play.policy,
        str(figures.requests),
        str(figures.failed),
        f"{figures.hit_rate:.1%}",
        f"{figures.imbalance:.2f}",
        f"{figures.ttft_p50_s * 1000:.0f} ms",
        f"{figures.ttft_p90_s * 1000:.0f} ms",
        f"{figures.returned} of {figures.followups}",
    )


def _legend() -> str:
    return "\n".join(
        (
            "local hit rate   cached ÷ prompt tokens, as the engines counted them in `usage`",
            f"imbalance        requests in flight: fullest instance ÷ mean, in {WINDOW_S:g} s windows; 1 is even",
            "TTFT             from sending a request to the first event, as the client saw it",
            "returned         later requests of a session that went to the instance of the one before",
            "",
            _fill(
                "One short run on emulated engines with one set of sessions: it shows what the policies do, not which "
                "is better. TTFT holds the work of this whole process, which is client, router and engines in one."
            ),
        )
    )


def _decisions(play: Play) -> list[str]:
    return [
        f"{number}. {example.title}:\n{_told(example.decision)}" for number, example in enumerate(examples(play), 1)
    ]


def _told(decision: Decision) -> str:
    """*decision* in a sentence, and its full account, whose lines are as long as what they tell."""
    account = [_fill(line, "   ", "         ") for line in explain(decision).splitlines()]
    return "\n".join((_fill(f"{summary(decision)}.", "   ", "   "), "", *account))


def _lmcache(play: Play) -> list[str]:
    told = told_by("lmcache", play)
    parts = [
        _fill(
            "Some of the sessions. What engines hold is not the router's own guess (prefix_index) now, but what "
            "LMCache's coordinator answers (emulated, as are the engines), asked by token ids of their /tokenize. "
            f"{len(told)} of {play.figures.followups} follow-ups rest on such an answer."
        )
    ]
    if told:
        parts.append(f"The one with the most of its prompt in a cache:\n{_told(told[0])}")
    return parts


def _next_steps(program: str, environ: Mapping[str, str]) -> str:
    shipped = os.path.relpath(shipped_policies()["smetric"])
    return "\n".join(
        (
            f"Traces          {_traces(program, environ)}",
            f"Try it by hand  {program} demo --serve",
            "                keeps the engines and a router up; `curl` lines are printed, and its admin port",
            "                lists every decision: curl http://127.0.0.1:9464/admin/decisions",
            f"Real vLLM       {program} serve --policy smetric --instance http://HOST:8000 --instance http://OTHER:8000",
            "                then send OpenAI or Anthropic requests to http://127.0.0.1:8080",
            f"The policy      {program} check --verbose smetric",
            f"                cp {shipped} mine.policy; {program} demo --policy ./mine.policy",
        )
    )


def _traces(program: str, environ: Mapping[str, str]) -> str:
    endpoint = next((name for name in ENDPOINTS if environ.get(name, "").strip()), None)
    if endpoint is None:
        return f"off; with a collector: {ENDPOINTS[-1]}=http://localhost:4318 {program} demo"
    return f"went to the collector that {endpoint} names, service smetric"


def serving(data: str, admin: str, policy: str, program: str) -> str:
    """What `--serve` prints: ready-to-paste lines for a router at *data* with its admin port at *admin*."""
    post = f"curl -si {data}/v1/chat/completions -H 'content-type: application/json'"
    long = f"""LONG=$(printf 'all work and no play %.0s' $(seq 200))
{post} -d '{{"model":"emulated","max_tokens":8,"messages":[{{"role":"user","content":"'"$LONG"'"}}]}}'"""
    follow_up = (
        f"""{post} -d '{{"model":"emulated","max_tokens":8,"messages":[{{"role":"user","content":"'"$LONG"'"}},"""
        """{"role":"assistant","content":"Go on."},{"role":"user","content":"And then?"}]}'"""
    )
    stream = (
        f"curl -sNi {data}/v1/messages -H 'content-type: application/json' -d "
        """'{"model":"emulated","max_tokens":40,"stream":true,"messages":[{"role":"user","content":"Hello"}]}'"""
    )
    return "\n".join(
        (
            f"router on {data} with policy {policy}, before {stage.INSTANCES} emulated engines; admin port on {admin}",
            "",
            "# a first request; the x-smetric headers say who answers, and by which rule",
            long,
            "",
            "# its follow-up, which returns to the instance that has it in its cache",
            follow_up,
            "",
            "# the Anthropic API, as a stream",
            stream,
            "",
            "# the same as it happens, in a browser",
            f"{admin}/admin/ui",
            "",
            "# the decisions so far, newest first, and why one was made: its id is in x-smetric-decision-id",
            f"curl -s '{admin}/admin/decisions?limit=3'",
            f"{program} explain --admin {admin} --decision ID",
            "",
            "Ctrl-C ends it.",
        )
    )


def _fill(text: str, indent: str = "", hanging: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )

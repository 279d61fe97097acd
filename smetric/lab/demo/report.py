"""Report of the demo: figures side by side, explained decisions, and next steps."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from smetric.files import shipped_policies
from smetric.lab.demo import play as stage
from smetric.lab.demo.play import WINDOW_S, AgentAnswer, Play, with_homes
from smetric.policy import Decision
from smetric.policy.explain import explain, summary
from smetric.telemetry.tracing import ENDPOINTS


@dataclass(frozen=True, slots=True)
class DemoExample:
    """Decision with the title of its kind."""

    title: str
    decision: Decision


def examples(play: Play) -> list[DemoExample]:
    """Return up to three decisions of *play*; a kind without a case is left out.

    1. A first request: the one that met the fullest engines.
    2. A follow-up that returned to its instance: the one with the most cached tokens.
    3. A follow-up that moved: the one that met the fullest engines. If none moved, the one that returned to the most
       loaded instance.
    """
    decided = [
        (answer, home, decision)
        for answer, home in with_homes(play.answers)
        if answer.is_whole and (record := play.records.get(answer.decision)) and (decision := record.decision)
    ]
    first = [case for case in decided if case[0].turn == 0]
    returned = [case for case in decided if case[1] and case[0].instance == case[1]]
    moved = [case for case in decided if case[1] and case[0].instance != case[1]]
    chosen = [
        _best("A first request", first, lambda answer, decision: sum(_column(decision, "requests"))),
        _best(
            "A follow-up that returned to its instance",
            # Prefer the policy's first choice: otherwise the return is by chance.
            [case for case in returned if case[2].failed_guard is None] or returned,
            lambda answer, decision: answer.cached_tokens,
        ),
        _best(
            "A follow-up that moved to another instance",
            # Prefer a failed guard: otherwise both instances may have had the same hit.
            [case for case in moved if case[2].failed_guard is not None] or moved,
            lambda answer, decision: sum(_column(decision, "requests")),
        )
        or _best(
            "No follow-up moved; this one returned to the most loaded instance",
            returned,
            lambda _, decision: _pressure(decision),
        ),
    ]
    return [example for example in chosen if example is not None]


def decisions_by_source(source: str, play: Play) -> list[Decision]:
    """Return the decisions whose hit for the chosen instance comes from *source*; longest hits first."""
    found = [
        (hit[0], record.decision)
        for record in play.records.values()
        if record.decision is not None and (hit := record.hit) is not None and hit[1].partition(":")[0] == source
    ]
    return [decision for _, decision in sorted(found, key=lambda pair: -pair[0])]


def _best(
    title: str, among: list[tuple[AgentAnswer, str, Decision]], worth: Callable[[AgentAnswer, Decision], float]
) -> DemoExample | None:
    """Return the decision of the highest worth; of equals the first."""
    if not among:
        return None
    _, _, decision = max(among, key=lambda case: worth(case[0], case[2]))
    return DemoExample(title, decision)


def _column(decision: Decision, feature: str) -> list[float]:
    """Return a feature of all candidates; empty if the policy did not read it."""
    return list(decision.snapshot.columns.get(feature, ()))


def _pressure(decision: Decision) -> float:
    """Return the requests of the chosen instance ÷ their mean."""
    load = _column(decision, "requests")
    return load[decision.index] * len(load) / sum(load) if sum(load) else 0.0


_WIDTH = 110
_HEAD = ("policy", "requests", "failed", "local hit rate", "imbalance", "TTFT P50", "TTFT P90", "follow-ups returned")


def report(plays: Sequence[Play], by_lmcache: Play | None, program: str, environ: Mapping[str, str]) -> str:
    """Return the whole text.

    Args:
        plays: one for each policy; decisions of the first one are explained.
        by_lmcache: play of some sessions by the first policy with LMCache's lookup, if there was one.
        program: command of this program.
        environ: names the collector of traces.
    """
    parts = [_heading("The same sessions, policy by policy"), _table(plays), _legend(plays)]
    parts += [_heading(f"Decisions of {plays[0].policy}"), *_decisions(plays[0])]
    if by_lmcache is not None:
        parts += [
            _heading(f"{by_lmcache.policy} again, with LMCache's lookup"),
            _table([by_lmcache]),
            *_lmcache(by_lmcache),
        ]
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


def _legend(plays: Sequence[Play]) -> str:
    floor = "FLOOR            a load floor: so many requests are no overload, however idle the other instances are"
    return "\n".join(
        (
            "local hit rate   cached ÷ prompt tokens, from the engines' `usage`",
            f"imbalance        requests in flight: fullest instance ÷ mean, in {WINDOW_S:g} s windows; 1 is even",
            "TTFT             time from request to first event, measured by the client",
            "returned         follow-ups that went to the instance of the session's previous request",
            *([floor] if any("FLOOR=" in play.policy for play in plays) else []),
            "",
            _fill(
                "This is one short run on emulated engines with one set of sessions: it shows how policies differ, not "
                "which is better. TTFT includes the work of this process, which is client, router and engines in one."
            ),
        )
    )


def _decisions(play: Play) -> list[str]:
    return [
        f"{number}. {example.title}:\n{_explained(example.decision)}"
        for number, example in enumerate(examples(play), 1)
    ]


def _explained(decision: Decision) -> str:
    """Return a summary sentence of *decision*, and its full explanation."""
    account = [_fill(line, "   ", "         ") for line in explain(decision).splitlines()]
    return "\n".join((_fill(f"{summary(decision)}.", "   ", "   "), "", *account))


def _lmcache(play: Play) -> list[str]:
    found = decisions_by_source("lmcache", play)
    parts = [
        _fill(
            "This play has some of the sessions. Its cache hits are answers of LMCache's coordinator (emulated, as the "
            "engines are) to token ids of the engines' /tokenize, and not predictions of the router (prefix_index). "
            f"{len(found)} of {play.figures.followups} follow-ups use such an answer."
        )
    ]
    if found:
        parts.append(f"The one with the longest hit:\n{_explained(found[0])}")
    return parts


def _next_steps(program: str, environ: Mapping[str, str]) -> str:
    shipped = os.path.relpath(shipped_policies()["smetric"])
    return "\n".join(
        (
            f"Traces          {_traces(program, environ)}",
            f"Try it by hand  {program} demo --serve",
            "                keeps engines and a router running and prints `curl` commands; the admin port",
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
    return f"sent to the collector of {endpoint}, service smetric"


def serving(data: str, admin: str, policy: str, program: str) -> str:
    """Return the output of `--serve`: commands for a router at *data* with its admin port at *admin*."""
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
            "# a first request; the x-smetric headers name the instance and the rule",
            long,
            "",
            "# its follow-up, which returns to the instance that has it in its cache",
            follow_up,
            "",
            "# the Anthropic API, as a stream",
            stream,
            "",
            "# the decisions live, in a browser",
            f"{admin}/admin/ui",
            "",
            "# the decisions so far, newest first, and the explanation of one: its id is in x-smetric-decision-id",
            f"curl -s '{admin}/admin/decisions?limit=3'",
            f"{program} explain --admin {admin} --decision ID",
            "",
            "Ctrl-C stops it.",
        )
    )


def _fill(text: str, indent: str = "", hanging: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )

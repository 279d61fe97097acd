"""Reports: one recorded decision in words, and a replay as text, as JSON and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from smetric import names
from smetric.policy import PolicyError, explain
from smetric.policy.types import clipped
from smetric.records.format import DecisionLine
from smetric.records.reader import Recorded
from smetric.records.replay import RECORDED, Comparison, Example, Judge, LoadSpread, Move, NotRecorded, policy_of, side


def account(recorded: Recorded) -> str:
    """Return the explanation of *recorded*, and how its request ended."""
    return f"{why(recorded)}\n{ending(recorded.line)}"


def why(recorded: Recorded) -> str:
    """Return the explanation of *recorded*."""
    line = recorded.line
    if not line.ids:
        return f"{line.outcome}: no policy was asked ({line.reason})"
    try:
        decided = Judge(policy_of(recorded.policy), is_recorded=True).decide(recorded)
    except PolicyError:
        return "this version cannot load the policy that decided it"
    return str(decided) if isinstance(decided, NotRecorded) else explain.explain(decided)


def ending(line: DecisionLine, *, is_over: bool = True) -> str:
    """Return how the request of *line* ended; it may be unfinished unless *is_over*."""
    if line.status is None:
        followed = "another decision of the same request followed"
        return f"not answered: {followed}" if is_over else f"not answered yet, or {followed}"
    said = [f"answered {line.status}" + (f" after {line.duration_s:.3g} s" if line.duration_s is not None else "")]
    if line.ttft_s is not None:
        expected, forecast = "", line.forecast
        if forecast is not None and forecast.ttft_s is not None:
            expected = f" ({forecast.ttft_s:.3g} s expected"
            if forecast.other_ttft_s is not None:
                expected += f", {forecast.other_ttft_s:.3g} s on {forecast.other}"
            expected += ")"
        said.append(f"first byte after {line.ttft_s:.3g} s{expected}")
    usage = line.usage
    if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens is not None:
        believed = f", {line.hit.tokens:,} were expected" if line.hit is not None else ""
        said.append(f"{usage.cached_tokens:,} of {usage.prompt_tokens:,} prompt tokens were cached{believed}")
    if line.migration is not None:
        left = line.migration.left_tokens
        kept = f", which keeps {left:,} tokens more" if left is not None else ""
        said.append(f"moved from {line.migration.source}{kept}: {line.migration.guard}")
    return "; ".join(said)


#: Rows of a table on a terminal.
_ROWS = 32


@dataclass(frozen=True, slots=True)
class ExampleText:
    """An example in words: the choices of both sides, and their explanations."""

    id: str
    move: Move
    count: int
    prompt_len: int
    before: str
    after: str
    why_before: str
    why_after: str


def examples(found: Comparison, most: int) -> list[ExampleText]:
    """Return at most *most* examples, of the most frequent moves."""
    kept = [(move, count, found.examples[move]) for move, count in found.moves.most_common() if move in found.examples]
    return [_in_words(move, count, example) for move, count, example in kept[:most]]


def _in_words(move: Move, count: int, example: Example) -> ExampleText:
    line, after = example.recorded.line, example.after
    return ExampleText(
        id=line.id,
        move=move,
        count=count,
        prompt_len=int(line.request.prompt_len),
        before=example.choice,
        after=side(after).choice,
        why_before=explain.explain(example.before) if example.before else why(example.recorded),
        why_after=explain.explain(after),
    )


def as_json(found: Comparison, shown: Sequence[ExampleText]) -> dict[str, Any]:
    """Return the comparison as JSON values; shares are 0..1, None if there is nothing to divide by."""
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
            for one in shown
        ],
    }


def as_text(found: Comparison, shown: Sequence[ExampleText]) -> str:
    """Return the comparison for a terminal."""
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
    for one in shown:
        parts += ["", f"{title(one)}", f"  {found.before}", _indented(one.why_before)]
        parts += [f"  {found.after}", _indented(one.why_after)]
    return "\n".join(parts).rstrip()


def headline(found: Comparison) -> str:
    """Return the result in one sentence."""
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
    """Return what else a reader must know, a sentence each."""
    said = []
    if found.first_ns:
        said.append(f"made from {_time(found.first_ns)} to {_time(found.last_ns)}")
    said += [f"{count:,} {why}" for why, count in found.unanswered.most_common()]
    if found.unanswered:
        said[-1] += "; name the policy in the setting `observe` to have recorded what it reads"
    if found.without_policy:
        said.append(f"{found.without_policy:,} had no policy to ask (pinned, or no candidate)")
    if found.late:
        said.append(f"{found.late:,} rest on look-ups made {found.late_s / found.late * 1000:.1f} ms later on average")
    if found.renamed:
        said.append(f"{found.renamed.total():,} choose the same by another rule")
    return said


def figures(found: Comparison) -> list[tuple[str, str, str]]:
    """Return the rows of the table of load: name, one side, other side."""
    count, sides = len(found.instances), (found.spread_before, found.spread_after)

    def row(what: str, of: Any) -> tuple[str, str, str]:
        before, after = map(of, sides)
        return what, before, after

    def share(spread: LoadSpread) -> str:
        return "–" if spread.hit_share is None else percent(spread.hit_share)

    return [
        row("requests, max / mean", lambda spread: _ratio(spread.imbalance(count))),
        row("prompt tokens, max / mean", lambda spread: _ratio(spread.token_imbalance(count))),
        row("prompt tokens found cached", share),
    ]


def title(one: ExampleText) -> str:
    """Return an example in one line."""
    like = f", as {one.count - 1:,} more" if one.count > 1 else ""
    return (
        f"{one.id}: {clipped(one.before)} → {clipped(one.after)}, {name(one.move)}, "
        f"{one.prompt_len:,} prompt tokens{like}"
    )


def name(move: Move) -> str:
    """Return a move in words."""
    return f"{move.before} → {move.after}"


def percent(share: float) -> str:
    """Return a share as text; only a share of 1 is shown as 100 %."""
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


#: Instances with bars of their own.
_BARS = 256
_ROW, _WIDTH, _LABEL = 34, 420, 190

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5c6675; --line: #d8dee7; --paper: #fff; --card: #f6f8fa;
  --before: #8a94a6; --after: #1668c7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa5b4; --line: #343c48; --paper: #12161c;
  --card: #1a2029; --before: #7d8899; --after: #5aa4f5; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 84rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p, li, figcaption { color: var(--soft); }
table { border-collapse: collapse; } th, td { padding: .25rem .9rem; border-bottom: 1px solid var(--line); }
th { text-align: left; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .75rem; overflow-x: auto;
  font: 12px/1.45 ui-monospace, monospace; margin: .25rem 0; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; } .b { fill: var(--before); } .a { fill: var(--after); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
.key.b { background: var(--before); } .key.a { background: var(--after); }
"""


def page(found: Comparison, shown: Sequence[ExampleText]) -> str:
    """Return the comparison as one self-contained HTML page, light and dark."""
    sentence = headline(found)
    body = [
        f"<h1>{escape(sentence)}</h1>",
        f"<ul>{_each('li', notes(found))}</ul>",
        *_moves(found),
        *_load(found),
        *_examples(found, shown),
        "<p>Each decision is taken as it stood: loads and caches are those that the recorded choices had caused.</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(sentence)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body)
    ) + "\n</body>\n</html>\n"


def _each(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _moves(found: Comparison) -> list[str]:
    if not found.moves:
        return []
    rows = "".join(
        f'<tr><td>{escape(name(move))}</td><td class="n">{count:,}</td>'
        f'<td class="n">{percent(count / found.compared)}</td></tr>'
        for move, count in found.moves.most_common()
    )
    head = '<tr><th>from rule → to rule</th><th class="n">requests</th><th class="n">of all</th></tr>'
    return ["<h2>What moves</h2>", f"<table>{head}{rows}</table>"]


def _load(found: Comparison) -> list[str]:
    if not found.compared:
        return []
    before, after = escape(found.before), escape(found.after)
    rows = "".join(
        f'<tr><td>{what}</td><td class="n">{one}</td><td class="n">{other}</td></tr>'
        for what, one, other in figures(found)
    )
    key = f'<p>Requests by instance: <span class="key b"></span>{before} <span class="key a"></span>{after}</p>'
    return [
        "<h2>How load is spread</h2>",
        f'<table><tr><th></th><th class="n">{before}</th><th class="n">{after}</th></tr>{rows}</table>',
        key,
        _bars(found),
    ]


def _bars(found: Comparison) -> str:
    """Return two bars for each instance: recorded and replayed requests."""
    instances = sorted(found.instances)
    shown = instances[:_BARS]
    one, other = found.spread_before.requests, found.spread_after.requests
    most = max(1, *one.values(), *other.values())
    parts = []
    for i, instance in enumerate(shown):
        top = i * _ROW
        parts.append(f'<text x="{_LABEL - 8}" y="{top + 20}" text-anchor="end">{escape(_short(instance))}</text>')
        for kind, count, y in (("b", one[instance], top + 4), ("a", other[instance], top + 17)):
            width = count / most * _WIDTH
            parts.append(
                f'<rect class="{kind}" x="{_LABEL}" y="{y}" width="{width:.1f}" height="11"/>'
                f'<text x="{_LABEL + width + 6:.1f}" y="{y + 10}">{count:,}</text>'
            )
    more = f"<figcaption>… and {len(instances) - _BARS} more instances</figcaption>" if len(instances) > _BARS else ""
    width, height = _LABEL + _WIDTH + 90, len(shown) * _ROW
    return (
        f'<figure style="margin:0"><svg role="img" aria-label="Requests by instance" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" style="max-width:100%;height:auto">{"".join(parts)}</svg>{more}</figure>'
    )


def _short(instance: str) -> str:
    return instance if len(instance) <= 24 else instance[:23] + "…"


def _examples(found: Comparison, shown: Sequence[ExampleText]) -> list[str]:
    parts = ["<h2>The most telling ones</h2>"] if shown else []
    for one in shown:
        sides = "".join(
            f"<div><strong>{escape(label)}</strong><pre>{escape(why)}</pre></div>"
            for label, why in ((found.before, one.why_before), (found.after, one.why_after))
        )
        parts += [f"<h3>{escape(title(one))}</h3>", f'<div class="sides">{sides}</div>']
    return parts

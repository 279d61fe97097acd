"""A comparison as one HTML page that needs nothing else: styles, bars (SVG) and explanations inside, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from smetric.records.comparison import Comparison
from smetric.records.report import Told, figures, headline, name, notes, percent, title

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


def page(found: Comparison, told: Sequence[Told]) -> str:
    """The page."""
    sentence = headline(found)
    body = [
        f"<h1>{escape(sentence)}</h1>",
        f"<ul>{_each('li', notes(found))}</ul>",
        *_moves(found),
        *_load(found),
        *_examples(found, told),
        "<p>Each decision is taken as it stood: loads and caches are those that what was really chosen had led to.</p>",
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
    """Two bars for each instance: what it was sent, and what it would have been."""
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


def _examples(found: Comparison, told: Sequence[Told]) -> list[str]:
    parts = ["<h2>The most telling ones</h2>"] if told else []
    for one in told:
        sides = "".join(
            f"<div><strong>{escape(who)}</strong><pre>{escape(why)}</pre></div>"
            for who, why in ((found.before, one.why_before), (found.after, one.why_after))
        )
        parts += [f"<h3>{escape(title(one))}</h3>", f'<div class="sides">{sides}</div>']
    return parts

"""Write the manual's tables, from the code and from measured figures, between markers; `--check` lists stale pages.

python docs/generate.py [--check]
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from markdown import table
from measured import decisions, footprint, matrix, reliability, routers

from smetric import names
from smetric.config import load
from smetric.config.settings import Settings
from smetric.config.values import Section
from smetric.features import VOCABULARY
from smetric.fleet import record
from smetric.records import format
from smetric.records.traffic import TrafficLine
from smetric.tools import reference
from smetric.tools.reference import markdown_table, range_of, unknown_of

DOCS = Path(__file__).parent


def _value(value: Any) -> str:
    """Return a default as a policy or a YAML file writes it; a dash for an empty one."""
    if value is None or value == "" or value == () or value == {} or value == [] or value == frozenset():
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def features() -> str:
    """Features of instances."""
    return table(
        ("feature", "unit", "range", "meaning", "source", "staleness", "when unknown, arithmetic sees"),
        (
            (
                f"`{f.name}`" + (" **L**" if f.lookup else ""),
                f.unit or "–",
                range_of(f),
                f.doc,
                f.source,
                f.staleness,
                unknown_of(f),
            )
            for f in VOCABULARY.features.values()
        ),
    )


def request() -> str:
    """Fields of the request."""
    return table(
        ("field", "unit", "range", "meaning"),
        (
            (f"`req.{f.name}`", f.unit or "–", range_of(f), f.doc + (" May be unknown." if f.may_be_unknown else ""))
            for f in VOCABULARY.request.values()
        ),
    )


def statements() -> str:
    """Statements of the language."""
    return markdown_table(reference.statements())


def operators() -> str:
    """Operators by precedence."""
    return markdown_table(reference.operators())


def builtins() -> str:
    """Built-in functions."""
    return markdown_table(reference.builtins())


def settings() -> str:
    """Every setting by its full name."""
    return table(("setting", "default", "meaning"), _settings_below(Settings, ""))


def _settings_below(section: type[Section], prefix: str) -> Iterable[tuple[str, str, str]]:
    for key, (kind, default) in load.fields_of(section).items():
        name = prefix + key
        if kind.section is not None:
            yield from _settings_below(kind.section, f"{name}.")
            continue
        shown = (
            "required"
            if default is msgspec.NODEFAULT
            else _value(None if default is None else load.show(default, kind))
        )
        yield f"`{name}`", shown, kind.doc
        if kind.item is not None and kind.item.section is not None:
            yield from _settings_below(kind.item.section, f"{name}[].")


def attributes() -> str:
    """Span attributes."""
    rows = ((f"`{a.name}`", a.type, a.unit or "–", a.doc) for a in names.ATTRIBUTES)
    return table(("attribute", "type", "unit", "meaning"), rows)


def metrics() -> str:
    """Prometheus metrics."""
    rows = ((f"`{m.name}`", m.kind, ", ".join(m.labels) or "–", m.doc) for m in names.METRICS)
    return table(("metric", "kind", "labels", "meaning"), rows)


def events() -> str:
    """Log events."""
    return table(("event", "written"), ((f"`{name}`", doc) for name, doc in names.EVENTS.items()))


#: Struct of each part of a record line.
_PARTS: dict[str, type[msgspec.Struct]] = {
    "header": format.Header,
    "policy": format.PolicyLine,
    "decision": format.DecisionLine,
    "columns.NAME": format.ColumnLine,
    "usage": record.Usage,
    "hit": format.HitLine,
    "forecast": record.Forecast,
    "migration": record.Migration,
}


def record_lines() -> str:
    """Keys of the record of decisions."""
    rows = ((f"`{part}`", *row) for part, struct in _PARTS.items() for row in _keys(struct))
    return table(("in", "key", "meaning"), rows)


def traffic_lines() -> str:
    """Keys of the trace of the traffic."""
    return table(("key", "meaning"), _keys(TrafficLine))


def _keys(struct: type[msgspec.Struct]) -> Iterable[tuple[str, str]]:
    """Yield the keys of a record line and their documentation."""
    arguments = inspect.cleandoc(struct.__doc__ or "").partition("Args:\n")[2]
    said = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments, re.M))
    for field, key in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
        yield f"`{key}`", re.sub(r"\s+", " ", said[field]).replace("None", "null")


def shown(name: str, language: str = "") -> Callable[[], str]:
    """Return a function that renders the file *name* of `examples/gateways`."""

    def block() -> str:
        return f"```{language}\n{(DOCS.parent / 'examples' / 'gateways' / name).read_text()}```"

    block.__name__ = name
    return block


PAGES: dict[str, tuple[Callable[[], str], ...]] = {
    "reference/features.md": (features, request),
    "reference/language.md": (statements, operators, builtins),
    "reference/configuration.md": (settings,),
    "reference/spans.md": (attributes,),
    "reference/metrics.md": (metrics,),
    "reference/log-events.md": (events,),
    "reference/record-format.md": (record_lines, traffic_lines),
    "guide/gateways.md": (
        shown("nginx.conf", "nginx"),
        shown("haproxy.cfg"),
        shown("envoy.yaml", "yaml"),
        shown("traefik.yaml", "yaml"),
        shown("traefik-routers.yaml", "yaml"),
        shown("Caddyfile"),
        shown("httpd.conf", "apache"),
        shown("litellm.yaml", "yaml"),
    ),
    "internals/reliability.md": (reliability, matrix),
    "internals/benchmarks.md": (routers, footprint, decisions),
}


def rendered(page: str) -> str:
    """Return the text of *page* with current tables."""
    text = (DOCS / page).read_text()
    for make in PAGES[page]:
        begin, end = f"<!-- {make.__name__} -->\n", f"<!-- end of {make.__name__} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"docs/{page}: the markers {begin.strip()} and {end} are missing")
        text = before + begin + make() + "\n" + end + after
    return text


def main() -> int:
    """Write all pages, or with `--check` list the stale ones; return the exit code."""
    stale = [page for page in PAGES if rendered(page) != (DOCS / page).read_text()]
    if "--check" in sys.argv:
        for page in stale:
            print(f"docs/{page} is stale; run: python docs/generate.py")
        return 1 if stale else 0
    for page in stale:
        (DOCS / page).write_text(rendered(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())

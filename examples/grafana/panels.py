"""Panels of a dashboard and the PromQL in them, made of metrics of SMetric's table: names, labels, units, sentences.

Which panels there are is in `rows.py`, how they become Grafana's JSON in `generate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from smetric.names import Metric

#: Matchers of every series; the job of ../prometheus/prometheus.yml sets `router`.
ALWAYS = ('job=~"$job"', 'router=~"$router"')


@dataclass(frozen=True)
class Line:
    """One query: an expression, and the legend of each of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel: Grafana's type and unit, a sentence, its queries, and its size on a grid 24 wide."""

    title: str
    doc: str
    unit: str
    lines: tuple[Line, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    is_stacked: bool = False


@dataclass(frozen=True)
class Row:
    """A row with a title; folded until it is clicked."""

    title: str
    panels: tuple[Panel, ...]
    is_folded: bool = True


def series(metric: Metric, *matchers: str, suffix: str = "") -> str:
    """*metric* of the chosen routers and, where it has them, instances."""
    chosen = ('instance=~"$instance"',) if "instance" in metric.labels else ()
    return f"{metric.name}{suffix}{{{', '.join((*ALWAYS, *chosen, *matchers))}}}"


def rate(metric: Metric, *matchers: str, suffix: str = "") -> str:
    """How fast a counter grows, a second."""
    return f"rate({series(metric, *matchers, suffix=suffix)}[$__rate_interval])"


def summed(metric: Metric, by: tuple[str, ...], *matchers: str) -> str:
    """A counter's growth a second, in sums by labels."""
    return f"sum by ({', '.join(by)}) ({rate(metric, *matchers)})"


def increase(metric: Metric, by: tuple[str, ...], *matchers: str) -> str:
    """By how much a counter grew between two points, in sums by labels."""
    return f"sum by ({', '.join(by)}) (increase({series(metric, *matchers)}[$__rate_interval]))"


def share(metric: Metric, by: tuple[str, ...], *matchers: str) -> str:
    """The share of what *matchers* choose in a counter's growth; 0 where nothing was counted of it yet."""
    part, whole = summed(metric, by, *matchers), summed(metric, by)
    return f"({part} or 0 * {whole}) / {whole}"


def quantile(metric: Metric, q: float, by: tuple[str, ...] = ()) -> str:
    """A histogram's quantile."""
    labels = ", ".join((*by, "le"))
    return f"histogram_quantile({q}, sum by ({labels}) ({rate(metric, suffix='_bucket')}))"


def legend(by: tuple[str, ...]) -> str:
    """The labels of a series, one after the other."""
    return " ".join(f"{{{{{label}}}}}" for label in by)


def unit_of(metric: Metric) -> str:
    """Grafana's unit, by the unit in the metric's name; a counter's is that of its growth."""
    name = metric.name.removesuffix("_total")
    if metric.kind == "counter":
        return {"requests": "reqps"}.get(name.rpartition("_")[2], "cps")
    return {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}.get(name.rpartition("_")[2], "short")


def counter(metric: Metric, title: str, by: tuple[str, ...] | None = None, *matchers: str) -> Panel:
    """A counter's growth, by some of its labels or all, stacked."""
    labels = metric.labels if by is None else by
    lines = (Line(summed(metric, labels, *matchers), legend(labels) or title.lower()),)
    return Panel(title, metric.doc, unit_of(metric), lines, is_stacked=True)


def gauge(metric: Metric, title: str, unit: str = "") -> Panel:
    """A gauge as it is, of each router."""
    return Panel(
        title, metric.doc, unit or unit_of(metric), (Line(series(metric), legend((*metric.labels, "router"))),)
    )


def histogram(metric: Metric, title: str, by: tuple[str, ...] = ()) -> Panel:
    """Median, 90th and 99th percentile; with *by* the 99th of each."""
    if by:
        lines = (Line(quantile(metric, 0.99, by), f"p99 {legend(by)}"),)
    else:
        lines = tuple(Line(quantile(metric, q), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))
    return Panel(title, metric.doc, unit_of(metric), lines)


def figure(title: str, doc: str, unit: str, expr: str) -> Panel:
    """One number."""
    return Panel(title, doc, unit, (Line(expr, ""),), kind="stat", width=3, height=4)


def heat_map(metric: Metric, title: str) -> Panel:
    """A gauge of instances as colours, a line for each instance; routers are summed up."""
    line = Line(f"sum by (instance) ({series(metric)})", "{{instance}}")
    return Panel(title, metric.doc, "short", (line,), kind="status-history")


def shares(title: str, doc: str, *lines: Line) -> Panel:
    """Shares of a whole over time."""
    return Panel(title, doc, "percentunit", lines)


def default(metric: Metric) -> Panel:
    """The panel of a metric that no row places."""
    title = metric.name.removeprefix("smetric_").removesuffix("_total").replace("_", " ").capitalize()
    if metric.kind == "counter":
        return counter(metric, title)
    return histogram(metric, title) if metric.kind == "histogram" else gauge(metric, title)

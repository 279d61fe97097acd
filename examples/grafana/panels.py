"""Dashboard panels and their PromQL, built from SMetric's table of metrics: names, labels, units, descriptions.

Which panels there are is in `rows.py`, how they become Grafana's JSON in `generate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from smetric.names import Metric

#: Matchers of every series; the job of ../prometheus/prometheus.yml sets `router`.
ALWAYS = ('job=~"$job"', 'router=~"$router"')


@dataclass(frozen=True)
class Line:
    """Query: an expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Panel: Grafana's type and unit, a description, queries, and the size on a grid of width 24."""

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
    """Row with a title, folded by default."""

    title: str
    panels: tuple[Panel, ...]
    is_folded: bool = True


def series(metric: Metric, *matchers: str, suffix: str = "") -> str:
    """Return the selector of *metric* for the chosen routers and, if it has that label, instances."""
    chosen = ('instance=~"$instance"',) if "instance" in metric.labels else ()
    return f"{metric.name}{suffix}{{{', '.join((*ALWAYS, *chosen, *matchers))}}}"


def rate(metric: Metric, *matchers: str, suffix: str = "") -> str:
    """Return a counter's rate per second."""
    return f"rate({series(metric, *matchers, suffix=suffix)}[$__rate_interval])"


def summed(metric: Metric, by: tuple[str, ...], *matchers: str) -> str:
    """Return a counter's rate per second, summed by labels."""
    return f"sum by ({', '.join(by)}) ({rate(metric, *matchers)})"


def increase(metric: Metric, by: tuple[str, ...], *matchers: str) -> str:
    """Return a counter's increase between two points, summed by labels."""
    return f"sum by ({', '.join(by)}) (increase({series(metric, *matchers)}[$__rate_interval]))"


def share(metric: Metric, by: tuple[str, ...], *matchers: str) -> str:
    """Return the share of a counter's rate that *matchers* select; 0 if it has no samples yet."""
    part, whole = summed(metric, by, *matchers), summed(metric, by)
    return f"({part} or 0 * {whole}) / {whole}"


def quantile(metric: Metric, q: float, by: tuple[str, ...] = ()) -> str:
    """Return a histogram's quantile."""
    labels = ", ".join((*by, "le"))
    return f"histogram_quantile({q}, sum by ({labels}) ({rate(metric, suffix='_bucket')}))"


def legend(by: tuple[str, ...]) -> str:
    """Return a legend of the series' labels."""
    return " ".join(f"{{{{{label}}}}}" for label in by)


def unit_of(metric: Metric) -> str:
    """Return Grafana's unit for the unit in the metric's name; for a counter, the unit of its rate."""
    name = metric.name.removesuffix("_total")
    if metric.kind == "counter":
        return {"requests": "reqps"}.get(name.rpartition("_")[2], "cps")
    return {"seconds": "s", "bytes": "bytes", "ratio": "percentunit"}.get(name.rpartition("_")[2], "short")


def counter(metric: Metric, title: str, by: tuple[str, ...] | None = None, *matchers: str) -> Panel:
    """Return a panel of a counter's rate, stacked by some or all of its labels."""
    labels = metric.labels if by is None else by
    lines = (Line(summed(metric, labels, *matchers), legend(labels) or title.lower()),)
    return Panel(title, metric.doc, unit_of(metric), lines, is_stacked=True)


def gauge(metric: Metric, title: str, unit: str = "") -> Panel:
    """Return a panel of a gauge, per router."""
    return Panel(
        title, metric.doc, unit or unit_of(metric), (Line(series(metric), legend((*metric.labels, "router"))),)
    )


def histogram(metric: Metric, title: str, by: tuple[str, ...] = ()) -> Panel:
    """Return a panel of the median, 90th and 99th percentile; with *by*, the 99th of each label value."""
    if by:
        lines = (Line(quantile(metric, 0.99, by), f"p99 {legend(by)}"),)
    else:
        lines = tuple(Line(quantile(metric, q), f"p{q * 100:g}") for q in (0.5, 0.9, 0.99))
    return Panel(title, metric.doc, unit_of(metric), lines)


def figure(title: str, doc: str, unit: str, expr: str) -> Panel:
    """Return a panel with a single number."""
    return Panel(title, doc, unit, (Line(expr, ""),), kind="stat", width=3, height=4)


def heat_map(metric: Metric, title: str) -> Panel:
    """Return a panel of a gauge as colours, one line per instance, summed over routers."""
    line = Line(f"sum by (instance) ({series(metric)})", "{{instance}}")
    return Panel(title, metric.doc, "short", (line,), kind="status-history")


def shares(title: str, doc: str, *lines: Line) -> Panel:
    """Return a panel of shares over time."""
    return Panel(title, doc, "percentunit", lines)


def default(metric: Metric) -> Panel:
    """Return the panel of a metric that no row contains."""
    title = metric.name.removeprefix("smetric_").removesuffix("_total").replace("_", " ").capitalize()
    if metric.kind == "counter":
        return counter(metric, title)
    return histogram(metric, title) if metric.kind == "histogram" else gauge(metric, title)

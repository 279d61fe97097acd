"""Dashboard, alerts and collector examples against the metrics and attributes that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest

from smetric import names
from smetric.app import Application
from smetric.config.settings import InstanceSettings, Settings
from smetric.names import spans

EXAMPLES = Path(__file__).parents[2] / "examples"
GRAFANA = EXAMPLES / "grafana"
PROMETHEUS = EXAMPLES / "prometheus"
METRICS = {metric.name: metric for metric in names.METRICS}
#: Labels that the scrape job in prometheus.yml adds to every series.
TARGET = {"job", "router", "instance"}
#: Labels with a closed list of values; others (policies, instances, codes) have any.
CLOSED = {"outcome", "reason", "result", "agrees", "arm", "place", "found", "held", "met", "effect", "kind", "of"}
KNOWN = {"true", "false", "local", "external", "predicted", "actual", "instances", "router"}
KNOWN |= {value for value in vars(spans).values() if isinstance(value, str)}
KNOWN |= {one for value in vars(spans).values() if isinstance(value, tuple) for one in value}


def panels(of: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in of:
        yield panel
        yield from panels(panel.get("panels", []))


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "smetric.json").read_text())
    return loaded


def queries() -> list[tuple[str, str, str]]:
    """Return title, expression and legend of each query of the dashboard."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in panels(dashboard()["panels"])
        for target in panel.get("targets", [])
    ]


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load((PROMETHEUS / "smetric.rules.yml").read_text())
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def metric_of(name: str) -> names.Metric | None:
    """Return the metric of a series; a histogram has three kinds of series, none with its own name."""
    metric = METRICS.get(name)
    if metric is not None:
        return metric if metric.kind != "histogram" else None
    histogram = METRICS.get(re.sub(r"_(bucket|sum|count)$", "", name))
    return histogram if histogram is not None and histogram.kind == "histogram" else None


def faults(expr: str) -> list[str]:
    """Return the unknown metrics, labels and label values of an expression."""
    found = []
    labels = TARGET | {"le"}
    for name, matchers in re.findall(r"\b(smetric_\w+)(?:\{([^}]*)\})?", expr):
        metric = metric_of(name)
        if metric is None:
            found.append(f"no metric {name}")
            continue
        labels |= set(metric.labels)
        for label, sign, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
            if label not in TARGET | set(metric.labels):
                found.append(f"{name} has no label {label}")
            if label in CLOSED and "." not in value:
                wrong = set(value.split("|") if "~" in sign else [value]) - KNOWN
                found += [f"{label} is never {one}" for one in wrong]
    for listed in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", expr):
        found += [f"no label {label}" for label in re.findall(r"\w+", listed) if label not in labels]
    return found


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("PROMTOOL") or shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool (Debian: the package prometheus), or its path in PROMTOOL")
    command = [program, *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False, cwd=PROMETHEUS)


def said(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("expr", "says"),
    [
        ("smetric_decision_total", "no metric smetric_decision_total"),
        ("rate(smetric_overhead_seconds[5m])", "no metric smetric_overhead_seconds"),
        ("rate(smetric_decisions_total_bucket[5m])", "no metric smetric_decisions_total_bucket"),
        ('smetric_decisions_total{rule="stick"}', "smetric_decisions_total has no label rule"),
        ('smetric_decisions_total{outcome="refused_"}', "outcome is never refused_"),
        ("sum by (rule) (smetric_decisions_total)", "no label rule"),
    ],
)
def test_dashboard_checks_find_unknown_names(expr: str, says: str) -> None:
    assert faults(expr) == [says]


def test_dashboard_is_output_of_its_script() -> None:
    command = [sys.executable, str(GRAFANA / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, said(done)


def test_dashboard_queries_every_metric_and_no_other() -> None:
    assert [(title, fault) for title, expr, _ in queries() for fault in faults(expr)] == []
    shown = {metric_of(name) for _, expr, _ in queries() for name in re.findall(r"\bsmetric_\w+", expr)}
    assert set(names.METRICS) - shown == set()


def test_dashboard_legends_name_existing_labels() -> None:
    for title, expr, legend in queries():
        asked = set(re.findall(r"\{\{(\w+)\}\}", legend))
        aggregated = re.match(r"^-?sum by \(([^)]*)\)", expr)
        metrics = [metric_of(name) for name in re.findall(r"\bsmetric_\w+", expr)]
        have = TARGET | {label for metric in metrics if metric is not None for label in metric.labels}
        if aggregated:
            have = set(re.findall(r"\w+", aggregated.group(1)))
        assert asked <= have, title


def test_dashboard_panels_fit_the_grid_and_use_the_chosen_source() -> None:
    taken: set[tuple[int, int]] = set()
    every = list(panels(dashboard()["panels"]))
    assert len({panel["id"] for panel in every}) == len(every)
    for panel in every:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["description"].endswith(".")
    variables = {one["name"] for one in dashboard()["templating"]["list"]}
    asked = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()))) - {"__rate_interval", "__interval", "__all"}
    assert asked == variables


def test_dashboard_queries_parse_in_prometheus(tmp_path: Path) -> None:
    written = [
        {"record": f"query:{number}", "expr": re.sub(r"\$__(rate_)?interval", "1m", expr)}
        for number, (_, expr, _) in enumerate(queries())
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": written}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, said(done)


def test_alerts_query_existing_metrics_and_say_what_to_do() -> None:
    assert [(rule["alert"], fault) for rule in rules() for fault in faults(rule["expr"])] == []
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["description"].endswith(".")
        named = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        by = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
        metrics = [metric_of(name) for name in re.findall(r"\bsmetric_\w+", rule["expr"])]
        have = TARGET | {label for metric in metrics if metric is not None for label in metric.labels}
        if rule["expr"].startswith(("sum by", "histogram_quantile")):
            have = {label for listed in by for label in re.findall(r"\w+", listed)}
        assert named <= have, rule["alert"]


def test_alerts_each_have_a_case_that_fires_them() -> None:
    cases = (PROMETHEUS / "smetric.rules.test.yml").read_text()
    assert [rule["alert"] for rule in rules() if f'alertname="{rule["alert"]}"' not in cases] == []


def test_alerts_test_series_exist_in_router() -> None:
    for case in yaml.safe_load((PROMETHEUS / "smetric.rules.test.yml").read_text())["tests"]:
        for series in case["input_series"]:
            name, _, labels = series["series"].partition("{")
            if name == "up":
                continue
            metric = metric_of(name)
            assert metric is not None, name
            given = set(re.findall(r'(\w+)="', labels)) - {"le"}
            assert given == {"job", "router", *metric.labels}, series["series"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "smetric.rules.yml"),
        ("test", "rules", "smetric.rules.test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_alerts_load_in_prometheus_and_pass_their_tests(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, said(done)


def test_metrics_names_pass_promtool() -> None:
    settings = Settings(instances=(InstanceSettings(url="http://127.0.0.1:1", id="a"),))
    page = generate_latest(Application(settings, environ={}).metrics.registry).decode()
    done = promtool("check", "metrics", text=page)
    assert done.returncode == 0, said(done)


def test_collector_samples_by_existing_attributes_and_outcomes() -> None:
    sampling = yaml.safe_load((EXAMPLES / "tracing" / "collector.yml").read_text())["processors"]["tail_sampling"]
    types = {attribute.name: attribute.type for attribute in names.ATTRIBUTES}
    asked = {"string_attribute": {"string"}, "numeric_attribute": {"int", "double"}, "boolean_attribute": {"bool"}}
    for policy in sampling["policies"]:
        about = policy[policy["type"]]
        if "key" in about:
            assert types[about["key"]] in asked[policy["type"]], policy["name"]
        assert set(about.get("values", [])) <= set(names.OUTCOMES) - names.ORDINARY
